"""Which LLM plans, and what it may spend. Read from the environment in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from researcher.refusals import PlanningRefused

PREFIX = "RESEARCHER_LLM_"
MAX_TOKENS, ANSWER_TOKENS, PATIENCE_S = 200_000, 8192, 6 * 3600.0
_NUMBERS = ("MAX_TOKENS", "ANSWER_TOKENS", "MAX_COST", "PRICE_IN", "PRICE_OUT", "PATIENCE_S")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSettings:
    """An OpenAI-compatible endpoint, a swarm server included.

    max_tokens, max_cost: of one study's planning, prompts and answers together. price_in, price_out: money per million
    tokens, for endpoints that do not state the cost of a call. patience_s: how long an outage is waited out. answer_tokens: the
    longest answer, thoughts of a reasoning model included.
    """

    model: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = MAX_TOKENS
    max_cost: float | None = None
    price_in: float | None = None
    price_out: float | None = None
    patience_s: float = PATIENCE_S
    answer_tokens: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        if self.answer_tokens < 1:
            raise ValueError(f"{PREFIX}ANSWER_TOKENS must be at least 1, got {self.answer_tokens}")
        if self.max_cost is not None and self.price_in is None and self.price_out is None:
            raise ValueError(
                f"a cost cap needs prices: set {PREFIX}PRICE_IN and {PREFIX}PRICE_OUT (per million tokens)"
            )


def llm_settings(environ: Mapping[str, str]) -> LlmSettings | None:
    """From `RESEARCHER_LLM_*`; None where no LLM is configured.

    Raises: PlanningRefused for a setting that is missing or no number.
    """
    given = {name: environ[PREFIX + name] for name in ("BASE_URL", "API_KEY", "MODEL") if environ.get(PREFIX + name)}
    if not given:
        return None
    if "MODEL" not in given:
        raise PlanningRefused(
            f"a planner LLM is configured without its name; set {PREFIX}MODEL, or unset {', '.join(PREFIX + n for n in given)}"
        )
    numbers = {name: _number(PREFIX + name, environ[PREFIX + name]) for name in _NUMBERS if environ.get(PREFIX + name)}
    try:
        return LlmSettings(
            model=given["MODEL"],
            base_url=given.get("BASE_URL"),
            api_key=given.get("API_KEY"),
            max_tokens=int(numbers.get("MAX_TOKENS", MAX_TOKENS)),
            answer_tokens=int(numbers.get("ANSWER_TOKENS", ANSWER_TOKENS)),
            max_cost=numbers.get("MAX_COST"),
            price_in=numbers.get("PRICE_IN"),
            price_out=numbers.get("PRICE_OUT"),
            patience_s=numbers.get("PATIENCE_S", PATIENCE_S),
        )
    except ValueError as error:
        raise PlanningRefused(str(error)) from error


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise PlanningRefused(f"{name}={text!r} is no number; give one that is not negative, or unset it")
    return value
