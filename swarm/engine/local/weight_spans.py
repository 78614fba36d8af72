"""Which weights sampled which token of a call, when the weights change while calls are in flight.

Pure bookkeeping. The inference engine is paused for a change of weights; what each call had sampled by then is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from swarm.protocol.episodes import VersionSpan, WeightsVersion


@dataclass(slots=True)
class CallInFlight:
    """One request to the engine. `changes`: from this token on (by choice), these weights."""

    request_id: str
    first_version: WeightsVersion
    changes: list[tuple[dict[int, int], WeightsVersion]] = field(default_factory=list)
    _unchanged: dict[int, VersionSpan] = field(default_factory=dict)
    """By number of tokens: the span of an event that the first weights sampled, made once for a stream's thousands."""

    def spans(self, choice: int, start: int, end: int) -> list[VersionSpan]:
        """Versions of the sampled tokens [start, end) of a choice; positions count from `start`, as 0."""
        if not self.changes:
            return [self._first_span(end - start)] if end > start else []
        spans: list[VersionSpan] = []
        version, begin = self.first_version, start
        for sampled_before, changed_to in self.changes:
            at = min(max(sampled_before.get(choice, 0), begin), end)
            if at > begin:
                spans.append(VersionSpan(start=begin - start, end=at - start, version=version))
            version, begin = changed_to, at
        if end > begin:
            spans.append(VersionSpan(start=begin - start, end=end - start, version=version))
        return spans

    def _first_span(self, size: int) -> VersionSpan:
        known = self._unchanged.get(size)
        if known is None:
            known = self._unchanged[size] = VersionSpan(start=0, end=size, version=self.first_version)
        return known


class WeightSpans:
    """All calls in flight, and the weights that are served now."""

    def __init__(self, version: WeightsVersion) -> None:
        self.version = version
        self._calls: dict[str, CallInFlight] = {}

    def begin(self, request_id: str) -> CallInFlight:
        call = CallInFlight(request_id, self.version)
        self._calls[request_id] = call
        return call

    def end(self, call: CallInFlight) -> None:
        self._calls.pop(call.request_id, None)

    def change(self, version: WeightsVersion, sampled_counts: dict[str, int]) -> None:
        """The weights changed. sampled_counts: what each engine request had sampled before, by the engine's own id.

        A call that the engine does not hold had not begun: its tokens will all come from the new weights. (One that it had
        finished was answered while it was paused, before this was called.)
        """
        found: dict[str, dict[int, int]] = {}
        for engine_id, count in sampled_counts.items():
            choice, request_id = _own_id(engine_id)
            found.setdefault(request_id, {})[choice] = count
        for call in self._calls.values():
            call.changes.append((found.get(call.request_id, {}), version))
        self.version = version


_ENGINE_ID = re.compile(r"(?:(?P<choice>\d+)_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<text>.+)-0)-[0-9a-f]{8}")


def _own_id(engine_id: str) -> tuple[int, str]:
    """`2_chatcmpl-<ours>-<random>` is choice 2 of our request; without a number there is one choice alone.

    A text completion is `cmpl-<ours>-0-<random>`: 0 is its first and only prompt.
    """
    match = _ENGINE_ID.fullmatch(engine_id)
    if match is None:
        return 0, engine_id
    return int(match["choice"] or 0), match["chat"] or match["text"]
