"""From a reading to a plan: arms, hypotheses, stages, branches, and what it costs.

Pure. Everything that decides the study is fixed here and hashed with the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.analysis.power import power_of, seeds_needed
from researcher.analysis.samples import deciding_stage
from researcher.analysis.sentinels import PLANNED
from researcher.design import succession
from researcher.design.arms import arms_of, hypotheses_of
from researcher.design.balance import balances
from researcher.design.hosting import boots_s, models_of
from researcher.design.layout import laid_out
from researcher.design.own_seeds import with_own_seeds
from researcher.design.reading import Reading
from researcher.design.shares import refuse_held_share, with_held_shares, with_mixes_stated
from researcher.design.stages import ALPHA, POWER, branches, check_seeds, cost, with_most
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import (
    RUN_PARAMETERS,
    STUDY_MODEL,
    STUDY_STEPS,
    UNTIL,
    Factor,
    Instrument,
    Scalar,
)
from researcher.planner.seam import PlanOptions
from researcher.refusals import BudgetTooSmall, PlanningRefused
from researcher.study.plan import Arm, Branch, Budget, Hypothesis, Plan, PlanModel, PlanRole, Stage, nested
from swarm.protocol.runspec import RunSpec, merge_patch

PLANNED_EFFECT = 1.5
"""In margins: the effect at which the power must be reached."""
DEFAULT_BUDGET_S = 8 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a plan takes at the least and at the most. Wall time for the given number of servers."""

    trials: tuple[int, int]
    wall_s: tuple[float, float]


def _with_effect(instrument: Instrument, reading: Reading) -> Reading:
    """With what the varied factors need to do anything, where the topic leaves it open (`Factor.needs_any`).

    Raises: PlanningRefused where the topic says that they do nothing.
    """
    settings, said = list(reading.settings), list(reading.assumptions)
    for factor in reading.factors:
        levels = {each.name: value for each, value in settings}
        needed = [each for each in instrument.factors if each.name in factor.needs_any]
        raised = any(each in reading.factors or levels.get(each.name, each.default) != each.low for each in needed)
        if raised or not needed:
            continue
        at_lowest = f"{factor.name} does nothing at {' and '.join(f'{each.name}={each.low:g}' for each in needed)}"
        free = next((each for each in needed if each.name not in levels), None)
        if free is None:
            names = [each.name for each in needed]
            raise PlanningRefused(f"{at_lowest}: raise {' or '.join(names)}", names)
        settings.append((free, int(free.low or 0) + 1))
        said.append(f"{at_lowest}: {free.name}={settings[-1][1]} in all arms.")
    return reading.model_copy(update={"settings": tuple(settings), "assumptions": tuple(said)})


def _refuse_lengths(instrument: Instrument, reading: Reading) -> None:
    """Raises: PlanningRefused for steps until a threshold, counted over arms of which one has less time to reach it."""
    varied = next((factor.name for factor in reading.factors if STUDY_STEPS in factor.targets), None)
    if varied is None or reading.metric.kind not in UNTIL:
        return
    others = [metric.name for metric in instrument.metrics if metric.kind not in UNTIL]
    raise PlanningRefused(
        f"{reading.metric.name} cannot compare arms that differ in {varied}: an arm that ends before its threshold is reached shows "
        f"no count of the steps to it; ask about another factor"
        + (f", or about {varied} by {' or '.join(others[:2])}" if others else ""),
        others,
    )


def design(topic: str, model: str, folder: InstrumentFolder, reading: Reading, options: PlanOptions) -> Plan:
    """The plan, not yet priced or checked. Raises: PlanningRefused, also for numbers that no plan takes."""
    try:
        return _designed(topic, model, folder, reading, options)
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, Plan)]
        raise PlanningRefused(f"this makes no plan: {'; '.join(problems)}", problems) from error


def _designed(topic: str, model: str, folder: InstrumentFolder, reading: Reading, options: PlanOptions) -> Plan:
    instrument, defaults = folder.instrument, folder.instrument.defaults
    _refuse_lengths(instrument, reading)
    reading = _with_effect(instrument, reading)
    arms = arms_of(reading)
    hypotheses = hypotheses_of(reading, arms)
    seeds = _seeds(instrument, reading, options)
    arms, hypotheses, stages = laid_out(reading, arms, hypotheses, seeds, options)
    stages = tuple(each.model_copy(update={"first_seed": each.first_seed + options.first_seed}) for each in stages)
    overruled = tuple(_overruled(reading, options))
    budget_s = options.budget_s or reading.budget_s or DEFAULT_BUDGET_S
    settings = dict(_by_target(reading.settings))
    refuse_held_share(reading.factors, [factor for factor, _ in reading.settings])
    plan = Plan(
        question=topic.strip(),
        instrument=instrument.name,
        instrument_version=instrument.version,
        instrument_code=folder.code,
        model=PlanModel(name=str(settings.pop(STUDY_MODEL, model))),
        models=models_of(arms, reading.factors),
        hypotheses=hypotheses,
        arms=arms,
        factors=reading.factors,
        stages=stages,
        branches=_branches(reading, arms, hypotheses, stages, options),
        steps=int(settings.pop(STUDY_STEPS, defaults.steps)),
        run=_run(instrument, settings, reading.settings),
        roles=_roles(instrument, settings, model),
        task=_task(instrument, settings),
        heldout_tasks=defaults.heldout_tasks,
        heldout_episodes=defaults.heldout_episodes,
        heldout_temperature=defaults.heldout_temperature,
        metrics=instrument.planned_metrics(reading.metric, {each.metric for each in hypotheses}),
        power=POWER,
        planned_effect=PLANNED_EFFECT * reading.metric.margin,
        sampling_floor=True,
        merged_looks=any(stage.spends is not None for stage in stages),
        sentinels=PLANNED,
        budget=Budget(wall_s=budget_s, trials=len(arms) * seeds[1]),
        planner="builtin",
        assumptions=(*reading.assumptions, *overruled),
    )
    return plan.model_copy(update={"trial_s": max(_trial_s(plan, arm, instrument) for arm in arms)})


def priced(plan: Plan, instrument: Instrument, *, servers: int) -> Price:
    """By the instrument's own figure for a trial, scaled with its length and with the episodes of a step."""
    seconds = {arm.name: _trial_s(plan, arm, instrument) for arm in plan.arms}
    needed = min(len(stage.arms) for stage in plan.stages[-1:])
    at_once = max(1, min(servers // (1 + len(plan.roles)), needed))
    least, most = (cost(plan, seconds, at_most=at_most) for at_most in (False, True))
    few_s, many_s = (0.0, 0.0) if servers > 1 else (boots_s(plan, at_most=False), boots_s(plan, at_most=True))
    return Price(trials=(least[0], most[0]), wall_s=(least[1] / at_once + few_s, most[1] / at_once + many_s))


def fitted(plan: Plan, instrument: Instrument, options: PlanOptions) -> Plan:
    """The plan within its budget: with fewer seeds at the most where all do not fit, with more where the budget was given
    and the instrument's own σ asks for them.

    Raises: PlanningRefused when not even the least seeds fit, saying what would.
    """
    last = plan.stages[-1]
    affordable = check_budget(plan, instrument, servers=options.servers)
    most, notes = last.max_seeds, list(plan.assumptions)
    needed = _expected_seeds(plan)
    if needed and options.seeds is None and options.budget_s is not None:
        most = max(most, min(needed, affordable))
    if affordable < most:
        notes.append(f"The budget pays for {max(affordable, last.seeds)} seeds per arm at the most, not {most}.")
        most = max(affordable, last.seeds)
    if needed and needed > most:
        notes.append(
            f"By the instrument's own σ about {needed} seeds per arm would be needed, and the plan allows {most}: "
            "the noise floor will probably end the study as underpowered."
        )
    sized = plan.model_copy(update={"stages": with_most(plan.stages, most), "assumptions": tuple(notes)})
    trials = priced(sized, instrument, servers=options.servers).trials[1]
    return sized.model_copy(update={"budget": plan.budget.model_copy(update={"trials": trials})})


def check_budget(plan: Plan, instrument: Instrument, *, servers: int) -> int:
    """Seeds per arm that the budget pays for. Raises: BudgetTooSmall where it does not pay for the plan's least."""
    price, budget_s = priced(plan, instrument, servers=servers), plan.budget.wall_s
    affordable = _affordable(plan, instrument, servers)
    if price.wall_s[0] > budget_s:
        raise BudgetTooSmall(
            f"{price.trials[0]} trials take about {_time(price.wall_s[0])}, the budget is {_time(budget_s)}: "
            f"give --budget {math.ceil(price.wall_s[0] / 60)}m, or ask about fewer levels or fewer steps"
            + (f", or --seeds {affordable}" if affordable >= 2 else "")
        )
    return affordable


def _affordable(plan: Plan, instrument: Instrument, servers: int) -> int:
    """Seeds per arm of the deciding stage that the budget pays for, all other stages at their most."""

    def wall_s(most: int) -> float:
        stages = tuple(stage.model_copy(update={"seeds": 1}) for stage in plan.stages)
        bare = plan.model_copy(update={"stages": with_most(stages, most)})
        return priced(bare, instrument, servers=servers).wall_s[1]

    base = plan.stages[0].seeds
    each = wall_s(base + 1) - wall_s(base)
    return math.floor((plan.budget.wall_s - wall_s(base)) / each + 1e-9) + base if each > 0 else base


def checked(plan: Plan) -> Plan:
    """The plan, if every arm has a name of its own and is a run that a server would take, and every stage leads somewhere;
    with seeds of their own for arms that run the same.

    Raises: PlanningRefused.
    """
    shared = [name for name, count in Counter(arm.name for arm in plan.arms).items() if count > 1]
    if shared:
        raise PlanningRefused(
            f"several arms would be called {shared[0]}, and nothing would tell their trials apart; write their levels otherwise",
            shared,
        )
    for arm in plan.arms:
        levels = plan.levels_of(arm)
        if RUN_PARAMETERS in levels and any(target.startswith(f"{RUN_PARAMETERS}.") for target in levels):
            raise PlanningRefused(
                f"arm {arm.name} cannot be: all weights have no rank and no alpha; compare LoRA with full fine-tuning, or "
                "LoRA's ranks with each other"
            )
        for role in (None, *plan.roles):
            try:
                fields = plan.run_fields(levels, role)
            except ValueError as error:
                raise PlanningRefused(f"arm {arm.name} cannot be run: {error}") from error
            try:
                RunSpec.model_validate(fields)
            except ValidationError as error:
                problems = "; ".join(str(problem) for problem in explain(error, RunSpec))
                raise PlanningRefused(f"arm {arm.name} cannot be run: {problems}") from error
    plan = with_mixes_stated(with_own_seeds(plan))
    check_seeds(plan)
    stages = {stage.id for stage in plan.stages}
    for stage in stages:
        ends = [branch for branch in plan.branches if branch.stage == stage]
        if not ends or ends[-1].when.kind != "always":
            raise ValueError(f"after stage {stage!r} the plan may decide nothing")
    into = {(branch.stage, branch.to) for branch in plan.branches if branch.then == "stage"}
    if len({to for _, to in into}) < len(into):
        raise ValueError("branches of two stages lead to one and the same stage")
    astray = [branch.to for branch in plan.branches if branch.then == "stage" and branch.to not in stages]
    if astray:
        raise ValueError(f"branches lead to stages that do not exist: {astray}")
    return Plan.model_validate(plan.model_dump())


def _branches(
    reading: Reading,
    arms: Sequence[Arm],
    hypotheses: Sequence[Hypothesis],
    stages: Sequence[Stage],
    options: PlanOptions,
) -> tuple[Branch, ...]:
    loud = options.allow_underpowered
    if reading.following is not None:
        return succession.branches_of(reading, stages, hypotheses, allow_underpowered=loud)
    names = [arm.name for arm in arms]
    at_end = balances(names, reading.metric, stages[-1].id, ALPHA) if reading.balance else ()
    return branches(stages, hypotheses, allow_underpowered=loud, at_end=at_end)


# -- parts ----------------------------------------------------------------------------------------------------------


def _seeds(instrument: Instrument, reading: Reading, options: PlanOptions) -> tuple[int, int]:
    """The least and the most seeds per arm: a number that a person gave is both, a bound moves its own end."""
    given = options.seeds if options.seeds is not None else reading.seeds
    usual = instrument.defaults
    if given is not None:
        least, most = given, given
    else:
        least = reading.min_seeds or min(usual.seeds, reading.max_seeds or usual.seeds)
        most = reading.max_seeds or max(usual.max_seeds, least + usual.max_seeds - usual.seeds)
    if least < 2:
        raise PlanningRefused(f"{least} seeds per arm show no spread: at least 2 are needed, 3 or more are better")
    if least > most:
        raise PlanningRefused(f"the topic asks for at least {least} seeds per arm and at most {most}")
    return least, most


def _overruled(reading: Reading, options: PlanOptions) -> Iterator[str]:
    """What is said where an option holds, and the topic says otherwise.

    Raises: PlanningRefused where the option breaks a bound of the topic's.
    """
    given = options.seeds
    if given is not None:
        below, above = given < (reading.min_seeds or given), given > (reading.max_seeds or given)
        if below or above:
            bound = f"at least {reading.min_seeds}" if below else f"at most {reading.max_seeds}"
            raise PlanningRefused(
                f"--seeds {given} contradicts the topic, which asks for {bound} seeds per arm; leave out one"
            )
        if reading.seeds not in (None, given):
            yield f"The topic asks for {reading.seeds} seeds, and --seeds {given} holds."
    said_s, held_s = reading.budget_s, options.budget_s
    if said_s is not None and held_s is not None and held_s > said_s:
        raise PlanningRefused(
            f"--budget {math.ceil(held_s / 60)}m contradicts the topic, which gives the study {_time(said_s)} at the most; leave out one"
        )
    if said_s is not None and held_s is not None and held_s < said_s:
        yield f"The topic gives the study {_time(said_s)}, and --budget, {_time(held_s)}, holds."


def _by_target(settings: Sequence[tuple[Factor, Scalar]]) -> list[tuple[str, Any]]:
    return [(target, level) for factor, level in settings for target in factor.targets]


def _run(
    instrument: Instrument, settings: dict[str, Any], held: Sequence[tuple[Factor, Scalar]] = ()
) -> dict[str, Any]:
    run: Any = instrument.defaults.run
    for target, level in settings.items():
        if target.startswith("run."):
            run = merge_patch(run, nested(target.removeprefix("run."), level))
    return with_held_shares(dict(run), held)


def _roles(instrument: Instrument, settings: dict[str, Any], model: str) -> dict[str, PlanRole]:
    roles = {}
    for name, role in instrument.roles.items():
        run: Any = role.run
        for target, level in settings.items():
            if target.startswith(f"roles.{name}."):
                run = merge_patch(run, nested(target.removeprefix(f"roles.{name}."), level))
        roles[name] = PlanRole(model=role.model or model, run=run)
    return roles


def _task(instrument: Instrument, settings: dict[str, Any]) -> dict[str, Scalar]:
    own = {target.removeprefix("task."): level for target, level in settings.items() if target.startswith("task.")}
    return {**instrument.defaults.task, **own}


def _trial_s(plan: Plan, arm: Arm, instrument: Instrument) -> float:
    """Expected seconds of one trial of this arm."""
    levels = plan.levels_of(arm)
    steps = plan.steps_of(arm.name) / instrument.defaults.steps
    usual, own = _episodes(instrument.defaults.run, {}), _episodes(plan.run, levels)
    return instrument.defaults.trial_s * steps * own / usual


def arm_seconds(plan: Plan) -> dict[str, float]:
    """Expected seconds of a trial of each arm, of a plan that says what its dearest takes; none where it does not say."""
    work = {arm.name: plan.steps_of(arm.name) * _episodes(plan.run, plan.levels_of(arm)) for arm in plan.arms}
    return {name: (plan.trial_s or 0.0) * own / max(work.values()) for name, own in work.items()}


def _episodes(run: dict[str, Any], levels: dict[str, Scalar]) -> float:
    """Episodes of a step."""
    batch = RunSpec().batch.model_dump() | run.get("batch", {})
    tasks = levels.get("run.batch.tasks", batch["tasks"])
    return float(tasks) * float(levels.get("run.batch.group_size", batch["group_size"]))


def _expected_seeds(plan: Plan) -> int | None:
    """Seeds per arm by the σ that the instrument states, if it states one. A price, never the noise floor itself."""
    metric = plan.metric(plan.hypotheses[0].metric)
    if metric.sigma is None:
        return None
    alpha = ALPHA / max(Counter(deciding_stage(plan, each).id for each in plan.hypotheses).values())
    if power_of(plan.stages[-1].seeds, sigma=metric.sigma, effect=plan.planned_effect, alpha=alpha) >= plan.power:
        return plan.stages[-1].seeds
    return seeds_needed(sigma=metric.sigma, effect=plan.planned_effect, alpha=alpha, power=plan.power)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
