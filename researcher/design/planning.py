"""Turns a study spec into its plan: everything that decides the study is fixed here and hashed with the plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.analysis.knowledge import known_to
from researcher.design.arms import with_own_seeds
from researcher.design.layout import branches_of, laid_out
from researcher.design.models import models_of, with_models
from researcher.design.pricing import Pace, fitted, timed
from researcher.design.question import Question, question_of
from researcher.design.stages import POWER, SCREEN_SEEDS, Seeds, check_seeds
from researcher.design.transfer import scored_on
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.instruments.instrument import (
    ALGORITHM,
    RUN_PARAMETERS,
    Instrument,
    Metric,
    Scalar,
    nested,
)
from researcher.instruments.shares import with_shares_of
from researcher.models import Finding
from researcher.refusals import PlanningRefused, Refusals, SpecRefused
from researcher.study.plan import (
    ALPHA,
    INTERIM_TASKS,
    PLANNED_SENTINELS,
    Budget,
    Plan,
    PlanModel,
    PlanRole,
    with_algorithm,
)
from researcher.study.spec import BASE, StudySpec
from swarm.models.catalogue import find
from swarm.protocol.runspec import RunSpec, merge_patch

PLANNED_EFFECT = 1.5
"""Default effect to detect, in margins of the metric. The plan must detect it with the planned power."""
DEFAULT_BUDGET_S = 8 * 3600.0
_THINKING = "sampling.thinking"
KeptModels = Callable[[str], PlanModel]
SPEC = "spec"
"""Author recorded in all plans. The study's record names the author of the spec."""


def plan_of(
    spec: StudySpec,
    folder: InstrumentFolder,
    *,
    known: Sequence[Finding] = (),
    paces: Sequence[Pace] = (),
    servers: int = 1,
    allow_underpowered: bool = False,
    alpha: float = ALPHA,
    heldout_from: int = 0,
    heldout_tasks: int | None = None,
    planned_effect: float | None = None,
    kept: KeptModels | None = None,
) -> Plan:
    """Return the plan of a spec, priced and checked. The same spec gives the same plan, whoever wrote it.

    Args:
        folder: the instrument that the spec names.
        known: findings of earlier studies.
        paces: speeds of earlier trials on these servers, newest first.
        servers: number of servers to price the study for.
        allow_underpowered: run even if the noise is too large for the planned effect.
        alpha: significance level of the family of hypotheses; determines intervals, power and looks.
        heldout_from: number of the instrument's held-out tasks to skip, because other studies may score them.
        heldout_tasks: number of held-out tasks to score; None: the instrument's default.
        planned_effect: effect that the number of seeds is planned for, in the metric's unit; None: 1.5 margins.
        kept: finds the model of a kept trial, STUDY/TRIAL (`researcher.kept_models`), or raises SpecRefused; None: no model was
            kept.
    Raises: PlanningRefused, with one line that says what to change.
    """
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie between 0 and 0.5, got {alpha}")
    refusals, others = Refusals(), list[InstrumentFolder]()
    for name in spec.evaluate_on:
        with refusals.kept():
            others.append(_other(name, spec, folder))
    models: Mapping[str, PlanModel] | None = None
    start: PlanModel | None = None
    with refusals.kept():
        start = _start(spec, folder.instrument, kept)
    with refusals.kept():
        spec, models = with_models(spec, folder.instrument)
    try:
        with refusals.kept():
            question = question_of(spec, folder.instrument, alpha)
            if models is not None:
                plan = _designed(question, folder, models, start, allow_underpowered=allow_underpowered)
                wanted = {
                    "heldout_from": heldout_from,
                    "heldout_tasks": heldout_tasks or plan.heldout_tasks,
                    "planned_effect": plan.planned_effect if planned_effect is None else planned_effect,
                }
                plan = timed(plan.model_copy(update=wanted), folder.instrument, paces)
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, Plan)]
        raise PlanningRefused(f"these settings do not give a valid plan: {'; '.join(problems)}", problems) from error
    refusals.raise_any()
    plan = scored_on(plan, others)
    plan = checked(fitted(plan, folder.instrument, spec, servers=servers))
    return plan.model_copy(update={"known": known_to(plan, known)})


def _other(name: str, spec: StudySpec, folder: InstrumentFolder) -> InstrumentFolder:
    """Return another instrument on whose held-out tasks to score trained models. Raises: SpecRefused."""
    try:
        other = open_instrument(name)
    except PlanningRefused as error:
        raise SpecRefused("evaluate_on", str(error), error.nearest) from error
    if other.instrument.name != name:
        said = f"give the instrument's name ({other.instrument.name}), not its folder; `researcher instruments` lists the names"
        raise SpecRefused("evaluate_on", said)
    if name == folder.instrument.name or spec.evaluate_on.count(name) > 1:
        raise SpecRefused(
            "evaluate_on",
            f"{name} is the study's own instrument, on which every trial is scored anyway, or is named twice; leave it out",
        )
    generated = [each.instrument.name for each in (folder, other) if each.instrument.generated is not None]
    if generated:
        raise SpecRefused(
            "evaluate_on",
            f"an LLM wrote {generated[0]}, and its code runs in a sandbox that sees only one instrument; leave it out",
        )
    teams = [each.instrument.name for each in (folder, other) if each.instrument.roles]
    if teams:
        raise SpecRefused(
            "evaluate_on",
            f"{teams[0]} takes several models, but only one plays the tasks of another instrument: leave it out",
        )
    return other


def _start(spec: StudySpec, instrument: Instrument, kept: KeptModels | None) -> PlanModel | None:
    """Return the kept model that the spec starts from, or None for the base model. Raises: SpecRefused."""
    if spec.start_from == BASE:
        return None
    if spec.models or any("model" in settings for settings in spec.arms.values()):
        said = (
            f"all arms start from the weights of {spec.start_from}, but `model` names other weights: drop one of them"
        )
        raise SpecRefused("start_from", said)
    if instrument.roles:
        said = f"trials of {instrument.name} train further models ({', '.join(instrument.roles)}), which have no weights to start from"
        raise SpecRefused("start_from", f"{said}; leave it out")
    if kept is None:
        said = f"there are no studies here yet, so {spec.start_from} was not kept: leave it out to start from the base model"
        raise SpecRefused("start_from", said)
    return kept(spec.start_from)


def split_heldout(available: int, wanted: int) -> tuple[int, int]:
    """Return how many held-out tasks explorations and confirmations score; the two share none.

    Explorations score the first tasks, confirmations the next ones (`heldout_from` of `plan_of`).

    Args:
        available: number of held-out tasks that the instrument has.
        wanted: number that a study should score.
    Returns: `wanted` each if there are enough, else half of them each; confirmations get the odd one.
    Raises: PlanningRefused if there are fewer than two.
    """
    if available < 2:
        raise PlanningRefused(
            f"explorations and confirmations each need at least one held-out task of their own, and the instrument has "
            f"{available} in all: give it more held-out tasks"
        )
    return min(wanted, available // 2), min(wanted, available - available // 2)


def _designed(
    question: Question,
    folder: InstrumentFolder,
    models: Mapping[str, PlanModel],
    start: PlanModel | None,
    *,
    allow_underpowered: bool,
) -> Plan:
    """Return the plan before it is fitted to its budget.

    `models` are those of the spec, by name. `start` is the kept model that all arms start from.
    """
    spec, instrument, defaults = question.spec, folder.instrument, folder.instrument.defaults
    seeds = _seeds(instrument, spec)
    layout = laid_out(question, instrument, seeds)
    question, arms, hypotheses = layout.question, layout.arms, layout.hypotheses
    stages = tuple(each.model_copy(update={"first_seed": each.first_seed + spec.seeds.first}) for each in layout.stages)
    settings = {target: level for factor, level in question.settings for target in factor.targets}
    models = models if start is None else {start.name: start}
    model = start or (models[spec.models[0]] if spec.models else PlanModel(name=instrument.model))
    run, thoughtless = _run(question, instrument, settings), _stop_thinking(question, instrument, models)
    if thoughtless:
        run = merge_patch(run, nested(_THINKING, False))
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
        branches=branches_of(question, stages, hypotheses, allow_underpowered=allow_underpowered),
        steps=spec.steps or defaults.steps,
        run=run,
        sources=dict(question.sources),
        roles={
            name: PlanRole(model=role.model or model.name, run=_patched(role.run, settings, f"roles.{name}."))
            for name, role in instrument.roles.items()
        },
        task=defaults.task | _within(settings, "task."),
        heldout_tasks=defaults.heldout_tasks,
        heldout_episodes=defaults.heldout_episodes,
        heldout_temperature=defaults.heldout_temperature,
        heldout_every=defaults.heldout_every if spec.heldout_every is None else spec.heldout_every,
        metrics=_metrics(question, instrument),
        power=POWER,
        planned_effect=PLANNED_EFFECT * question.metric.margin,
        sampling_floor=True,
        merged_looks=any(stage.spends is not None for stage in stages),
        sentinels=PLANNED_SENTINELS,
        budget=Budget(
            wall_s=spec.budget.wall or DEFAULT_BUDGET_S, trials=len(arms) * seeds[1], tokens=spec.budget.tokens
        ),
        planner=SPEC,
        assumptions=(*question.notes, *_assumed(question), *_measured_apart(question), *thoughtless),
    )
    return _with_algorithms_first(_with_interim_stated(plan), settings)


def _with_interim_stated(plan: Plan) -> Plan:
    """Add a sentence about interim evaluations to the plan, or turn them off if every arm is too short for one."""
    if not any(plan.interim_evaluations(arm.name) for arm in plan.arms):
        return plan.model_copy(update={"heldout_every": 0})
    steps = "every step" if plan.heldout_every == 1 else f"every {plan.heldout_every} steps"
    said = (
        f"While training goes on, up to {INTERIM_TASKS} of the held-out tasks are played {steps}, once each, for the curves: "
        "these numbers decide nothing."
    )
    return plan.model_copy(update={"assumptions": (*plan.assumptions, said)})


def _stop_thinking(question: Question, instrument: Instrument, models: Mapping[str, PlanModel]) -> tuple[str, ...]:
    """Return an assumption that models do not think before they answer, if any of them could and the spec does not say.

    The length limit of answers suits the instrument's own model; a thinking model would run out of tokens before it answers.
    """
    others = [model for model in models.values() if find(model.name) is None and model.name != instrument.model]
    asked = [*question.factors, *(factor for factor, _ in question.settings)]
    stated = any(f"run.{_THINKING}" in factor.targets for factor in asked)
    if not others or stated or "thinking" in instrument.defaults.run.get("sampling", {}):
        return ()
    return ("Models that can think before they answer do not: answers are short here (thinking=false).",)


def _run(question: Question, instrument: Instrument, settings: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return the run settings that all arms share.

    Raises: PlanningRefused if the shares of some task families leave nothing for the others.
    """
    run: Any = instrument.defaults.run
    if ALGORITHM in settings:
        run = with_algorithm(run, str(settings[ALGORITHM]))
    try:
        return with_shares_of(
            _patched(run, settings, "run."), settings, [factor for factor, _ in question.settings], "run."
        )
    except ValueError as error:
        raise PlanningRefused(str(error)) from error


def _patched(run: Any, settings: Mapping[str, Scalar], room: str) -> dict[str, Any]:
    for path, level in _within(settings, room).items():
        run = merge_patch(run, nested(path, level))
    return dict(run)


def _within(settings: Mapping[str, Scalar], room: str) -> dict[str, Scalar]:
    """Return the settings whose targets start with the prefix `room`, keyed by the rest of the target."""
    return {target.removeprefix(room): level for target, level in settings.items() if target.startswith(room)}


def _with_algorithms_first(plan: Plan, settings: Mapping[str, Scalar]) -> Plan:
    """Let the defaults of each arm's algorithm override the instrument's settings, but not the spec's own settings."""
    yielding = plan.model_copy(update={"stated": tuple(_within(settings, "run."))})
    levels = [plan.levels_of(arm) for arm in plan.arms]
    same = all(
        plan.run_fields(each, role) == yielding.run_fields(each, role)
        for each in levels
        for role in (None, *plan.roles)
    )
    return plan if same else yielding


def _metrics(question: Question, instrument: Instrument) -> tuple[Metric, ...]:
    """Return the primary metric, the spec's secondary metrics (default: the instrument's), and those that sentinels need."""
    first = tuple(metric.asked for metric in (question.metric, *question.secondary))
    names = {metric.name for metric in first}
    rest = [metric for metric in instrument.metrics if metric.name not in names and not metric.on_request]
    return (*first, *(metric for metric in rest if metric.true or not question.secondary))


def _assumed(question: Question) -> list[str]:
    """Describe the assumptions about what the spec leaves open."""
    metric = question.metric
    if question.screens:
        ranks = "factors by their effects on" if question.crossed else "arms by how far they are from the first on"
        claimed = "" if question.spec.claim == "none" else f" The claim ({question.spec.claim}) is not tested."
        return [f"A screen explores: it ranks the {ranks} {metric.name}, without a verdict.{claimed}"]
    if question.spec.claim == "equal":
        return [f"The claim is that {metric.name} is the same: the verdict `equivalent` confirms it."]
    if question.spec.claim == "none":
        better = "higher" if metric.direction == "increase" else "lower"
        return [f"No direction is claimed: tested as {better} {metric.name}; the other way reads as refuted."]
    return []


def _measured_apart(question: Question) -> list[str]:
    """Return a caution if the arms sample training episodes differently and are compared by a metric of those episodes."""
    names = [factor.name for factor in question.factors if factor.samples]
    if not names or not question.metric.on_training:
        return []
    return [
        f"{' and '.join(names)} also {'changes' if len(names) == 1 else 'change'} how {question.metric.name} is measured, which is on episodes "
        "of training: where held-out tasks, sampled alike in all arms, say the opposite, the verdict is invalid."
    ]


def _seeds(instrument: Instrument, spec: StudySpec) -> Seeds:
    """Return the minimum and maximum seeds per arm.

    A bound in the spec replaces only that bound. A screen always runs the minimum.
    """
    usual, least, most = instrument.defaults, spec.seeds.min, spec.seeds.max
    if spec.design == "screen":
        if least and most and least < most:
            said = f"a screen runs each arm on one number of seeds, not on {least} to {most}: give {least} or {most}"
            raise SpecRefused("seeds.max", said)
        return (least or SCREEN_SEEDS,) * 2
    least = least or min(usual.seeds, most or usual.seeds)
    return least, most or max(usual.max_seeds, least + usual.max_seeds - usual.seeds)


def checked(plan: Plan) -> Plan:
    """Check the plan, and give arms with equal settings different seeds.

    Checks that arm names differ, that a server would accept each arm, and that every stage leads somewhere. Raises: PlanningRefused.
    """
    shared = [name for name, count in Counter(arm.name for arm in plan.arms).items() if count > 1]
    if shared:
        raise PlanningRefused(
            f"several arms would be called {shared[0]}, and their trials could not be told apart; write their levels differently",
            shared,
        )
    for arm in plan.arms:
        levels = plan.levels_of(arm)
        full = levels.get(RUN_PARAMETERS, "lora") != "lora"
        if full and any(target.startswith(f"{RUN_PARAMETERS}.") for target in levels):
            raise PlanningRefused(
                f"arm {arm.name} is impossible: full fine-tuning has no rank or alpha; compare LoRA with full fine-tuning, or "
                "LoRA's ranks with each other"
            )
        for role in (None, *plan.roles):
            try:
                RunSpec.model_validate(plan.run_fields(levels, role))
            except ValidationError as error:
                problems = "; ".join(str(problem) for problem in explain(error, RunSpec))
                raise PlanningRefused(f"arm {arm.name} cannot be run: {problems}") from error
            except ValueError as error:
                raise PlanningRefused(f"arm {arm.name} cannot be run: {error}") from error
    plan = _with_mixes_stated(with_own_seeds(plan))
    check_seeds(plan)
    stages = {stage.id for stage in plan.stages}
    undecided = stages - {branch.stage for branch in plan.branches if branch.when.kind == "always"}
    if undecided:
        raise ValueError(
            f"no branch is sure to be taken after stages {sorted(undecided)}; give each an unconditional one"
        )
    into = {(branch.stage, branch.to) for branch in plan.branches if branch.then == "stage"}
    if {to for _, to in into} - stages or len({to for _, to in into}) < len(into):
        raise ValueError(
            "a branch leads to a stage that does not exist, or branches of two stages lead to the same one"
        )
    return Plan.model_validate(plan.model_dump())


def _with_mixes_stated(plan: Plan) -> Plan:
    """Add an assumption for each arm that sets a share: its complete mix of task families."""
    said = list(plan.assumptions)
    for arm in plan.arms:
        if any(factor.share and factor.name in arm.levels for factor in plan.factors):
            mix = plan.run_fields(plan.levels_of(arm))["batch"]["mix"]
            families = ", ".join(f"{family} {100 * each['ratio']:.4g} %" for family, each in mix.items())
            said.append(f"The mix of {arm.name} is {families}.")
    return plan.model_copy(update={"assumptions": tuple(dict.fromkeys(said))})
