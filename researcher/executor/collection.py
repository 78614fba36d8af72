"""Reads the results of a trial from the server's records: the steps of the run and the episodes of the ledger.

Nothing a client prints is used. Either the records show a complete trial, or there is no result.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foundation.logs import redact
from researcher.executor.errors import EvidenceMissing
from researcher.executor.sampling import sample
from researcher.instruments.instrument import (
    HELDOUT_REWARD,
    HELDOUT_SUCCESS,
    Metric,
    heldout_outcome,
    interim_outcome,
    trained_outcome,
)
from researcher.instruments.instrument import elsewhere as part_of
from researcher.models import (
    LONGEST_TRACEBACK,
    Attrition,
    EpisodeAttempts,
    HostedModel,
    SampledEpisode,
    TrialEvidence,
    together,
)
from swarm.client import SwarmClient
from swarm.client.interim import interim_id
from swarm.client.losses import CHARGED, Tries, moments
from swarm.client.trial import client_id, elsewhere_id
from swarm.models.catalogue import hosted_name
from swarm.protocol.blueprint import Elsewhere, TrialBlueprint
from swarm.protocol.episodes import COUNTED, Cause, DropReason, EpisodeState, LedgerEntry
from swarm.protocol.status import RunReport, StepMetrics

_OPEN = (EpisodeState.RUNNING, EpisodeState.PREPARED)
_UNSTATED = {
    DropReason.ABORTED: Cause.ROLLOUT,
    DropReason.TEAM_ABORTED: Cause.ROLLOUT,
    DropReason.NO_CALLS: Cause.ROLLOUT,
    DropReason.EXPIRED: Cause.CLIENT,
    DropReason.SERVER_RESTARTED: Cause.SERVER,
    DropReason.RUN_ENDED: Cause.SERVER,
    DropReason.SUPERSEDED: Cause.SERVER,
}
"""Causes of lost attempts by drop reason, for older servers, which recorded no causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A trial's results: series as in `researcher.models.TrialRecord`, and evidence of what really ran."""

    series: dict[str, list[tuple[int, float]]]
    evidence: TrialEvidence
    tokens: int
    """Prompt and sampled tokens of all calls of the trial's runs."""
    episodes: tuple[SampledEpisode, ...] = ()
    """A few of the trial's episodes, with their calls. For a whole trial, only episodes of the instrument's own model."""
    code_versions: dict[str, int] = field(default_factory=dict)
    """Number of episodes that ended with a reward that counts, by version of the client's code."""


async def collect(
    swarm: SwarmClient, blueprint: TrialBlueprint, metrics: Sequence[Metric] = (), *, partner: bool = False
) -> Collected:
    """Collect everything that was recorded about a finished trial.

    Args:
        metrics: the plan's metrics. They name the values that episodes must report.
        partner: whether the run trains another model than the instrument's own. That model may have had no call in a held-out
            episode; the team's result still counts, but such an episode says nothing about this model.
    Raises: EvidenceMissing when the run is not complete, or when steps, evaluation episodes or reported values are missing.
    """
    report = await swarm.run(blueprint.run_id)
    if report.status != "complete":
        raise EvidenceMissing(f"the run is {report.status} at step {report.step}: {report.reason or 'no reason given'}")
    entries = [entry async for entry in swarm.ledger(run_id=report.run_id)]
    own = [entry for entry in entries if entry.client_id == client_id(blueprint.trial_key)]
    series = _steps(report) | _evaluations(blueprint, own, report, metrics, partner=partner) | _trained(metrics, own)
    series |= interim_series(blueprint, entries, metrics, last=report.step)
    series["tokens_sampled"] = _sampled(entries, report.step)
    for each in blueprint.elsewhere:
        series |= _elsewhere(blueprint, each, entries, report.step)
    status = await swarm.status()
    hosted = HostedModel(
        name=hosted_name(status.model),
        fingerprint=status.model_fingerprint,
        dtype=status.engine.dtype,
        engine=status.engine.backend,
    )
    return Collected(
        series=series,
        evidence=TrialEvidence(
            spec=report.spec.model_dump(mode="json"),
            changes=[change.model_dump(mode="json") for change in report.changes if change.config_version > 1],
            parameters=dict(blueprint.parameters),
            train_tasks=_tasks(entries, "train"),  # of all clients: people's training episodes trained the model too
            heldout_tasks=_tasks(own, "eval"),
            model=hosted,
            joined=_joined(entries, client_id(blueprint.trial_key)),
            attrition=attrition(own),
        ),
        tokens=sum(entry.prompt_tokens + entry.sampled_tokens for entry in entries),
        episodes=await sample(swarm, [entry for entry in entries if not _is_elsewhere(blueprint, entry)]),
        code_versions=dict(Counter(entry.client_version for entry in own if _counts(entry))),
    )


async def collect_whole(
    swarm: SwarmClient, others: Mapping[str, SwarmClient], blueprint: TrialBlueprint, metrics: Sequence[Metric] = ()
) -> Collected:
    """Collect the results of all models of a trial. `others` are the servers of the further models, by role; the series of such
    a model are named `ROLE/name`.

    Raises: EvidenceMissing.
    """
    whole = await collect(swarm, blueprint, [metric for metric in metrics if metric.part is None])
    series, evidence, tokens = dict(whole.series), whole.evidence, whole.tokens
    roles, changes = {}, list(evidence.changes or [])
    joined = Counter(evidence.joined)
    lost = [evidence.attrition] if evidence.attrition is not None else []
    for role, run in blueprint.partners.items():
        try:
            asked = [metric for metric in metrics if metric.role == role]
            own = await collect(others[role], blueprint.model_copy(update={"run_id": run.run_id}), asked, partner=True)
        except EvidenceMissing as missing:
            raise EvidenceMissing(f"for the {role}: {missing}") from missing
        series |= {f"{role}/{name}": line for name, line in own.series.items()}
        roles[role] = own.evidence.spec or {}
        changes += own.evidence.changes or []
        joined += Counter(own.evidence.joined)
        lost += [own.evidence.attrition] if own.evidence.attrition is not None else []
        tokens += own.tokens
    if roles:
        found = {
            "roles": roles,
            "changes": changes,
            "joined": dict(joined) or None,
            "attrition": together(lost),
        }
        evidence = evidence.model_copy(update=found)
    return Collected(
        series=series,
        evidence=evidence,
        tokens=tokens,
        episodes=whole.episodes,
        code_versions=whole.code_versions,
    )


def _elsewhere(blueprint: TrialBlueprint, elsewhere: Elsewhere, entries: Sequence[LedgerEntry], last: int) -> Points:
    """Return the rewards and successes on another instrument's held-out tasks, as `_evaluation` does, but with names that include
    the instrument.

    `entries` is the run's ledger, `last` its last step. Raises: EvidenceMissing.
    """
    name, me = elsewhere.instrument, elsewhere_id(blueprint.trial_key, elsewhere.instrument)
    there = blueprint.model_copy(update={"heldout": elsewhere.heldout})
    try:
        found = _evaluation(
            there, [entry for entry in entries if entry.client_id == me], "after", last, (), partner=False
        )
    except EvidenceMissing as missing:
        raise EvidenceMissing(f"on {name}: {missing}") from missing
    return {f"{part_of(name)}/{series}": line for series, line in found.items()}


async def losses(swarm: SwarmClient, others: Mapping[str, SwarmClient], blueprint: TrialBlueprint) -> Attrition:
    """Count the trial's attempts at episodes so far, and those lost by cause, over the servers of all its models."""
    runs = [(swarm, blueprint.run_id), *((others[role], run.run_id) for role, run in blueprint.partners.items())]
    mine = client_id(blueprint.trial_key)
    parts = []
    for server, run_id in runs:
        parts.append(attrition([entry async for entry in server.ledger(run_id=run_id) if entry.client_id == mine]))
    return together(parts)


async def interim(
    swarm: SwarmClient, blueprint: TrialBlueprint, metrics: Sequence[Metric]
) -> tuple[list[tuple[str, int, float]], tuple[SampledEpisode, ...]]:
    """Return the held-out curves so far, as (name, step, value), oldest first; and sampled episodes, from the evaluations and from
    training at the step of the newest evaluation."""
    entries = [entry async for entry in swarm.ledger(run_id=blueprint.run_id, kind="eval")]
    series = interim_series(blueprint, entries, metrics)
    if not series:
        return [], ()
    newest = max(step for line in series.values() for step, _ in line)
    entries += [entry async for entry in swarm.ledger(run_id=blueprint.run_id, kind="train", step=newest)]
    found = [(name, step, value) for name, line in series.items() for step, value in line]
    return found, await sample(swarm, entries)


def interim_series(
    blueprint: TrialBlueprint, entries: Sequence[LedgerEntry], metrics: Sequence[Metric], *, last: int | None = None
) -> Points:
    """Return the held-out curves: means by optimizer step over the tasks of the interim evaluations, with equal weight per task.

    Each point comes from a complete evaluation of one step's weights, at most one in every `every` steps. Steps 0 and `last` get
    their points from the evaluations before and after training, over the same tasks. A curve is left out if an episode of any
    point does not report it. Without interim evaluations there are no curves. `entries` is the run's ledger.
    """
    asked, me = blueprint.heldout.interim, client_id(blueprint.trial_key)
    if asked is None:
        return {}
    ended = [entry for entry in entries if entry.reason is DropReason.EVAL and entry.reward is not None]
    ended.sort(key=lambda entry: (entry.claimed_at, entry.episode_id))
    whole: dict[int, list[LedgerEntry]] = {}
    for step, played in sorted(_by_step(ended, interim_id(me)).items()):
        first = list({entry.task_id: entry for entry in reversed(played)}.values())
        if len(first) >= min(asked.tasks, blueprint.heldout.tasks):
            whole.setdefault(step // asked.every, first)
    if not whole:
        return {}
    found = {played[0].claimed_step: played for played in whole.values() if played[0].claimed_step != last}
    tasks = {entry.task_id for played in found.values() for entry in played}
    own = _by_step(ended, me)
    for end in (0, last):
        around = [entry for entry in own.get(end, ()) if entry.task_id in tasks] if end is not None else []
        if end is not None and {entry.task_id for entry in around} == tasks:
            found[end] = around
    curves: Points = {HELDOUT_REWARD: [], HELDOUT_SUCCESS: []}
    curves |= {interim_outcome(name): [] for name in _names([each for each in metrics if each.role is None])}
    for step, played in sorted(found.items()):
        for name, line in curves.items():
            values = [(entry.task_id, _of_curve(entry, name)) for entry in played]
            known = [(task, value) for task, value in values if value is not None]
            if known and len(known) == len(values):
                line.append((step, _mean_of_tasks(known)))
    return {name: line for name, line in curves.items() if len(line) == len(found)}


def _by_step(entries: Sequence[LedgerEntry], client: str) -> dict[int, list[LedgerEntry]]:
    found: dict[int, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "eval" and entry.client_id == client:
            found[entry.claimed_step].append(entry)
    return found


def _of_curve(entry: LedgerEntry, name: str) -> float | None:
    if name == HELDOUT_REWARD:
        return entry.reward
    if name == HELDOUT_SUCCESS:
        return None if entry.success is None else float(entry.success)
    return entry.metrics.get(name.removeprefix(interim_outcome("")))


def _mean_of_tasks(values: Sequence[tuple[str, float]]) -> float:
    by_task: dict[str, list[float]] = defaultdict(list)
    for task, value in values:
        by_task[task].append(value)
    return math.fsum(math.fsum(each) / len(each) for each in by_task.values()) / len(by_task)


def points(steps: list[StepMetrics]) -> list[tuple[str, int, float]]:
    """Return the metrics of these steps as (name, step, value)."""
    return [(name, one.step, value) for one in steps for name, value in one.values.items()]


def _steps(report: RunReport) -> dict[str, list[tuple[int, float]]]:
    found = sorted(report.steps, key=lambda one: one.step)
    if [one.step for one in found] != list(range(1, report.step + 1)):
        raise EvidenceMissing(f"the run is at step {report.step}, but {len(found)} steps are recorded")
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, step, value in points(found):
        series[name].append((step, value))
    return dict(series)


def _sampled(entries: list[LedgerEntry], last: int) -> list[tuple[int, float]]:
    """Count the sampled tokens of training episodes, including dropped ones, by the step for which they were sampled."""
    tokens = Counter[int]()
    for entry in entries:
        if entry.kind == "train":
            tokens[min(entry.claimed_step + 1, last)] += entry.sampled_tokens
    return [(step, float(count)) for step, count in sorted(tokens.items())]


def _evaluations(
    blueprint: TrialBlueprint, own: list[LedgerEntry], report: RunReport, metrics: Sequence[Metric], *, partner: bool
) -> dict[str, list[tuple[int, float]]]:
    evaluations = (("before", 0), ("after", report.step))
    before, after = (_evaluation(blueprint, own, *when, metrics, partner=partner) for when in evaluations)
    return before | after


def _evaluation(
    blueprint: TrialBlueprint,
    own: list[LedgerEntry],
    when: str,
    step: int,
    metrics: Sequence[Metric],
    *,
    partner: bool,
) -> dict[str, list[tuple[int, float]]]:
    """Return the held-out rewards, successes and reported values under the weights of `step`.

    They are in task order, which is the same in all arms. `own` has the episodes of the trial's own client; people who join may
    evaluate other tasks.
    """
    tried: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in own:
        if entry.kind == "eval" and entry.claimed_step == step:
            tried[entry.task_id].append(entry)
    kept = _kept(blueprint, tried, when, partner=partner)
    rewards = [(index, entry.reward) for index, entry in kept.items()]
    successes = [(index, entry.success) for index, entry in kept.items()]
    series = {f"eval_reward_{when}": [(index, value) for index, value in rewards if value is not None]}
    series |= _evaluated(metrics, kept, when)
    known = [(index, float(value)) for index, value in successes if value is not None]
    return {**series, f"eval_success_{when}": known} if known else series


def _kept(
    blueprint: TrialBlueprint, tried: Mapping[str, list[LedgerEntry]], when: str, *, partner: bool
) -> dict[int, LedgerEntry]:
    """Return the episodes of one evaluation by index. The n-th task begins at index n times the number of episodes per task.

    `tried` has the attempts by task. Tasks that were set aside leave gaps, and so do episodes in which a partner was not called.
    Raises: EvidenceMissing when any other episode is missing, or when all are.
    """
    wanted = blueprint.heldout
    # A client that was killed during an evaluation may have run one episode too many.
    ended = {
        task: [entry for entry in entries if entry.reason is DropReason.EVAL][: wanted.episodes]
        for task, entries in sorted(tried.items())
    }
    whole = {task: entries for task, entries in ended.items() if entries}
    recorded, of = sum(map(len, whole.values())), wanted.tasks * wanted.episodes
    if recorded == of:
        ended = whole
    elif not (
        whole
        and len(ended) == wanted.tasks
        and all(
            len(entries) + (_uncalled(tried[task]) if partner else 0) >= wanted.episodes
            or _used_up(tried[task], blueprint.retries)
            for task, entries in ended.items()
        )
    ):
        raise EvidenceMissing(f"evaluation {when} training: {recorded} of {of} episodes are recorded")
    return {
        place * wanted.episodes + number: entry
        for place, entries in enumerate(ended.values())
        for number, entry in enumerate(entries)
    }


def _used_up(tried: Sequence[LedgerEntry], retries: int) -> bool:
    """Return whether the task lost so many attempts that the client gave it up, so that its missing episodes will never come."""
    charged = moments(entry for entry in tried if lost_to(entry) in CHARGED)
    deaths = moments(entry for entry in tried if lost_to(entry) is Cause.CLIENT)
    return Tries(charged=charged, deaths=deaths).used_up(retries)


def _uncalled(tried: Sequence[LedgerEntry]) -> int:
    """Count the team episodes that were committed although nobody called this model."""
    return sum(entry.reason is DropReason.NO_CALLS and lost_to(entry) is Cause.ROLLOUT for entry in tried)


def _tasks(entries: list[LedgerEntry], kind: str) -> list[str]:
    return sorted({entry.task_id for entry in entries if entry.kind == kind and _counts(entry)})


def _is_elsewhere(blueprint: TrialBlueprint, entry: LedgerEntry) -> bool:
    return any(entry.client_id == elsewhere_id(blueprint.trial_key, each.instrument) for each in blueprint.elsewhere)


def _joined(entries: list[LedgerEntry], mine: str) -> dict[str, int] | None:
    """For each other client, count the training episodes that were used for a step or dropped for equal rewards in their group.
    Return None if there are none."""
    counted = (entry for entry in entries if entry.step is not None or entry.reason is DropReason.ZERO_VARIANCE)
    return dict(Counter(entry.client_id for entry in counted if entry.client_id != mine)) or None


# -- values that rollouts report in addition to the reward (`Outcome.metrics`) ---------------------------------------
# Only values that the plan's metrics name are kept. If an episode lacks one, the trial is incomplete: a mean over the others
# would measure something else.

Points = dict[str, list[tuple[int, float]]]


def _evaluated(metrics: Sequence[Metric], kept: Mapping[int, LedgerEntry], when: str) -> Points:
    """Return a series for each reported value: (index of the held-out episode, value). `kept` has the episodes of one evaluation
    by index.

    Raises: EvidenceMissing when an episode does not report a value.
    """
    return {
        heldout_outcome(name, when): [(index, _value(entry, name, [*kept.values()])) for index, entry in kept.items()]
        for name in _names(metrics)
    }


def _trained(metrics: Sequence[Metric], entries: Sequence[LedgerEntry]) -> Points:
    """Return the mean of each reported value per step, over all of the step's episodes, including those dropped for equal rewards
    in their group.

    Raises: EvidenceMissing when an episode does not report a value.
    """
    names = _names(metrics)
    by_step: Mapping[int, list[LedgerEntry]] = defaultdict(list)
    for entry in entries if names else ():
        if entry.kind != "train" or entry.reward is None:
            continue
        if entry.step is not None:
            by_step[entry.step].append(entry)
        elif entry.reason is DropReason.ZERO_VARIANCE:  # sampled for the step after the one it was claimed at
            by_step[entry.claimed_step + 1].append(entry)
    return {
        trained_outcome(name): [
            (step, math.fsum(_value(entry, name, batch) for entry in batch) / len(batch))
            for step, batch in sorted(by_step.items())
        ]
        for name in names
    }


def _names(metrics: Sequence[Metric]) -> list[str]:
    return list(dict.fromkeys(metric.reported_as for metric in metrics if metric.kind == "outcome"))


def _value(entry: LedgerEntry, name: str, among: Sequence[LedgerEntry]) -> float:
    found = entry.metrics.get(name)
    if found is not None:
        return found
    lacking = sum(name not in each.metrics for each in among)
    raise EvidenceMissing(
        f"{lacking} of {len(among)} {'held-out' if entry.kind == 'eval' else 'training'} episodes report no {name!r}: make every "
        f"rollout return Outcome(…, metrics={{{name!r}: …}}), or remove the metric from the instrument's declaration"
    )


# -- losses ---------------------------------------------------------------------------------------------------------


def attrition(own: list[LedgerEntry]) -> Attrition:
    """Count the attempts at episodes, and the causes of those that were lost.

    `own` has the ledger entries, closed and open, of the trial's own client in one run. Episodes of people who join are left out,
    because they do not depend on the arm. Losses of an earlier attempt at the trial are in another run's ledger and did not affect
    this run's numbers. Losses to code that was repaired later are subtracted by `without`: their tasks were tried again, and the
    failure is on record.
    """
    closed = [entry for entry in own if entry.state not in _OPEN]
    first: dict[Cause, str] = {}
    for entry in sorted(closed, key=lambda entry: (entry.ended_at or entry.claimed_at, entry.episode_id)):
        cause = lost_to(entry)
        if cause is not None and cause not in first and entry.detail:
            first[cause] = redact(entry.detail)[:LONGEST_TRACEBACK]
    train, evaluated = ([entry for entry in closed if entry.kind == kind] for kind in ("train", "eval"))
    return Attrition(train=_attempts(train), eval=_attempts(evaluated), first=first)


def _counts(entry: LedgerEntry) -> bool:
    """Return whether the episode ended with a reward that counts."""
    return entry.reward is not None and lost_to(entry) is None


def lost_to(entry: LedgerEntry) -> Cause | None:
    """Return why a closed attempt has no reward that counts, or None if it has one."""
    if entry.cause is not None:
        return entry.cause
    if entry.reward is not None and entry.reason is not DropReason.NO_CALLS:
        return None
    return None if entry.reason is None else _UNSTATED.get(entry.reason)


def _attempts(entries: list[LedgerEntry]) -> EpisodeAttempts:
    causes = Counter(lost_to(entry) for entry in entries)
    return EpisodeAttempts(
        attempts=len(entries),
        lost={cause: causes[cause] for cause in Cause if causes[cause]},
        set_aside=_set_aside(entries),
    )


def _set_aside(entries: list[LedgerEntry]) -> int:
    """Count the tasks that lost all their attempts: at least one to a cause that counts, and none because the run ended."""
    by_task: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in entries:
        by_task[entry.task_id].append(entry)
    return sum(
        all(lost_to(entry) is not None and entry.reason is not DropReason.RUN_ENDED for entry in tried)
        and any(lost_to(entry) in COUNTED for entry in tried)
        for tried in by_task.values()
    )
