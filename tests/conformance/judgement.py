"""Was an episode recorded as it was sampled, and does its trace hold together? Pure: a trace, a witness's notes, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.protocol.episodes import RecordedCall
from tests.conformance.frameworks import Framework
from tests.conformance.witness import Seen


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended, and what it said: `told` is its last line on stdout, `error` the last of its stderr."""

    code: int
    told: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return self.code == 0


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What became of one framework. Conforms when nothing is in `faults`."""

    framework: str
    version: str
    calls: int
    timelines: int
    forks: dict[str, int]
    witnessed: bool
    """False: nothing stood beside vLLM, so recorded ids were compared with nothing but each other."""
    swarm: Outcome
    bare: Outcome | None
    faults: list[str] = field(default_factory=list)

    @property
    def conforms(self) -> bool:
        return not self.faults

    @property
    def same_answers(self) -> bool | None:
        """Whether bare vLLM led to the same last words; None where it was not asked."""
        return None if self.bare is None else self.bare.told == self.swarm.told


def judge(
    framework: Framework,
    version: str,
    calls: Sequence[RecordedCall],
    seen: Sequence[Seen] | None,
    swarm: Outcome,
    bare: Outcome | None,
) -> Judgement:
    """seen: what the witness noted of this episode; None where there was no witness."""
    forks = Counter(call.fork_cause for call in calls if call.fork_cause)
    timelines = len(leaves(calls)) - forks.total()
    faults = [
        *_fault_of_outcomes(swarm, bare),
        *faults_of_record(calls),
        *([] if seen is None else faults_against(seen, calls)),
        *_faults_of_shape(framework, calls, timelines, forks),
    ]
    return Judgement(
        framework=framework.name,
        version=version,
        calls=len(calls),
        timelines=timelines,
        forks=dict(forks),
        witnessed=seen is not None,
        swarm=swarm,
        bare=bare,
        faults=faults,
    )


def leaves(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls that no other call continues: the ends of the timelines."""
    continued = {call.parent_call_id for call in calls}
    return [call for call in calls if call.call_id not in continued]


def _fault_of_outcomes(swarm: Outcome, bare: Outcome | None) -> list[str]:
    """The script must end well; where bare vLLM fails it too, the server is not to blame, but nothing was shown."""
    if bare is not None and bare.succeeded != swarm.succeeded:
        ours, theirs = ("succeeds", "fails") if swarm.succeeded else ("fails", "succeeds")
        return [f"the script {ours} on the swarm server and {theirs} on bare vLLM: {swarm.error or bare.error}"]
    return [] if swarm.succeeded else [f"the script fails: {swarm.error}"]


def faults_of_record(calls: Sequence[RecordedCall]) -> list[str]:
    """Of one episode's calls: each has all that training needs, and continues the one that it names."""
    by_id = {call.call_id: call for call in calls}
    faults = []
    for call in calls:
        name = f"call {call.index} ({call.dialect})"
        if not call.sampled_ids or len(call.sampled_ids) != len(call.logprobs):
            faults.append(f"{name}: {len(call.sampled_ids)} sampled ids and {len(call.logprobs)} log-probabilities")
        if not call.versions or call.versions[-1].end != len(call.sampled_ids):
            faults.append(f"{name}: its weights versions do not cover its tokens")
        parent = by_id.get(call.parent_call_id or "")
        if call.parent_call_id and parent is None:
            faults.append(f"{name}: continues {call.parent_call_id}, which is not in the trace")
        if parent is not None:
            held = [*parent.prompt_ids, *parent.sampled_ids]
            if call.prompt_ids[: len(held)] != held:
                faults.append(f"{name}: does not begin with the tokens of the call that it continues")
    return faults


def faults_against(seen: Sequence[Seen], calls: Sequence[RecordedCall]) -> list[str]:
    """Recorded = sampled, as multisets of (prompt, answer). A call that was broken off may hold less than passed by."""
    left = Counter((choice.prompt_ids, choice.sampled_ids) for choice in seen)
    faults = []
    for call in calls:
        prompt, sampled = tuple(call.prompt_ids), tuple(call.sampled_ids)
        found = (prompt, sampled)
        if not call.complete and not left[found]:
            begun = (key for key in left if left[key] and key[0] == prompt and key[1][: len(sampled)] == sampled)
            found = next(begun, found)
        if left[found]:
            left[found] -= 1
        else:
            faults.append(f"call {call.index} ({call.dialect}): vLLM did not sample what is recorded")
    if missing := left.total():
        faults.append(f"vLLM sampled {missing} answers that are not recorded")
    return faults


def _faults_of_shape(
    framework: Framework, calls: Sequence[RecordedCall], timelines: int, forks: Counter[str]
) -> list[str]:
    faults = []
    if len(calls) < framework.calls:
        faults.append(f"{len(calls)} calls recorded, {framework.calls} expected at least")
    if framework.timelines is not None and timelines != framework.timelines:
        faults.append(f"{timelines} timelines, {framework.timelines} expected")
    for cause, count in sorted(forks.items()):
        cap = framework.forks.get(cause, 0)
        if count > cap:
            faults.append(f"{count} forks by {cause}, {cap} allowed")
    return faults
