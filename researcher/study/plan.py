"""Everything that decides a study: arms, hypotheses, stages, branches, budget.

A `Plan` is frozen: its canonical JSON is hashed before the first trial, and every trial key is derived from that hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from foundation.strict import StrictModel
from researcher.instruments.instrument import (
    ALGORITHM,
    RUN_PARAMETERS,
    STUDY_MODEL,
    STUDY_STEPS,
    Direction,
    Factor,
    Metric,
    Scalar,
    leaf_at,
    leaves,
    nested,
)
from researcher.instruments.shares import with_shares_of
from swarm.models.catalogue import hosted_name
from swarm.protocol.algorithms import OWN_FIELDS, own_function
from swarm.protocol.runspec import merge_patch, own_defaults

ALPHA = 0.05
"""Error rate of a standalone study: the chance of a false verdict among the hypotheses that one stage decides."""


def _is_unset(value: object) -> bool:
    """True for empty values. Keeps newer fields that a plan does not use out of its JSON, so that earlier plans keep their hashes."""
    return not value


class Verdict(StrEnum):
    """The verdict on a hypothesis, computed by code."""

    INVALID = "invalid"
    SUPPORTED = "supported"
    REFUTED = "refuted"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


class Arm(StrictModel):
    """One compared setting: levels of factors. Everything else is at the instrument's defaults."""

    name: str
    levels: dict[str, Scalar]
    seed_offset: Annotated[int, Field(ge=0, exclude_if=_is_unset)] = 0
    """Offset added to each stage's seeds. Above 0 if an earlier arm has equal settings, so that no trial of one copies one of the
    other.
    """


class Hypothesis(StrictModel):
    """The hypothesis that `treatment` beats `baseline` on `metric` in `direction` by at least `margin`."""

    id: str
    statement: str
    factor: str
    baseline: str
    treatment: str
    metric: str
    direction: Direction
    """The claimed direction of the treatment's metric."""
    direction_assumed: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Whether this hypothesis claims no direction. `direction` is then the question's claim if it has one, else the better direction of the
    metric."""
    margin: Annotated[float, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = ALPHA
    baseline_arms: Annotated[tuple[str, ...], Field(exclude_if=_is_unset)] = ()
    """Arms whose mean is the baseline side of a main effect or interaction; `baseline` is then a label."""
    treatment_arms: Annotated[tuple[str, ...], Field(exclude_if=_is_unset)] = ()
    between_arms: Annotated[tuple[str, ...], Field(exclude_if=_is_unset)] = ()
    """For a trend: the arms between the lowest level (`baseline`) and the highest (`treatment`). The claim is about the change from
    one end to the other, along a line fitted to all these arms on the factor's own scale.
    """

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the arms on the baseline's side."""
        return self.baseline_arms or (self.baseline,)

    @property
    def treatments(self) -> tuple[str, ...]:
        """Names of the arms on the treatment's side."""
        return self.treatment_arms or (self.treatment,)

    @property
    def sides(self) -> frozenset[str]:
        """Names of all arms of the hypothesis."""
        return frozenset((*self.baselines, *self.between_arms, *self.treatments))


class StageKind(StrEnum):
    NOISE_FLOOR = "noise_floor"
    COARSE = "coarse"
    """A rung of a race over many arms: explores, gives no verdict."""
    FINE = "fine"
    """Optuna picks among the stage's arms, one at a time: explores, gives no verdict."""
    SCREEN = "screen"
    """Main effects of many factors, each over all runs of a two-level design: explores, gives no verdict."""
    COMPARE = "compare"
    CONFIRM = "confirm"


class Stage(StrictModel):
    """Which arms run, on the seeds `first_seed` to `first_seed + seeds - 1`, plus the `seed_offset` of arms that have one."""

    id: str
    kind: StageKind
    arms: tuple[str, ...]
    seeds: Annotated[int, Field(ge=1)]
    max_seeds: Annotated[int, Field(ge=1)]
    """Maximum number of seeds to which the stage may grow if the noise floor calls for them, before any effect is examined."""
    first_seed: Annotated[int, Field(ge=0)] = 0
    keep: Annotated[int | None, Field(ge=1, exclude_if=_is_unset)] = None
    """Number of non-baseline arms that run: the best of earlier exploring stages. None: all."""
    picks: Annotated[int | None, Field(ge=1, exclude_if=_is_unset)] = None
    """For a fine stage: number of arms that Optuna may try. Set only for this kind."""
    share: Annotated[float | None, Field(gt=0, le=1, exclude_if=_is_unset)] = None
    """For a look in a sequential design: cumulative fraction of the seeds used by this look; 1 at the last look."""
    spends: Annotated[float | None, Field(gt=0, lt=0.5, exclude_if=_is_unset)] = None
    """The part of alpha that this look may spend. The looks' parts sum to alpha."""

    @property
    def explores(self) -> bool:
        """Whether the stage only explores. Its results must be confirmed on fresh seeds."""
        return self.kind in (StageKind.COARSE, StageKind.FINE, StageKind.SCREEN)


Relation = Literal["≪", "≈", "≫"]


class Condition(StrictModel):
    """A typed condition on effects or verdicts, evaluated by code: `verdict(H1) in {supported}`, `diff(H1) >= 0.1`.

    Kinds that need explanation:

        order: `arms[0] relations[0] arms[1] relations[1] …` on `metric`, so that `5 ≪ 15 ≈ 25` is a condition and not prose. `a ≪
            b`: b exceeds a by at least the metric's margin, and the interval of the difference lies above zero. `≫`: the reverse.
            `a ≈ b`: two one-sided tests place the difference within the margin. All relations hold jointly, at `alpha`.
        verdict_in: the verdict on `hypothesis`, or, if none is named, on every hypothesis still in the running, is one of
            `verdicts`.
        leads: `hypothesis` has one of `verdicts`, and the largest effect among the hypotheses of its stage that have one.
    """

    kind: Literal["verdict_in", "leads", "diff_at_least", "diff_at_most", "power_below", "order", "always"]
    hypothesis: str | None = None
    verdicts: tuple[str, ...] = ()
    value: float | None = None
    arms: Annotated[tuple[str, ...], Field(exclude_if=_is_unset)] = ()
    relations: Annotated[tuple[Relation, ...], Field(exclude_if=_is_unset)] = ()
    metric: Annotated[str | None, Field(exclude_if=_is_unset)] = None
    alpha: Annotated[float | None, Field(gt=0, lt=0.5, exclude_if=_is_unset)] = None

    @model_validator(mode="after")
    def _order_is_whole(self) -> Self:
        if self.kind == "order" and (
            len(self.arms) < 2 or len(self.relations) != len(self.arms) - 1 or not self.metric
        ):
            raise ValueError(
                "an order needs a metric, at least two arms, and one relation between each arm and the next"
            )
        return self


class Branch(StrictModel):
    """After `stage`, the first branch whose condition holds decides: go to a stage, stop and report, or refuse."""

    stage: str
    when: Condition
    then: Literal["stage", "stop", "underpowered"]
    to: str | None = None
    reason: str


class Budget(StrictModel):
    """Enforced limits on the trials' time, number and tokens. A planner LLM's tokens and cost have separate limits."""

    wall_s: Annotated[float, Field(gt=0)]
    trials: Annotated[int, Field(ge=1)]
    tokens: Annotated[int | None, Field(ge=1)] = None
    """Prompt and sampled tokens of agents' calls. None: no limit."""


class PlanModel(StrictModel):
    """A model that servers host. A folder is identified by its weights, any other model by its name."""

    name: str
    """A known name, a hub name OWNER/NAME, or the folder's name."""
    fingerprint: str | None = None
    """SHA-256 over the folder's weight files, as servers compute it. None: whatever weights the first trial finds."""
    path: Annotated[str | None, Field(exclude_if=_is_unset)] = None
    """Absolute path of the folder on the machine where the plan was made."""
    origin: Annotated[str | None, Field(exclude_if=_is_unset)] = None
    """STUDY/TRIAL that trained these weights. None: no trial known here."""

    @property
    def source(self) -> str:
        """Argument of `swarm serve --model`."""
        return self.path or self.name

    @property
    def title(self) -> str:
        """The model's name, with a prefix of the fingerprint if the name alone does not identify the weights."""
        return self.name if self.fingerprint is None else f"{self.name}@{self.fingerprint[:12]}"

    def is_hosted(self, name: str, fingerprint: str | None, engine: str | None) -> bool:
        """Return whether a server that reports these values hosts the model. The echo engine has no weights, so there the name
        decides.
        """
        if self.fingerprint is None or fingerprint is None or engine == "echo":
            return hosted_name(self.name) == hosted_name(name)
        return self.fingerprint == fingerprint


class PlanRole(StrictModel):
    """A further model, trained in every trial on its own server."""

    model: str
    run: dict[str, Any] = {}
    """Run settings, merged over the run settings of the arm."""


class Transfer(StrictModel):
    """Held-out tasks of another instrument, on which every trial's model is scored after training.

    `code` is the SHA-256 over the files of its folder. `task` holds parameters of its tasks. `episodes` is the number per task.
    """

    instrument: str
    code: str
    task: dict[str, Scalar]
    tasks: Annotated[int, Field(ge=1)]
    episodes: Annotated[int, Field(ge=1)]
    temperature: float


class Known(StrictModel):
    """A finding of an earlier study, as known at planning. The numbers are None if it has no effect."""

    id: str
    statement: str
    verdict: Verdict
    direction: Direction
    margin: float | None = None
    diff: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    """Confidence level of the interval from `low` to `high`."""
    n_baseline: int | None = None
    n_treatment: int | None = None
    plan_hash: str
    origin: Annotated[str | None, Field(exclude_if=_is_unset)] = None
    """Who shared the finding, if it was imported; it cannot be recomputed here."""
    engine: Annotated[Literal["echo"] | None, Field(exclude_if=_is_unset)] = None
    """Set for findings on the echo engine, which trains no model."""
    same_as: dict[str, Literal[1, -1]] = {}
    """Hypotheses of this plan that ask the same question, by id: 1 for the same orientation, -1 if the sides are swapped."""


INTERIM_TASKS = 16
"""Maximum number of held-out tasks in an interim evaluation: enough to show the shape of a curve at low cost."""
PLANNED_SENTINELS = (
    "weights_did_not_change",
    "heldout_leak",
    "factor_not_applied",
    "unplanned_change",
    "shared_machine",
    "mixed_code",
    "mixed_types",
    "attrition",
    "sampled_by_other_weights",
    "collapse",
    "no_signal",
    "heldout_gap",
    "longer_without_reward",
    "repetitive_answers",
    "reward_against_success",
    "worse_on_heldout",
)
"""The sentinels that new plans name (`researcher.analysis.sentinels`), in the order in which they run."""


class Plan(StrictModel):
    """Everything that decides a study, fixed before its first trial (invariant I6)."""

    schema_version: Literal[1] = 1
    version: Annotated[int, Field(ge=1)] = 1
    question: str
    instrument: str
    instrument_version: str
    instrument_code: str
    """SHA-256 over the files of the instrument's folder."""
    model: PlanModel
    """The hosted model, unless arms differ in the model."""
    models: Annotated[tuple[PlanModel, ...], Field(exclude_if=_is_unset)] = ()
    """The models that the arms compare, under the names that their levels use. Empty if all arms share `model`."""
    hypotheses: tuple[Hypothesis, ...]
    arms: tuple[Arm, ...]
    factors: tuple[Factor, ...] = ()
    """The factors that arms vary, as the instrument declared them, so that a plan is readable without its instrument."""
    stages: tuple[Stage, ...]
    branches: tuple[Branch, ...]
    steps: Annotated[int, Field(ge=1)]
    run: dict[str, Any]
    """Partial RunSpec shared by all arms."""
    sources: Annotated[dict[str, str], Field(exclude_if=_is_unset)] = {}
    """Texts of files that define functions used as levels or settings of an algorithm, by the file names used there."""
    stated: Annotated[tuple[str, ...] | None, Field(exclude_if=lambda stated: stated is None)] = None
    """Fields of `run` that the study sets itself. Set only if arms differ in their algorithm and its defaults differ from the
    instrument's.

    The algorithm's defaults replace all other fields. None: they replace nothing, as in older plans.
    """
    roles: Annotated[dict[str, PlanRole], Field(exclude_if=_is_unset)] = {}
    """Further models by role. Each needs one more server per trial."""
    task: dict[str, Scalar]
    heldout_tasks: int
    heldout_from: Annotated[int, Field(ge=0, exclude_if=_is_unset)] = 0
    """Number of the instrument's held-out tasks to skip before the scored ones."""
    heldout_episodes: int
    heldout_temperature: float
    heldout_every: Annotated[int, Field(ge=0, exclude_if=_is_unset)] = 0
    """Optimizer steps between two interim evaluations, which are shown but decide nothing; 0: none."""
    transfers: Annotated[tuple[Transfer, ...], Field(exclude_if=_is_unset)] = ()
    """Other instruments on which trained models are scored, for secondary metrics."""
    trial_s: Annotated[float | None, Field(gt=0, exclude_if=_is_unset)] = None
    """Expected wall time of the longest trial, from which time limits are derived. None: unknown."""
    trial_s_measured: Annotated[str | None, Field(exclude_if=_is_unset)] = None
    """Where `trial_s` was measured on the same servers: an earlier study, or `3 steps of STUDY` for a calibration. None: `trial_s` is
    the instrument's estimate.
    """
    trial_tokens: Annotated[float | None, Field(gt=0, exclude_if=_is_unset)] = None
    """Expected tokens of one trial's calls, for the arm that needs the most, as estimated when planning. Set only if the budget limits
    tokens.
    """
    metrics: tuple[Metric, ...]
    power: Annotated[float, Field(gt=0, lt=1)] = 0.8
    planned_effect: float
    """Effect that the study must detect with the planned power: 1.5 × margin unless stated."""
    sigma_confidence: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """One-sided confidence of the noise floor's upper bound on σ, which determines the number of seeds."""
    sampling_floor: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Whether the upper bound on a held-out metric's σ is raised to at least the σ that sampling the answers can cause on its own."""
    merged_looks: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Whether a look that adds no seeds is merged with the previous look, which may then spend the alpha of both."""
    sentinels: tuple[str, ...] = ()
    budget: Budget
    known: tuple[Known | str, ...] = ()
    """Findings that were known when planning. Plans of the first release hold only ids."""
    planner: str
    """`builtin`, or the LLM's name."""
    assumptions: tuple[str, ...] = ()
    """Choices that the topic left open and how they were made, in words."""

    @model_validator(mode="after")
    def _each_arms_model_is_known(self) -> Self:
        levels = {str(level) for arm in self.arms if (level := self._level(arm, STUDY_MODEL)) is not None}
        if levels != {model.name for model in self.models}:
            raise ValueError(
                f"arms train {sorted(levels)}, but the plan's models are {[each.name for each in self.models]}"
            )
        return self

    @property
    def trial_s_source(self) -> str:
        """The source of a trial's expected duration, in words."""
        return f"measured here, {self.trial_s_measured}" if self.trial_s_measured else "estimated"

    def canonical(self) -> str:
        """Return canonical JSON: sorted keys, no white space."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def run_fields(self, levels: Mapping[str, Scalar], role: str | None = None) -> dict[str, Any]:
        """Return the partial RunSpec for the instrument's own model or, if `role` is given, for that role's model.

        `levels` maps factor targets to an arm's levels, as returned by `levels_of`.
        """
        fields: Any = self.run
        if self.stated is not None and ALGORITHM in levels:
            fields = with_algorithm(fields, str(levels[ALGORITHM]), self.stated)
        rooms = ("run.",) if role is None else ("run.", f"roles.{role}.")
        for room in rooms:
            if role is not None and room != "run.":
                fields = merge_patch(fields, self.roles[role].run)
            for target, level in levels.items():
                if target.startswith(room) and not _has_adapters(fields, target, level):
                    fields = merge_patch(fields, nested(target.removeprefix(room), level))
        return with_shares_of(self._with_sources(fields), levels, self.factors, *rooms)

    def _with_sources(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add the source texts of the functions that the algorithm's fields name, if the plan has them."""
        named = fields.get("algorithm", {}) if self.sources else {}
        files = [own[0] for name in OWN_FIELDS if (own := own_function(named.get(name))) is not None]
        texts = {file: self.sources[file] for file in files if file in self.sources}
        return merge_patch(fields, {"algorithm": {"sources": texts}}) if texts else fields

    def shared_out(self, arm: Arm) -> dict[str, float]:
        """Return the ratios of task families that follow from the arm's shares, by target."""
        levels = self.levels_of(arm)
        found: dict[str, float] = {}
        for role in (None, *self.roles):
            room = "run" if role is None else f"roles.{role}"
            rooms = ("run.",) if role is None else ("run.", f"roles.{role}.")
            mix = self.run_fields(levels, role).get("batch", {}).get("mix", {})
            if any(factor.share and target.startswith(rooms) for factor in self.factors for target in factor.targets):
                found |= {f"{room}.batch.mix.{family}.ratio": float(each["ratio"]) for family, each in mix.items()}
        return {target: ratio for target, ratio in found.items() if target not in levels}

    @property
    def settings(self) -> dict[str, object]:
        """Settings that all arms share, by target. An arm's own levels override them."""
        roles = {name: role.run for name, role in self.roles.items()}
        return dict(leaves({"run": self.run, "roles": roles, "task": self.task}))

    @property
    def held(self) -> list[tuple[str, object]]:
        """Settings that are equal in all arms, as (path, value): run settings without their prefix `run.`, and task settings."""
        varied = self.levels_of(self.arms[0]) | self.shared_out(self.arms[0])
        ran = [dict(leaves(self.run_fields(self.levels_of(arm)), "run.")) for arm in self.arms]
        return [
            (path.removeprefix("run."), value)
            for path, value in self.settings.items()
            if path not in varied
            and not path.startswith("roles.")
            and (self.stated is None or all(fields.get(path, value) == value for fields in ran))
        ]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def seed_of(self, arm: str, stage: Stage, place: int) -> int:
        """Return the seed of an arm's trial at this 0-based position of a stage."""
        return stage.first_seed + place + self.arm(arm).seed_offset

    @property
    def last_seed(self) -> int:
        """The largest seed that a trial may have."""
        return max(self.seed_of(arm, stage, stage.max_seeds - 1) for stage in self.stages for arm in stage.arms)

    def shared_seed(self, arm: str, seed: int) -> int:
        """Return the seed at the same position in an arm without an offset. Trials of different arms are matched by this seed."""
        return seed - self.arm(arm).seed_offset

    def levels_of(self, arm: Arm) -> dict[str, Scalar]:
        """Return the arm's levels, by target."""
        varied = [factor for factor in self.factors if factor.name in arm.levels]
        return {target: arm.levels[factor.name] for factor in varied for target in factor.targets}

    def steps_of(self, arm: str) -> int:
        """Return the optimizer steps of an arm's trials."""
        own = self._level(self.arm(arm), STUDY_STEPS)
        return self.steps if own is None else int(own)

    def model_of(self, arm: str) -> PlanModel:
        """Return the model of the arm's main server."""
        own = self._level(self.arm(arm), STUDY_MODEL)
        return self.model if own is None else next(model for model in self.models if model.name == own)

    def model_of_role(self, role: str) -> PlanModel:
        """Return the model of another role's server."""
        name = self.roles[role].model
        return self.model if name == self.model.name else PlanModel(name=name)

    @property
    def interim_tasks(self) -> int:
        """Number of held-out tasks of an interim evaluation, each played once."""
        return min(INTERIM_TASKS, self.heldout_tasks)

    def interim_evaluations(self, arm: str) -> int:
        """Return the number of a trial's interim evaluations in this arm: one every `heldout_every` steps, none after the last
        step.
        """
        return (self.steps_of(arm) - 1) // self.heldout_every if self.heldout_every else 0

    @property
    def hosted(self) -> tuple[PlanModel, ...]:
        """Every model that arms train."""
        return self.models or (self.model,)

    @property
    def models_text(self) -> str:
        """`model NAME`, or `models NAME and NAME`, for people."""
        names = [model.title for model in self.hosted]
        return f"model{'s' if len(names) > 1 else ''} {' and '.join(names)}"

    def _level(self, arm: Arm, target: str) -> Scalar | None:
        """Return the arm's level for a target; None if the arm does not vary it."""
        return self.levels_of(arm).get(target)

    def alternatives(self, stage: str) -> tuple[str, ...]:
        """Return `stage` and its alternatives: the stages that one stage branches to, of which at most one runs."""
        for before in self.stages:
            led_to = dict.fromkeys(branch.to for branch in self.branches if branch.stage == before.id and branch.to)
            if stage in led_to:
                return tuple(led_to)
        return (stage,)

    @property
    def heldout_upto(self) -> int:
        """Number of held-out tasks that the instrument must have: the scored ones plus those skipped before them."""
        return self.heldout_from + self.heldout_tasks

    @property
    def steps_vary(self) -> bool:
        """Whether trials may have other lengths than `steps`."""
        return any(self.steps_of(arm.name) != self.steps for arm in self.arms)

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


def trial_key(plan_hash: str, arm: str, seed: int) -> str:
    """Return the deterministic key of a trial: plan, arm and seed."""
    return f"{plan_hash[:16]}/{arm}/{seed}"


def with_algorithm(run: Mapping[str, Any], algorithm: str, stated: Collection[str] = ()) -> dict[str, Any]:
    """Return a partial RunSpec in which an algorithm's defaults replace the fields of `run` that are not `stated`."""
    for path, value in leaves(own_defaults(algorithm)):
        if path not in stated and leaf_at(run, path.split(".")) is not None:
            run = merge_patch(run, nested(path, value))
    return dict(run)


def _has_adapters(fields: Mapping[str, Any], target: str, level: Scalar) -> bool:
    """Return whether the level asks for adapters (`lora`) that `fields` already configures."""
    return (target, level) == (RUN_PARAMETERS, "lora") and isinstance(fields.get("parameters"), Mapping)
