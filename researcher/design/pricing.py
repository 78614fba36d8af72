"""The cost of a plan (trials, wall time, detectable effect), and the number of seeds that a budget allows.

A trial's duration is the instrument's estimate until trials of an earlier study, or a calibration, have measured it on the same
servers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from researcher.analysis.durations import at_first_attempt_s
from researcher.analysis.power import power_of, seeds_needed, side_sigma
from researcher.analysis.samples import deciding_stage
from researcher.design.models import boots_s
from researcher.design.stages import cost, with_most
from researcher.instruments.instrument import STUDY_STEPS, Instrument, Scalar
from researcher.models import Event, TrialRecord
from researcher.refusals import BudgetTooSmall
from researcher.study.plan import Arm, Plan
from researcher.study.spec import StudySpec
from swarm.protocol.runspec import RunSpec

_NOT_PACE = {"batch", "optimizer", "checkpoint", "limits"}
"""Sections of a run that do not change how long an episode takes. The number of episodes is counted separately."""

CALIBRATION_STEPS = 3
"""Steps per trial of a calibration. The first step compiles kernels; the others show the pace."""

_LEAST_PROMPT = 100.0
"""Minimum prompt length, in tokens: a short task with its chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Measured speed of an earlier study's trials on the servers to be used.

    Args:
        episode_s: seconds of a trial per trained episode, including the evaluations before and after training. For a calibration:
            only the seconds of its steps.
        episode_tokens: prompt and sampled tokens of an episode's calls. None: the engine did not count them.
        around_s: seconds that a calibration's trial spends outside its steps, plus the first step's overhead. None: a whole trial
            was measured.
    """

    study: str
    plan: Plan
    episode_s: float
    episode_tokens: float | None = None
    around_s: float | None = None

    @classmethod
    def of(cls, study: str, plan: Plan, trials: Sequence[TrialRecord], events: Iterable[Event]) -> Pace | None:
        """Return the median over trials that succeeded on the first attempt, or None without any. `events` is the study's journal."""
        took = at_first_attempt_s(trials, events)
        paces = [seconds / _played(plan, plan.arm(trial.arm)) for trial, seconds in took]
        if not paces:
            return None
        return cls(
            study=study, plan=plan, episode_s=statistics.median(paces), episode_tokens=_tokens_per_episode(trials)
        )

    @classmethod
    def calibrated(cls, study: str, plan: Plan, trials: Sequence[TrialRecord], events: Iterable[Event]) -> Pace | None:
        """Return the mean pace of a calibration's trials. None unless all succeeded on the first attempt: each measures another model.

        These trials are too short for their total time to be proportional to that of full trials, so steps are timed separately.
        """
        steps, around = list[float](), list[float]()
        for trial, seconds in at_first_attempt_s(trials, events):
            step_s = [each for _, each in trial.series.get("step_s", ())]
            if len(step_s) > 1:
                usual = statistics.median(step_s[1:])
                steps.append(usual / _episodes(plan.run, plan.levels_of(plan.arm(trial.arm))))
                around.append(seconds - usual * len(step_s))
        if not steps or len(steps) < len(trials):
            return None
        return cls(
            study=f"{CALIBRATION_STEPS} steps of {study}",
            plan=plan,
            episode_s=statistics.fmean(steps),
            episode_tokens=_tokens_per_episode(trials),
            around_s=max(0.0, statistics.fmean(around)),
        )

    def trial_s(self, plan: Plan, arm: Arm) -> float:
        """Return the expected seconds of one trial of this arm. The plan must fit this pace.

        With a calibration's pace, an interim episode is assumed to last as long as a trained one.
        """
        if self.around_s is None:
            return self.episode_s * _played(plan, arm)
        trained, _, further = _episodes_of(plan, arm)
        return self.around_s + self.episode_s * (trained + further - _scored_elsewhere(plan))

    def fits(self, plan: Plan) -> bool:
        """Return whether this plan's trials do the same work: same models, tasks, evaluation and call lengths."""
        return _work(self.plan) == _work(plan)


def _tokens_per_episode(trials: Sequence[TrialRecord]) -> float | None:
    """Return the mean tokens per trained episode, over the steps for which tokens were counted; None if there are none."""
    called, episodes = 0.0, 0.0
    for trial in trials:
        played = dict(trial.series.get("episodes", ()))
        for step, tokens in trial.series.get("tokens_called", ()):
            if step in played:
                called, episodes = called + tokens, episodes + played[step]
    return called / episodes if called and episodes else None


def _work(plan: Plan) -> dict[str, Any]:
    return {
        "instrument": plan.instrument,
        "models": sorted((model.name, model.fingerprint or "") for model in plan.hosted),
        "task": plan.task,
        "run": {name: value for name, value in plan.run.items() if name not in _NOT_PACE},
        "roles": plan.roles,
        "evaluation": (plan.heldout_tasks, plan.heldout_episodes, _scored_elsewhere(plan)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of a plan as (minimum, maximum) pairs. Wall time is for the given number of servers.

    `seeds_needed` is per arm, for the instrument's stated σ; None if it states none. `tokens` counts the agents' calls; None if the
    plan does not limit them.
    """

    trials: tuple[int, int]
    wall_s: tuple[float, float]
    seeds_needed: int | None = None
    tokens: tuple[float, float] | None = None


def price_of(plan: Plan, instrument: Instrument, *, servers: int) -> Price:
    """Return the price from the plan's expected trial duration. An old plan has none and uses the instrument's estimate."""
    seconds = arm_seconds(plan if plan.trial_s else timed(plan, instrument))
    needed = min(len(stage.arms) for stage in plan.stages[-1:])
    at_once = max(1, min(servers // (1 + len(plan.roles)), needed))
    least, most = (cost(plan, seconds, at_most=at_most) for at_most in (False, True))
    boots = [boots_s(plan, at_most=at_most) if servers <= 1 else 0.0 for at_most in (False, True)]
    return Price(
        trials=(least[0], most[0]),
        wall_s=(least[1] / at_once + boots[0], most[1] / at_once + boots[1]),
        seeds_needed=_expected_seeds(plan),
        tokens=expected_tokens(plan),
    )


def fitted(plan: Plan, instrument: Instrument, spec: StudySpec, *, servers: int) -> Plan:
    """Fit the plan into its budget by changing the maximum number of seeds.

    Lowers the maximum if not all seeds fit. Raises it, as far as the budget pays, if the instrument's σ needs more seeds and the
    spec gives a wall time but no maximum.

    Raises: BudgetTooSmall if not even the minimum number of seeds fits; the message says what would.
    """
    last = plan.stages[-1]
    affordable = check_budget(plan, instrument, servers=servers, trials=spec.budget.trials)
    most, needed, notes = last.max_seeds, _expected_seeds(plan), list(plan.assumptions)
    if needed and spec.seeds.max is None and spec.budget.wall is not None:
        most = max(most, min(needed, affordable))
    if affordable < most:
        notes.append(f"The budget pays for {max(affordable, last.seeds)} seeds per arm at the most, not {most}.")
        most = max(affordable, last.seeds)
    expected = expected_tokens(plan)
    if expected is not None and plan.budget.tokens is not None and expected[0] > plan.budget.tokens:
        notes.append(
            f"By the lengths of their calls the trials take about {expected[0]:,.0f} tokens at the least, and {plan.budget.tokens:,} are "
            "given: the study may stop before its end."
        )
    if needed and needed > most:
        notes.append(
            f"By the instrument's own σ about {needed} seeds per arm would be needed, and the plan allows {most}: "
            "the noise floor will probably end the study as underpowered."
        )
    sized = plan.model_copy(update={"stages": with_most(plan.stages, most), "assumptions": tuple(notes)})
    most_trials = price_of(sized, instrument, servers=servers).trials[1]
    return sized.model_copy(update={"budget": plan.budget.model_copy(update={"trials": most_trials})})


def check_budget(plan: Plan, instrument: Instrument, *, servers: int, trials: int | None = None) -> int:
    """Return the number of seeds per arm that the budget can pay for. `trials` is the maximum number of trials; None: no limit.

    Raises: BudgetTooSmall if the budget cannot pay for the plan's minimum.
    """
    price, budget_s = price_of(plan, instrument, servers=servers), plan.budget.wall_s
    affordable = _affordable(plan, instrument, servers, trials)
    fewer = "compare fewer levels or take fewer steps" + (f", or at most {affordable} seeds" if affordable >= 2 else "")
    if price.wall_s[0] > budget_s:
        raise BudgetTooSmall(
            "budget.wall",
            f"{price.trials[0]} trials take about {_time(price.wall_s[0])}, but the budget is {_time(budget_s)}: "
            f"give a budget of {math.ceil(price.wall_s[0] / 60)}m, or {fewer}",
        )
    if trials is not None and price.trials[0] > trials:
        raise BudgetTooSmall(
            "budget.trials", f"the study needs at least {price.trials[0]} trials, but the budget is {trials}: {fewer}"
        )
    return affordable


def _affordable(plan: Plan, instrument: Instrument, servers: int, trials: int | None) -> int:
    """Return the seeds per arm that the budget can pay for in the deciding stage, if all other stages use their maximum."""

    def price(most: int) -> Price:
        stages = tuple(stage.model_copy(update={"seeds": 1}) for stage in plan.stages)
        return price_of(plan.model_copy(update={"stages": with_most(stages, most)}), instrument, servers=servers)

    base = plan.stages[0].seeds
    least, more = price(base), price(base + 1)
    limits = [(plan.budget.wall_s, least.wall_s[1], more.wall_s[1])]
    if trials is not None:
        limits.append((trials, least.trials[1], more.trials[1]))
    paid = [base + math.floor((limit - now) / (then - now) + 1e-9) for limit, now, then in limits if then > now]
    return min(paid, default=base)


def calibrating(plan: Plan) -> Plan:
    """Return the plan for a calibration: the same trials with only a few steps. Work per episode and time limits stay the same."""
    lengths = {factor.name for factor in plan.factors if STUDY_STEPS in factor.targets}
    arms = [
        arm.model_copy(update={"levels": {name: level for name, level in arm.levels.items() if name not in lengths}})
        for arm in plan.arms
    ]
    return plan.model_copy(update={"arms": tuple(arms), "steps": CALIBRATION_STEPS, "heldout_every": 0})


def timed(plan: Plan, instrument: Instrument, paces: Sequence[Pace] = ()) -> Plan:
    """Return the plan with the expected duration of its longest trial and, if the budget limits tokens, the most tokens a trial should
    need.

    Uses the first pace that fits the plan. If none fits, scales the instrument's estimate by trial length and episodes per step.
    """
    pace = next((each for each in paces if each.fits(plan)), None)
    if plan.budget.tokens is not None:
        each = pace.episode_tokens if pace is not None else None
        tokens = max(sum(_episodes_of(plan, arm)) * (each or _call_tokens(plan, arm)) for arm in plan.arms)
        plan = plan.model_copy(update={"trial_tokens": float(f"{tokens:.3g}")})
    if pace is not None:
        seconds = max(pace.trial_s(plan, arm) for arm in plan.arms)
        return plan.model_copy(update={"trial_s": float(f"{seconds:.2g}"), "trial_s_measured": pace.study})
    longest = max(_played(plan, arm) for arm in plan.arms)
    defaults = instrument.defaults
    usual = defaults.steps * _episodes(defaults.run, {})
    return plan.model_copy(update={"trial_s": defaults.trial_s * longest / usual})


def _played(plan: Plan, arm: Arm) -> float:
    """Return the number of episodes that one trial of this arm trains, plus its interim episodes converted to trained ones.

    Durations are known per trained episode, including the evaluations before and after training. An interim episode, or one of
    another instrument, is assumed to last as long as the trial's average episode.
    """
    trained, around, further = _episodes_of(plan, arm)
    return trained * (1 + further / (trained + around))


def _episodes_of(plan: Plan, arm: Arm) -> tuple[float, float, float]:
    """Count the episodes of one trial of this arm: trained ones, those before and after training, and those of interim evaluations
    and other instruments.
    """
    trained = plan.steps_of(arm.name) * _episodes(plan.run, plan.levels_of(arm))
    around = 2 * plan.heldout_tasks * plan.heldout_episodes
    return trained, around, plan.interim_evaluations(arm.name) * plan.interim_tasks + _scored_elsewhere(plan)


def _scored_elsewhere(plan: Plan) -> int:
    """Return the number of episodes of other instruments in one trial."""
    return sum(each.tasks * each.episodes for each in plan.transfers)


def _call_tokens(plan: Plan, arm: Arm) -> float:
    """Estimate the tokens of an episode before any were counted: one call with the longest answer and a prompt at least as long."""
    usual = plan.run_fields(plan.levels_of(arm)).get("sampling", {}).get("max_tokens", RunSpec().sampling.max_tokens)
    return float(usual) + max(float(usual), _LEAST_PROMPT)


def expected_tokens(plan: Plan) -> tuple[float, float] | None:
    """Return the minimum and maximum expected tokens of all trials, or None if the plan does not limit tokens."""
    if plan.trial_tokens is None:
        return None
    played = {arm.name: sum(_episodes_of(plan, arm)) for arm in plan.arms}
    each = _scaled(plan.trial_tokens, played)
    return cost(plan, each, at_most=False)[1], cost(plan, each, at_most=True)[1]


def arm_seconds(plan: Plan) -> dict[str, float]:
    """Return the expected seconds per trial, by arm; 0 if the plan has no expected duration."""
    return _scaled(plan.trial_s or 0.0, {arm.name: _played(plan, arm) for arm in plan.arms})


def _scaled(longest: float, work: dict[str, float]) -> dict[str, float]:
    """Scale the longest trial's cost to one trial of each arm, in proportion to the work of that arm."""
    return {name: longest * own / max(work.values()) for name, own in work.items()}


def _episodes(run: dict[str, Any], levels: dict[str, Scalar]) -> float:
    """Return the number of episodes per step."""
    batch = RunSpec().batch.model_dump() | run.get("batch", {})
    tasks = levels.get("run.batch.tasks", batch["tasks"])
    return float(tasks) * float(levels.get("run.batch.group_size", batch["group_size"]))


def _expected_seeds(plan: Plan) -> int | None:
    """Return the seeds per arm that the instrument's stated σ calls for, or None if it states none.

    Used only for the price, never instead of the noise floor.
    """
    asked, metric = plan.hypotheses[0], plan.metric(plan.hypotheses[0].metric)
    if metric.sigma is None or plan.stages[-1].explores:
        return None
    sigma = side_sigma(plan, asked, metric.sigma) if asked.between_arms else metric.sigma
    alpha = asked.alpha / max(Counter(deciding_stage(plan, each).id for each in plan.hypotheses).values())
    if power_of(plan.stages[-1].seeds, sigma=sigma, effect=plan.planned_effect, alpha=alpha) >= plan.power:
        return plan.stages[-1].seeds
    return seeds_needed(sigma=sigma, effect=plan.planned_effect, alpha=alpha, power=plan.power)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
