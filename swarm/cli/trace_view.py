"""A trace as a reader wants it: each token with its text, its origin, and whether it carries loss. Draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.protocol.episodes import EpisodeTrace, RecordedCall


class Origin(StrEnum):
    """What a token is to training. Of these only `TRAINED` carries loss in the call it stands in."""

    PROMPT = "prompt"
    """Written by the template, the agent or a person."""
    ECHOED = "echoed"
    """Sampled by an earlier call, and trained there if at all."""
    TRAINED = "trained"
    UNTRAINED = "untrained"
    """Sampled by this call, which carries no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token. text: "" where an earlier token shows the characters that it is a part of."""

    token_id: int
    text: str
    origin: Origin
    logprob: float | None = None
    step: int | None = None
    """Of the weights that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where a call leaves the timelines before it. call: the index of the nearest one; at: tokens shared with it."""

    cause: str
    call: int | None
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call. inherited: how many tokens at its beginning are those of the call that it continues (`parent`)."""

    call: RecordedCall
    tokens: list[TokenView]
    inherited: int
    parent: int | None
    fork: Fork | None
    untrained: str | None

    @property
    def new(self) -> list[TokenView]:
        return self.tokens[self.inherited :]

    @property
    def sampled(self) -> list[TokenView]:
        return self.tokens[len(self.call.prompt_ids) :]

    @property
    def steps(self) -> list[int]:
        """Of the weights that sampled it, ascending."""
        return sorted({span.version.step for span in self.call.versions})


def views(trace: EpisodeTrace) -> list[CallView]:
    """The calls of an episode, in the order in which they were recorded."""
    made: dict[str, CallView] = {}
    for call in trace.calls:
        parent = made.get(call.parent_call_id or "")
        why = trace.untrained.get(call.call_id)
        tokens = list(_tokens(call, parent, trained=why is None, vocabulary=trace.vocabulary))
        made[call.call_id] = CallView(
            call=call,
            tokens=tokens,
            inherited=0 if parent is None else len(parent.tokens),
            parent=None if parent is None else parent.call.index,
            fork=_fork(call, [view.call for view in made.values()]),
            untrained=why,
        )
    return list(made.values())


def _tokens(
    call: RecordedCall, parent: CallView | None, *, trained: bool, vocabulary: Mapping[str, str]
) -> Iterator[TokenView]:
    earlier = [] if parent is None else parent.tokens
    texts = _texts(call.prompt_ids, vocabulary)
    for position, (token, text) in enumerate(zip(call.prompt_ids, texts, strict=True)):
        sampled = position < len(earlier) and earlier[position].origin is not Origin.PROMPT
        yield TokenView(token_id=token, text=text, origin=Origin.ECHOED if sampled else Origin.PROMPT)
    origin = Origin.TRAINED if trained else Origin.UNTRAINED
    steps = {at: span.version.step for span in call.versions for at in range(span.start, span.end)}
    for at, (token, text) in enumerate(zip(call.sampled_ids, _texts(call.sampled_ids, vocabulary), strict=True)):
        logprob = call.logprobs[at] if at < len(call.logprobs) else None
        yield TokenView(token_id=token, text=text, origin=origin, logprob=logprob, step=steps.get(at))


def _texts(ids: Sequence[int], vocabulary: Mapping[str, str]) -> list[str]:
    """Text by token. A character made of several tokens stands with the first of them."""
    texts = [vocabulary.get(str(token), f"[{token}]") for token in ids]
    start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and "�" in texts[end]:
            end += 1
        whole = vocabulary.get(",".join(map(str, ids[start:end]))) if end - start > 1 else None
        if whole is not None:
            texts[start:end] = [whole, *[""] * (end - start - 1)]
        start = max(end, start + 1)
    return texts


def _fork(call: RecordedCall, earlier: Sequence[RecordedCall]) -> Fork | None:
    if call.fork_cause is None:
        return None
    shared = [(_shared([*other.prompt_ids, *other.sampled_ids], call.prompt_ids), other.index) for other in earlier]
    at, index = max(shared, default=(0, None))
    return Fork(cause=call.fork_cause, call=index, at=at)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
