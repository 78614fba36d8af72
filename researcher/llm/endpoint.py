"""One seam to an LLM: a chat-completions request as JSON in, the raw answer as JSON out.

LlmError
├── LlmOutage     nobody answers, or not now: wait and ask again
├── LlmRefused    this request will not do (a form that the endpoint does not know): ask in another form
└── LlmUnusable   no request will do: wrong key, no such model, patience at its end
    └── LlmSpent  the next answer could go past a cap on tokens or cost
"""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

from foundation.logs import redact
from researcher.llm.settings import LlmSettings

_TIMEOUT_S = 300.0
_PASSING = (408, 409, 425, 429)
_HOPELESS = (401, 403, 404)


class LlmError(Exception):
    """Asking the LLM came to nothing. The text holds no key."""


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
        """The raw answer. Anything but a JSON object becomes {"unreadable": text}.

        Raises: LlmError.
        """


class OpenAIEndpoint:
    """Uses the `openai` SDK without its retries; the caller waits out outages."""

    def __init__(self, settings: LlmSettings) -> None:
        # Here and not above: the SDK takes most of a second, and studies without an LLM never need it.
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
    # Routers answer 404 where none of their endpoints for a model takes tools.
    no_tools = status == 404 and "tool" in text.lower()
    return LlmUnusable(text) if status in _HOPELESS and not no_tools else LlmRefused(text)
