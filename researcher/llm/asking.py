"""Calls an LLM within limits: waits out outages, records every raw answer, and caps tokens and cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from foundation.clock import Clock
from researcher.llm.endpoint import Endpoint, LlmError, LlmOutage, LlmSettings, LlmSpent, LlmUnusable
from researcher.models import LlmCall

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
_LETTERS_PER_TOKEN = 3
"""Assumed characters per token, a cautious estimate for tokens that the endpoint does not count."""

Keep = Callable[[LlmCall], None]
Tell = Callable[[str], None]


@dataclass(slots=True)
class Purse:
    """What a study has spent on LLMs, over all askers. `held_tokens` and `held_cost` are the most that open calls may still cost."""

    tokens: int = 0
    cost: float = 0.0
    held_tokens: int = 0
    held_cost: float = 0.0

    @classmethod
    def of(cls, calls: Iterable[LlmCall]) -> Self:
        """Return the purse after these calls."""
        paid = [(call.prompt_tokens + call.completion_tokens, call.cost or 0.0) for call in calls]
        return cls(sum(tokens for tokens, _ in paid), sum(cost for _, cost in paid))

    @contextmanager
    def holding(self, tokens: int, cost: float) -> Iterator[None]:
        self.held_tokens += tokens
        self.held_cost += cost
        try:
            yield
        finally:
            self.held_tokens -= tokens
            self.held_cost -= cost


class KeptAnswers:
    """An endpoint that replays answers from before an interruption, and sends only new requests."""

    def __init__(self, endpoint: Endpoint, calls: Iterable[LlmCall]) -> None:
        self._endpoint = endpoint
        self._kept = [(call.request, call.answer) for call in calls if call.answer is not None]

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded answer to this request, else ask the endpoint. Raises: LlmError."""
        kept = next((answer for asked, answer in self._kept if asked == request), None)
        return await self._endpoint.answer(request) if kept is None else kept

    def gave(self, call: LlmCall) -> bool:
        """Return whether this call was replayed."""
        return (call.request, call.answer) in self._kept


class Asker:
    """Sends requests to one LLM and records them.

    Args:
        keep: receives every call, answered or not.
        tell: receives a line whenever an outage is waited out.
        purse: the spending that all askers of one study share.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LlmSettings,
        clock: Clock,
        *,
        keep: Keep = lambda _: None,
        tell: Tell = lambda _: None,
        purse: Purse | None = None,
    ) -> None:
        self._endpoint = endpoint
        self.settings = settings
        self._clock = clock
        self._keep = keep
        self._tell = tell
        self.purse = purse or Purse()

    async def ask(self, purpose: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the raw answer. `request` is a chat completion; model and answer limit default to the settings.

        Raises: LlmRefused; LlmUnusable, also when an outage exceeds the patience; LlmSpent.
        """
        limits = {"model": self.settings.model, "max_completion_tokens": self.settings.answer_tokens}
        request, pause_s = {**limits, **request}, FIRST_PAUSE_S
        deadline = self._clock.monotonic() + self.settings.patience_s
        with self.purse.holding(*self._most(request)):
            while True:
                began = self._clock.monotonic()
                try:
                    answer = await self._endpoint.answer(request)
                except LlmError as error:
                    self._record(purpose, request, began, None, str(error)[:4000])
                    if not isinstance(error, LlmOutage):
                        raise
                    wait_s = min(LONGEST_PAUSE_S, max(pause_s, error.retry_after_s or 0.0))
                    if self._clock.monotonic() + wait_s > deadline:
                        lasting = _lasting(self.settings.patience_s)
                        said = f"no answer from the planner LLM for {lasting}; the last error: {error}"
                        raise LlmUnusable(said) from error
                    self._tell(f"the planner LLM does not answer ({error}); asking again in {wait_s:.0f} s")
                    await self._clock.sleep(wait_s)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                else:
                    self._record(purpose, request, began, answer, None)
                    return answer

    def _record(
        self, purpose: str, request: dict[str, Any], began: float, answer: dict[str, Any] | None, error: str | None
    ) -> None:
        asked, said = (0, 0) if answer is None else _counted(request, answer)
        cost = self._price(asked, said, answer)
        self.purse.tokens += asked + said
        self.purse.cost += cost or 0.0
        self._keep(
            LlmCall(
                purpose=purpose,
                model=self.settings.model,
                request=request,
                answer=answer,
                error=error,
                prompt_tokens=asked,
                completion_tokens=said,
                cost=cost,
                latency_s=self._clock.monotonic() - began,
                at=self._clock.now(),
            )
        )

    def _most(self, request: dict[str, Any]) -> tuple[int, float]:
        """Return the maximum tokens and money that the call may cost, to reserve them before the call. Raises: LlmSpent."""
        asked, said, purse = tokens_of(request), self.settings.answer_tokens, self.purse
        tokens, cost, most = asked + said, self._price(asked, said, None) or 0.0, self.settings.max_cost
        past = "the next request could exceed the limit of"
        if purse.tokens + purse.held_tokens + tokens > self.settings.max_tokens:
            raise LlmSpent(f"{past} {self.settings.max_tokens} tokens; raise RESEARCHER_LLM_MAX_TOKENS", "tokens")
        if most is not None and purse.cost + purse.held_cost + cost > most:
            raise LlmSpent(f"{past} {most:g} on cost; raise RESEARCHER_LLM_MAX_COST", "cost")
        return tokens, cost

    def _price(self, asked: int, said: int, answer: dict[str, Any] | None) -> float | None:
        """Return the cost of a call: as the endpoint states it, else at the configured prices."""
        usage = (answer or {}).get("usage")
        stated = usage.get("cost") if isinstance(usage, dict) else None
        if isinstance(stated, int | float) and not isinstance(stated, bool) and 0 <= stated < float("inf"):
            return float(stated)
        if self.settings.price_in is None and self.settings.price_out is None:
            return None
        return (asked * (self.settings.price_in or 0.0) + said * (self.settings.price_out or 0.0)) / 1e6


def _counted(request: dict[str, Any], answer: dict[str, Any]) -> tuple[int, int]:
    """Return prompt and completion tokens, estimated from the number of characters if the endpoint does not count them."""
    counts = answer.get("usage")
    asked, said = (
        counts.get(name) if isinstance(counts, dict) else None for name in ("prompt_tokens", "completion_tokens")
    )
    return (
        asked if type(asked) is int and asked >= 0 else tokens_of(request),
        said if type(said) is int and said >= 0 else tokens_of(answer.get("choices", answer)),
    )


def _lasting(seconds: float) -> str:
    """Format a duration for people: `0.5 s`, `3 s`, `10 min`, `6 h`."""
    for unit, length_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def tokens_of(what: Any) -> int:
    """Estimate a value's tokens in a request, cautiously: a third of its characters as JSON."""
    return len(json.dumps(what, default=str)) // _LETTERS_PER_TOKEN + 1
