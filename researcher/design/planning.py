"""From a study spec to its plan: everything that decides the study is fixed here and hashed with the plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.analysis.knowledge import known_to
from researcher.analysis.sentinels import PLANNED
from researcher.design import succession
from researcher.design.arms import CROSSED, arms_of, hypotheses_of
from researcher.design.balance import balances, check_balance
from researcher.design.layout import laid_out
from researcher.design.models import models_of, with_models
from researcher.design.own_seeds import with_own_seeds
from researcher.design.pricing import fitted, longest_trial_s
from researcher.design.question import Question, Setting, question_of
from researcher.design.shares import refuse_held_share, with_held_shares, with_mixes_stated
from researcher.design.sources import pinned
from researcher.design.stages import ALPHA, POWER, SCREEN_SEEDS, branches, check_seeds
from researcher.design.trend import check_trend
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.dotted import nested
from researcher.instruments.instrument import ALGORITHM, RUN_PARAMETERS, Instrument, Metric, Scalar
from researcher.models import Finding
from researcher.refusals import PlanningRefused, SpecRefused
from researcher.study.plan import (
    Arm,
    Branch,
    Budget,
    Hypothesis,
    Plan,
    PlanModel,
    PlanRole,
    Stage,
    with_algorithm,
)
from researcher.study.spec import StudySpec
from swarm.protocol.runspec import RunSpec, merge_patch

PLANNED_EFFECT = 1.5
"""In margins: the effect at which the power must be reached."""
DEFAULT_BUDGET_S = 8 * 3600.0
MOST_CROSSED = 5
SPEC = "spec"
"""Who made a plan: code, from a spec. Who wrote the spec is recorded with the study, and changes no plan."""


def plan_of(
    spec: StudySpec,
    folder: InstrumentFolder,
    *,
    known: Sequence[Finding] = (),
    servers: int = 1,
    allow_underpowered: bool = False,
) -> Plan:
    """The plan of a spec, priced and checked. The same spec gives the same plan, whoever wrote it.

    Args:
        folder: the instrument that the spec names.
        known: findings of earlier studies.
        servers: how many trials run at once; the price depends on it.
        allow_underpowered: run although the noise may be too loud for the planned effect.
    Raises: PlanningRefused, one line that says what to change.
    """
    _refuse_unsupported(spec)
    spec, models = with_models(spec, folder.instrument)
    question = pinned(question_of(spec, folder.instrument))
    try:
        plan = _designed(question, folder, models, allow_underpowered=allow_underpowered)
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, Plan)]
        raise PlanningRefused(f"this makes no plan: {'; '.join(problems)}", problems) from error
    plan = checked(fitted(plan, folder.instrument, spec, servers=servers))
    return plan.model_copy(update={"known": known_to(plan, known)})


def _refuse_unsupported(spec: StudySpec) -> None:
    """Raises: PlanningRefused for what a study file can say and no study can do yet: nothing that is asked is dropped."""
    if spec.evaluate_on:
        raise SpecRefused("evaluate_on", "tasks of other instruments cannot be scored yet; leave it out")
    if spec.start_from != "base":
        raise SpecRefused(
            "start_from", "only `base` can be started from; to go on from a kept model, give its folder as `model`"
        )
    if spec.notify:
        raise SpecRefused("notify", "nobody can be notified yet; leave it out")
    if spec.budget.tokens is not None:
        raise SpecRefused("budget.tokens", "tokens of agents' calls are not capped yet; give wall or trials")


def _designed(
    question: Question, folder: InstrumentFolder, models: Mapping[str, PlanModel], *, allow_underpowered: bool
) -> Plan:
    """models: those that the spec names, by name."""
    spec, instrument, defaults = question.spec, folder.instrument, folder.instrument.defaults
    if spec.design == "factorial" and len(question.varied) > MOST_CROSSED:
        raise SpecRefused(
            "design",
            f"a factorial crosses {MOST_CROSSED} factors at most, and the spec compares {len(question.varied)}; use screen",
        )
    _refuse_many_levels(question)
    question, note = check_balance(question, instrument) if spec.design == "balance" else (question, None)
    question = check_trend(question) if spec.design == "trend" else question
    arms = arms_of(question)
    hypotheses = hypotheses_of(question, arms)
    seeds = _seeds(instrument, spec)
    arms, hypotheses, stages = laid_out(question, arms, hypotheses, seeds)
    first = spec.seeds.first
    stages = tuple(each.model_copy(update={"first_seed": each.first_seed + first}) for each in stages)
    settings = dict(_by_target(question.settings))
    refuse_held_share(question.factors, [factor for factor, _ in question.settings])
    model = models[spec.models[0]] if spec.models else PlanModel(name=instrument.model)
    plan = Plan(
        question=spec.question,
        instrument=instrument.name,
        instrument_version=instrument.version,
        instrument_code=folder.code,
        model=model,
        models=models_of(arms, question.factors, models),
        hypotheses=hypotheses,
        arms=arms,
        factors=question.factors,
        stages=stages,
        branches=_branches(question, arms, hypotheses, stages, allow_underpowered=allow_underpowered),
        steps=spec.steps or defaults.steps,
        run=_run(instrument, settings, question.settings),
        roles=_roles(instrument, settings, model.name),
        task=_task(instrument, settings),
        heldout_tasks=defaults.heldout_tasks,
        heldout_episodes=defaults.heldout_episodes,
        heldout_temperature=defaults.heldout_temperature,
        metrics=_metrics(question, instrument),
        power=POWER,
        planned_effect=PLANNED_EFFECT * question.metric.margin,
        sampling_floor=True,
        merged_looks=any(stage.spends is not None for stage in stages),
        sentinels=PLANNED,
        budget=Budget(wall_s=spec.budget.wall or DEFAULT_BUDGET_S, trials=len(arms) * seeds[1]),
        planner=SPEC,
        assumptions=(*question.notes, *([note] if note else ()), *_assumed(question)),
    )
    plan = _with_algorithms_first(plan, settings)
    return plan.model_copy(update={"trial_s": longest_trial_s(plan, instrument)})


def _with_algorithms_first(plan: Plan, settings: dict[str, Any]) -> Plan:
    """Where an arm's algorithm has other defaults than the instrument, those go first, but for what the spec sets."""
    stated = tuple(target.removeprefix("run.") for target in settings if target.startswith("run."))
    yielding = plan.model_copy(update={"stated": stated})
    levels = [plan.levels_of(arm) for arm in plan.arms]
    same = all(
        plan.run_fields(each, role) == yielding.run_fields(each, role)
        for each in levels
        for role in (None, *plan.roles)
    )
    return plan if same else yielding


def _refuse_many_levels(question: Question) -> None:
    """Raises: SpecRefused for a crossed factor that has not two levels: a spec may name more models."""
    wide = [each for each in question.varied if len(each.levels) != 2]
    if question.spec.design in CROSSED and wide:
        name, count = wide[0].factor.name, len(wide[0].levels)
        said = f"{question.spec.design} takes two levels of each factor, and {name} has {count}"
        raise SpecRefused(name if name not in question.spec.compare else f"compare.{name}.levels", said, [name])


def _metrics(question: Question, instrument: Instrument) -> tuple[Metric, ...]:
    """The one that decides, those that the spec names besides (where it names none, all that the instrument names), and what a
    sentinel needs."""
    first = tuple(metric.asked for metric in (question.metric, *question.secondary))
    names = {metric.name for metric in first}
    rest = [metric for metric in instrument.metrics if metric.name not in names and not metric.on_request]
    return (*first, *(metric for metric in rest if metric.true or not question.secondary))


def _assumed(question: Question) -> list[str]:
    """What the spec leaves open, in words."""
    metric = question.metric
    if question.spec.design == "screen":
        claimed = "" if question.spec.claim == "none" else f" The claim ({question.spec.claim}) is not tested."
        return [
            f"A screen explores: it ranks the factors by their effects on {metric.name}, without a verdict.{claimed}"
        ]
    if question.spec.claim == "equal":
        return [f"The claim is that {metric.name} is the same: the verdict `equivalent` confirms it."]
    if question.spec.claim == "none":
        better = "higher" if metric.direction == "increase" else "lower"
        return [f"No direction is claimed: tested as {better} {metric.name}; the other way reads as refuted."]
    return []


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
        full = levels.get(RUN_PARAMETERS, "lora") != "lora"
        if full and any(target.startswith(f"{RUN_PARAMETERS}.") for target in levels):
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
    question: Question,
    arms: Sequence[Arm],
    hypotheses: Sequence[Hypothesis],
    stages: Sequence[Stage],
    *,
    allow_underpowered: bool,
) -> tuple[Branch, ...]:
    if question.spec.design == "sequence":
        return succession.branches_of(question, stages, hypotheses, allow_underpowered=allow_underpowered)
    names = [arm.name for arm in arms]
    at_end = balances(names, question.metric, stages[-1].id, ALPHA) if question.spec.design == "balance" else ()
    return branches(stages, hypotheses, allow_underpowered=allow_underpowered, at_end=at_end)


def _seeds(instrument: Instrument, spec: StudySpec) -> tuple[int, int]:
    """The least and the most seeds per arm. A bound that the spec gives moves its own end only; nothing asks a screen for more than
    its least."""
    if spec.design == "screen":
        return (spec.seeds.min or SCREEN_SEEDS,) * 2
    usual, least, most = instrument.defaults, spec.seeds.min, spec.seeds.max
    least = least or min(usual.seeds, most or usual.seeds)
    return least, most or max(usual.max_seeds, least + usual.max_seeds - usual.seeds)


def _by_target(settings: Sequence[Setting]) -> list[tuple[str, Any]]:
    return [(target, level) for factor, level in settings for target in factor.targets]


def _run(instrument: Instrument, settings: dict[str, Any], held: Sequence[Setting] = ()) -> dict[str, Any]:
    run: Any = instrument.defaults.run
    if ALGORITHM in settings:
        run = with_algorithm(run, settings[ALGORITHM])
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
