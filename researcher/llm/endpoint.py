"""An LLM's endpoint: its settings and limits, and the only interface to it. Raw JSON in, raw JSON out.

LlmError
├── LlmOutage     no answer now: wait and ask again
├── LlmRefused    the endpoint does not accept this request, perhaps because it does not know the form: ask in another form
└── LlmUnusable   no request will succeed: wrong key, no such model, patience exhausted
    └── LlmSpent  the next answer could exceed a limit on tokens or cost
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from foundation.logs import redact
from foundation.strict import StrictModel, explain, misfit
from researcher.refusals import PlanningRefused

PREFIX = "RESEARCHER_LLM_"
_WHO = ("model", "base_url", "api_key")
_TIMEOUT_S = 300.0
_PASSING = (408, 409, 425, 429)
_HOPELESS = (401, 403, 404)


def _whole(given: float | str) -> float | str:
    """Convert text such as `2e5` to an integer. Other values are returned unchanged and validated by pydantic."""
    try:
        number = float(given)
    except ValueError:
        return given
    return int(number) if number.is_integer() else given


_Tokens = Annotated[int, BeforeValidator(_whole)]
_Amount = Annotated[float, Field(ge=0)]


class LlmSettings(StrictModel):
    """Settings of an OpenAI-compatible endpoint, which may be a swarm server. `RESEARCHER_LLM_<FIELD>` sets each field.

    Args:
        max_tokens, max_cost: limits on one study's planning, prompts and answers together.
        price_in, price_out: money per million tokens, for endpoints that do not state the cost of a call.
        patience_s: how long to wait out an outage.
        answer_tokens: maximum length of an answer, including a reasoning model's thoughts.
    """

    model: str
    base_url: str | None = None
    api_key: Annotated[str | None, Field(repr=False)] = None
    max_tokens: Annotated[_Tokens, Field(ge=0)] = 200_000
    max_cost: _Amount | None = None
    price_in: _Amount | None = None
    price_out: _Amount | None = None
    patience_s: _Amount = 6 * 3600.0
    answer_tokens: Annotated[_Tokens, Field(ge=1)] = 8192

    def changed(self, **fields: Any) -> LlmSettings:
        """Return a copy with other values for these fields. Raises: ValidationError if the fields do not fit together."""
        return LlmSettings(**(dict(self) | fields))

    @model_validator(mode="after")
    def _a_cost_cap_has_prices(self) -> Self:
        if self.max_cost is not None and self.price_in is None and self.price_out is None:
            raise misfit({"max_cost": f"needs prices: set {PREFIX}PRICE_IN and {PREFIX}PRICE_OUT (per million tokens)"})
        return self


def llm_settings(environ: Mapping[str, str]) -> LlmSettings | None:
    """Read the settings from `RESEARCHER_LLM_*`; None if no LLM is configured.

    Raises: PlanningRefused for a missing or invalid setting.
    """
    given = {name: text for name in LlmSettings.model_fields if (text := environ.get(PREFIX + name.upper()))}
    configured = [PREFIX + name.upper() for name in _WHO if name in given]
    if not configured:
        return None
    if "model" not in given:
        raise PlanningRefused(
            f"a planner LLM is configured without a model name; set {PREFIX}MODEL, or unset {', '.join(configured)}"
        )
    try:
        return LlmSettings.model_validate(given)
    except ValidationError as error:
        problems = [f"{PREFIX}{each.field.upper()} {each.problem}" for each in explain(error, LlmSettings)]
        raise PlanningRefused("; ".join(problems)) from error


class LlmError(Exception):
    """A request to the LLM failed. The text contains no key."""


class LlmOutage(LlmError):
    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class LlmRefused(LlmError):
    pass


class LlmUnusable(LlmError):
    pass


class LlmSpent(LlmUnusable):
    def __init__(self, text: str, kind: Literal["tokens", "cost"]) -> None:
        super().__init__(text)
        self.kind = kind


class Endpoint(Protocol):
    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the raw answer. Anything but a JSON object becomes {"unreadable": text}.

        Raises: LlmError.
        """


class OpenAIEndpoint:
    """An endpoint called through the `openai` SDK, without the SDK's retries; the caller waits out outages."""

    def __init__(self, settings: LlmSettings) -> None:
        # Imported here: the SDK takes most of a second, and studies without an LLM never need it.
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            base_url=settings.base_url, api_key=settings.api_key or "none", max_retries=0, timeout=_TIMEOUT_S
        )

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from openai import APIConnectionError, APIStatusError

        try:
            raw = await self._client.chat.completions.with_raw_response.create(**request)
        except APIConnectionError as error:
            raise LlmOutage(redact(str(error))) from error
        except APIStatusError as error:
            raise _by_status(
                error.status_code, redact(str(error)), error.response.headers.get("retry-after")
            ) from error
        try:
            found = json.loads(raw.text)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"unreadable": raw.text}


def _by_status(status: int, text: str, retry_after: str | None) -> LlmError:
    if status in _PASSING or status >= 500:
        return LlmOutage(text, float(retry_after) if retry_after and retry_after.isdigit() else None)
    # Routers answer 404 if none of their endpoints for a model takes tools.
    no_tools = status == 404 and "tool" in text.lower()
    return LlmUnusable(text) if status in _HOPELESS and not no_tools else LlmRefused(text)
