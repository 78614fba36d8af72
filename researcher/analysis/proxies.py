"""Sentinel for a reward that pays for the wrong thing. If failing earns reward, every number of a study means something else.

What is wanted is `success`, and each declared metric that is marked `true`. The sentinel asks two questions of each arm and of all
trials together. The unit is the trial:

- Levels: of two held-out episodes of one task, does the one that is better by the wanted metric earn less? A trial's answer is the
  mean sign over its tasks (a rank correlation within tasks, from -1 to 1).
- Movement: does reward rise while the wanted metric falls, in the same trials, over held-out or over training episodes?

A mean over trials counts as below 0 if it exceeds both the noise between trials (t-test) and the noise of the episodes within them
(normal). All tests of a study share a 5 % error rate.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from researcher.analysis.sentinel_findings import (
    Estimate,
    SentinelFinding,
    Unchecked,
    ends,
    mean_of,
    points,
    task_means,
    unchecked,
)
from researcher.instruments.instrument import heldout_outcome, trained_outcome
from researcher.models import TrialRecord
from researcher.study.plan import Plan

ALPHA = 0.05
CLEAR = -0.2
"""A mean rank correlation at or below this makes the verdict invalid; between this and 0 it is a warning."""
_WORST = ("invalid", "warning", "unchecked")
_SATURATED = 0.99
_LEAST_TRAINED = 3
"""Minimum number of trials for a test on training episodes, since their noise within a trial is unknown."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A metric of what is really wanted, and the names of its series. `sign` is -1 if less is better."""

    name: str
    before: str
    after: str
    trained: str
    sign: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one trial shows. `levels` is None if no task has episodes with different results."""

    trial: TrialRecord
    levels: Estimate | None
    reward: Estimate
    wanted: Estimate
    room: bool
    """True if the wanted metric can still rise."""
    seen: bool
    """True if the wanted metric varied at all over the held-out episodes."""
    trained: tuple[float, float] | None
    """Gains in reward and in the wanted metric, from the first to the last quarter of training."""


def reward_against_success(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Find arms whose reward goes against what is wanted."""
    found: list[SentinelFinding] = []
    sighted: set[str] = set()
    wanted = _all_wanted(plan)
    seen: dict[_Wanted, list[_Seen]] = {}
    for each in wanted:
        seen[each] = list(_look(plan, done, each))
        sighted |= {one.trial.key for one in seen[each]}
    asked = {each: list(_groups(trials)) for each, trials in seen.items() if trials}
    tests = 2 * sum(len(groups) for groups in asked.values())
    for each, groups in asked.items():
        found += _of_one(name, each, groups, ALPHA / tests)
    blind = [trial for trial in done if trial.key not in sighted]
    return [*found, *([unchecked(name, blind)] if blind else [])]


def _of_one(name: str, wanted: _Wanted, groups: Sequence[list[_Seen]], alpha: float) -> Iterator[SentinelFinding]:
    """Yield the worst finding of each arm, and of all arms together unless each arm alone is as bad. Equal findings are merged."""
    said_of: dict[str, str] = {}
    alike: dict[_Said, list[_Seen]] = {}
    for group in groups:
        said = [*_levels(wanted, group, alpha), *_movement(wanted, group, alpha)]
        if not said:
            continue
        severity, text, value = min(said, key=lambda one: _WORST.index(one[0]))
        arms = tuple(dict.fromkeys(one.trial.arm for one in group))
        if len(arms) > 1 and all(said_of.get(arm) in ("invalid", severity) for arm in arms):
            continue
        said_of |= dict.fromkeys(arms, severity)
        others = next((said for said in alike if said[:2] == (severity, text)), (severity, text, value))
        trials = alike.pop(others, []) + group
        alike[severity, text, min(value, others[2])] = list({one.trial.key: one for one in trials}.values())
    for (severity, text, value), group in alike.items():
        arms = tuple(dict.fromkeys(one.trial.arm for one in group))
        keys = tuple(one.trial.key for one in group)
        yield SentinelFinding(name=name, severity=severity, text=text, arms=arms, trials=keys, value=value)


_Said = tuple[Literal["invalid", "warning", "unchecked"], str, float]


def _levels(wanted: _Wanted, group: Sequence[_Seen], alpha: float) -> Iterator[_Said]:
    found = [one.levels for one in group if one.levels is not None]
    if _p_below(found) <= alpha:
        mean = mean_of(found)
        yield (
            "invalid" if mean <= CLEAR else "warning",
            f"within a task, episodes with more {wanted.name} get less reward: the reward pays for something else",
            mean,
        )


def _movement(wanted: _Wanted, group: Sequence[_Seen], alpha: float) -> Iterator[_Said]:
    """Check whether reward rises while the wanted metric falls.

    A rise in reward is judged over all trials, a fall in success only over trials whose own reward rose. Otherwise an arm that
    gains both and an arm that loses both would together look like a contradiction.
    """
    rises = _p_below([Estimate(-one.reward.value, one.reward.error) for one in group]) <= alpha
    fallen = [one.wanted for one in group if one.reward.value > 0]
    if rises and _p_below(fallen) <= alpha:
        yield "invalid", f"held-out reward rose while held-out {wanted.name} fell", mean_of(fallen)
    elif rises and mean_of([one.wanted for one in group]) <= 0 and any(one.room for one in group):
        text = f"held-out reward rose, but held-out {wanted.name} did not"
        seen = any(one.seen for one in group)
        if not seen:  # no task was ever solved: partial credit may still be fair
            text = f"held-out reward rose, but held-out {wanted.name} never varied: the records cannot show if the reward pays for it"
        yield "warning" if seen else "unchecked", text, mean_of([one.wanted for one in group])
    pairs = [one.trained for one in group if one.trained is not None]
    if len(pairs) < _LEAST_TRAINED or _p_below([Estimate(-reward, 0.0) for reward, _ in pairs]) > alpha:
        return
    own = [Estimate(gain, 0.0) for reward, gain in pairs if reward > 0]
    if len(own) >= _LEAST_TRAINED and _p_below(own) <= alpha:
        yield "invalid", f"training reward rose while {wanted.name} in training fell", mean_of(own)
    elif _p_below([one.wanted for one in group if one.trained is not None and one.trained[0] > 0]) <= alpha:
        yield (
            "warning",
            f"training reward rose while held-out {wanted.name} fell",
            mean_of([one.wanted for one in group]),
        )


def _p_below(found: Sequence[Estimate]) -> float:
    """Return the one-sided p-value of the hypothesis that the mean is at least 0; 1 for fewer than two trials."""
    from scipy import stats

    values = np.array([one.value for one in found])
    if len(values) < 2 or values.mean() >= 0:
        return 1.0
    between = float(values.std(ddof=1)) / math.sqrt(len(values))
    within = math.sqrt(sum(one.error**2 for one in found)) / len(values)
    by_trials = float(stats.t.cdf(values.mean() / between, len(values) - 1)) if between > 0 else 0.0
    by_episodes = float(stats.norm.cdf(values.mean() / within)) if within > 0 else 0.0
    return max(by_trials, by_episodes)


# -- what one trial shows -------------------------------------------------------------------------------------------


def _all_wanted(plan: Plan) -> list[_Wanted]:
    declared = {
        metric.reported_as: metric
        for metric in plan.metrics
        if metric.kind == "outcome" and metric.true and not metric.role
    }
    return [
        _Wanted("success", "eval_success_before", "eval_success_after", "success_rate", 1),
        *(
            _Wanted(
                metric.name,
                heldout_outcome(source, "before"),
                heldout_outcome(source, "after"),
                trained_outcome(source),
                1 if metric.direction == "increase" else -1,
            )
            for source, metric in declared.items()
        ),
    ]


def _groups(trials: Sequence[_Seen]) -> Iterator[list[_Seen]]:
    """Yield the trials of each arm, then all trials together."""
    by_arm: dict[str, list[_Seen]] = defaultdict(list)
    for one in trials:
        by_arm[one.trial.arm].append(one)
    yield from by_arm.values()
    if len(by_arm) > 1:
        yield list(trials)


def _look(plan: Plan, done: Sequence[TrialRecord], wanted: _Wanted) -> Iterator[_Seen]:
    """Read what each trial shows; skip trials that did not record the wanted metric."""
    for trial in done:
        try:
            reward = [dict(points(trial, f"eval_reward_{when}")) for when in ("before", "after")]
            fared = [
                {index: wanted.sign * value for index, value in points(trial, name)}
                for name in (wanted.before, wanted.after)
            ]
        except Unchecked:
            continue
        each = max(1, plan.heldout_episodes)
        most = wanted.name != "success" or float(np.mean([*fared[0].values()])) < _SATURATED
        yield _Seen(
            trial=trial,
            levels=_agreement(reward, fared, each),
            reward=_gain(reward, each),
            wanted=_gain(fared, each),
            room=most,
            seen=len({*fared[0].values(), *fared[1].values()}) > 1,
            trained=_trained(trial, wanted),
        )


def _agreement(
    reward: Sequence[Mapping[int, float]], fared: Sequence[Mapping[int, float]], each: int
) -> Estimate | None:
    """Return the mean sign of the agreement between reward and the wanted metric, before and after training.

    Averages over tasks that have episodes with different results; None if there are none.
    """
    by_task: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for paid, went in zip(reward, fared, strict=True):
        for index in sorted(set(paid) & set(went)):
            by_task[index // each].append((paid[index], went[index]))
    signs = []
    for episodes in by_task.values():
        pairs = [(a[0] - b[0], a[1] - b[1]) for a, b in itertools.combinations(episodes, 2) if a[1] != b[1]]
        if pairs:
            signs.append(sum(float(np.sign(paid * went)) for paid, went in pairs) / len(pairs))
    if not signs:
        return None
    return Estimate(math.fsum(signs) / len(signs), 1 / math.sqrt(len(signs)))


def _gain(sides: Sequence[Mapping[int, float]], each: int) -> Estimate:
    """Return the mean change from before to after training, with its standard error over the tasks that both evaluations have."""
    before, after = (task_means(side.items(), each) for side in sides)
    return Estimate.over([after[task] - before[task] for task in sorted(set(before) & set(after))])


def _trained(trial: TrialRecord, wanted: _Wanted) -> tuple[float, float] | None:
    try:
        reward, fared = dict(points(trial, "reward_mean")), dict(points(trial, wanted.trained))
    except Unchecked:
        return None
    steps = sorted(set(reward) & set(fared))
    if len(steps) < 2:
        return None
    gains = []
    for line in (reward, fared):
        start, end = ends(np.array([line[step] for step in steps]))
        gains.append(end - start)
    return gains[0], wanted.sign * gains[1]
