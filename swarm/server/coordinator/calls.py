"""A call between its opening and its close, as the gateway holds it, and what an episode's calls say of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foundation.nearest import nearest
from foundation.strict import FieldError
from swarm.protocol.episodes import LedgerEntry, RecordedCall, WeightsVersion
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import RunSpec


def refuse_misspelt_agents(calls: Sequence[RecordedCall], rewards: Mapping[str, float] | None) -> None:
    """An agent that was not called this time may be rewarded all the same; a name that only resembles one that was is refused.

    Codes: invalid_spec.
    """
    called = {call.agent for call in calls if call.agent}
    for name in rewards or {}:
        meant = None if name in called else nearest(name, called - set(rewards or {}))
        if meant is not None:
            detail = f"no call of agent {name!r} in this episode, and no reward for {meant!r}: did you mean that one?"
            fault = FieldError(field=f"agent_rewards.{name}", problem="no such agent was called", nearest=meant)
            raise invalid_spec([fault], detail)


@dataclass(slots=True)
class Ending:
    """Whether an episode is over, or about to end, or the server's work is. heard: to be called once it is."""

    over: bool = False
    heard: set[Callable[[], None]] = field(default_factory=set)

    def come(self) -> None:
        if not self.over:
            self.over = True
            for hear in tuple(self.heard):
                hear()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """What the gateway needs to answer one LLM request. Hand it back to `close_call`, whatever happened."""

    episode_id: str
    lease: str
    entry: LedgerEntry
    spec: RunSpec
    """At the episode's config version."""
    weights_version: WeightsVersion
    """What is served now. An update may fall into the call; its spans then say so."""
    earlier: tuple[RecordedCall, ...]
    """Calls of this episode that are recorded so far, in the order they closed."""
    index: int
    """The how-manieth call of the episode this is, from 0, in the order of opening."""
    seed: int
    """For the sampler, where the request states none: depends on run, task, group, slot and index alone."""
    opened_at: float
    """Unix time."""
    ending: Ending
    """Of the episode."""
