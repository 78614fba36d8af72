"""Which LLM plans, and what it may spend. Read from the environment in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from researcher.refusals import PlanningRefused

PREFIX = "RESEARCHER_LLM_"
_WHO, _WHOLE = ("model", "base_url", "api_key"), ("max_tokens", "answer_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSettings:
    """An OpenAI-compatible endpoint, a swarm server included. Each field is read from `RESEARCHER_LLM_` and its name.

    max_tokens, max_cost: of one study's planning, prompts and answers together. price_in, price_out: money per million
    tokens, for endpoints that do not state the cost of a call. patience_s: how long an outage is waited out. answer_tokens: the
    longest answer, thoughts of a reasoning model included.
    """

    model: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 200_000
    max_cost: float | None = None
    price_in: float | None = None
    price_out: float | None = None
    patience_s: float = 6 * 3600.0
    answer_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.answer_tokens < 1:
            raise ValueError(f"{PREFIX}ANSWER_TOKENS must be at least 1, got {self.answer_tokens}")
        if self.max_cost is not None and self.price_in is None and self.price_out is None:
            raise ValueError(
                f"a cost cap needs prices: set {PREFIX}PRICE_IN and {PREFIX}PRICE_OUT (per million tokens)"
            )


def llm_settings(environ: Mapping[str, str]) -> LlmSettings | None:
    """Settings from `RESEARCHER_LLM_*`; None if no LLM is configured.

    Raises: PlanningRefused for a missing or invalid setting.
    """
    names = [each.name for each in fields(LlmSettings)]
    given = {name: text for name in names if (text := environ.get(PREFIX + name.upper()))}
    configured = [PREFIX + name.upper() for name in _WHO if name in given]
    if not configured:
        return None
    if "model" not in given:
        raise PlanningRefused(
            f"a planner LLM is configured without its name; set {PREFIX}MODEL, or unset {', '.join(configured)}"
        )
    read: dict[str, Any] = {name: text if name in _WHO else _number(name, text) for name, text in given.items()}
    try:
        return LlmSettings(**read)
    except ValueError as error:
        raise PlanningRefused(str(error)) from error


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise PlanningRefused(
            f"{PREFIX}{name.upper()}={text!r} is not a number; give one that is not negative, or unset it"
        )
    return int(value) if name in _WHOLE else value
