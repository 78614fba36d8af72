"""A decision's input: every study so far as a row, the budget left, and people's words.

Pure data, derived only from records, so that `verify` can derive it again and compare digests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from foundation.strict import StrictModel
from researcher.analysis.opposed import NAME as WORSE_ON_HELDOUT
from researcher.analysis.opposed import better_first
from researcher.analysis.samples import sample
from researcher.campaign.goal import Aim, changed, default_levels
from researcher.instruments.instrument import Scalar
from researcher.models import CONFIRMING, Action, DecisionRecord, Fate, Role, TrialRecord, TrialStatus, VerdictRecord
from researcher.study.plan import Hypothesis, Plan, StageKind, Verdict

Levels = Mapping[str, Scalar]


class ArmSeen(StrictModel):
    """An arm of a study.

    Attributes:
        levels: levels of the aim's factors that differ from the default.
        n: number of finished trials that have the metric.
        mean, sd: mean and standard deviation of the metric over those trials.
        misleads: whether it looks better in training but is worse on held-out tasks (the sentinel `worse_on_heldout`).
    """

    name: str
    levels: dict[str, Scalar]
    n: int
    failed: int
    mean: float | None
    sd: float | None
    misleads: Annotated[bool, Field(exclude_if=lambda misleads: not misleads)] = False


class EffectSeen(StrictModel):
    """The effect of a treatment: treatment minus baseline.

    `factor` is the factor that the arms differ in; empty for arms that set several. `verdict` is None in explorations.
    """

    statement: str
    factor: str
    baseline: str
    treatment: str
    diff: float
    low: float
    high: float
    level: float
    verdict: Verdict | None
    misleads: Annotated[bool, Field(exclude_if=lambda misleads: not misleads)] = False
    """Whether held-out tasks contradict the effect."""


class StudySeen(StrictModel):
    """A study that has ended. `unfit` says why it cannot support a claim; empty if nothing speaks against it."""

    seq: int
    study: str
    action: Action
    role: Role
    hypothesis: str
    status: str
    reason: str
    """For a confirmation: the reason for its verdict, or for having none; else empty."""
    design: Literal["screen", "levels", "compare"]
    """`screen`: main effects of crossed factors. `levels`: arms side by side, without a verdict. `compare`: any design that tests."""
    planned: tuple[dict[str, Scalar], ...]
    """Levels of every arm of its plan, the baseline first, including arms that never ran."""
    arms: tuple[ArmSeen, ...]
    """The arms that ran."""
    effects: tuple[EffectSeen, ...]
    sentinels: tuple[str, ...]
    """The first sentinel that fired for each hypothesis with unsound trials."""
    unfit: str
    apart: bool
    """Whether its trials differ from the campaign's usual ones in more than the arms' levels (other settings, lengths or factors).
    Its measurements then belong to no setting of the goal's factors."""
    baseline: str
    """What a confirmation compares with: `default`, `incumbent` or `other`. Empty for other studies."""
    trials: int
    wall_s: float
    tokens: float
    last_seed: int
    alpha: float | None
    instrument: Annotated[str, Field(exclude_if=lambda name: not name)] = ""
    """Name of its instrument; empty for the campaign's first."""

    @property
    def confirms(self) -> bool:
        """Whether the study was a confirmation, and so spent alpha."""
        return self.action in CONFIRMING

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of a confirmation; None if it reached none."""
        return self.effects[0].verdict if self.confirms and self.effects else None

    @property
    def supports(self) -> bool:
        """Whether the campaign may claim the result: a sound study confirmed it against the default or the incumbent."""
        return self.verdict is Verdict.SUPPORTED and not self.unfit and self.baseline in ("default", "incumbent")

    def arm(self, name: str) -> ArmSeen:
        return next(arm for arm in self.arms if arm.name == name)


class HypothesisSeen(StrictModel):
    id: str
    parent: str | None
    claim: str
    prediction: str
    kill_if: str
    status: Fate


class Left(StrictModel):
    """What is left of each limit; None if there is no limit. The `reserved_*` fields are the parts reserved for confirmations."""

    wall_s: float | None
    trials: int | None
    tokens: float | None
    llm_tokens: float | None
    money: float | None
    reserved_wall_s: float
    reserved_trials: float


class Said(StrictModel):
    """A person's message, veto, amendment or answer; or the reason why an instrument was not written. It is data for the decision,
    never an instruction to the code."""

    kind: Literal["told", "vetoed", "amended", "answered", "unwritten"]
    words: str
    by: str
    seq: int
    instrument: Annotated[str, Field(exclude_if=lambda name: not name)] = ""
    """For a veto: the instrument of the vetoed study. Empty for the campaign's first, or if it was not recorded."""


class Seen(StrictModel):
    """Input of one decision. `aim` is the aim on the campaign's first instrument, `others` are those on its further ones."""

    campaign: str
    seq: int
    goal: str
    aim: Aim
    hypotheses: tuple[HypothesisSeen, ...]
    studies: tuple[StudySeen, ...]
    left: Left
    said: tuple[Said, ...]
    heard: int = 0
    """Number of the last journal entry that it includes."""
    problems: tuple[str, ...] = ()
    """Problems of every proposal of this decision so far."""
    others: Annotated[tuple[Aim, ...], Field(exclude_if=lambda aims: not aims)] = ()
    begun: Annotated[bool, Field(exclude_if=lambda begun: not begun)] = False
    """Whether only trials that began are counted. In decisions of earlier versions, those that were merely planned count too."""

    def canonical(self) -> str:
        """Return the canonical JSON: sorted keys, no white space."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def confirmations(self) -> int:
        """Number of confirmations frozen so far, whatever their results."""
        return sum(study.confirms for study in self.studies)

    @property
    def next_seed(self) -> int:
        """The first seed that no study of the campaign could have used."""
        return max((study.last_seed + 1 for study in self.studies), default=0)

    # -- by instrument ----------------------------------------------------------------------------------------------------

    @property
    def instruments(self) -> tuple[str, ...]:
        """Names of the instruments, starting with the first one."""
        return (self.aim.instrument, *(aim.instrument for aim in self.others))

    def on(self, instrument: str = "") -> View:
        """Return the view of this instrument, by default the first. Raises: KeyError if the campaign has none of that name."""
        aims = {aim.instrument: aim for aim in (self.aim, *self.others)}
        return View(self, aims[instrument or self.aim.instrument])

    @property
    def views(self) -> tuple[View, ...]:
        """One view per instrument, in the order of `instruments`."""
        return tuple(self.on(name) for name in self.instruments)

    def of(self, study: StudySeen) -> View:
        """Return the view of the study's instrument."""
        return self.on(study.instrument)

    def about(self, hypothesis: str) -> View:
        """Return the view of the instrument that first tested this hypothesis, or of the first instrument if none has yet."""
        return self.on(next((study.instrument for study in self.studies if study.hypothesis == hypothesis), ""))


@dataclass(frozen=True, slots=True)
class View:
    """A campaign's results on one instrument. Noise, margin and effects are never pooled with another instrument's."""

    whole: Seen
    aim: Aim

    @property
    def instrument(self) -> str:
        return self.aim.instrument

    @property
    def key(self) -> str:
        """Name of the instrument as studies record it: empty for the first instrument."""
        return "" if self.aim is self.whole.aim else self.aim.instrument

    @property
    def among(self) -> str:
        """Name of the instrument if the campaign has several, else empty."""
        return self.instrument if self.whole.others else ""

    @property
    def studies(self) -> tuple[StudySeen, ...]:
        """The studies on this instrument."""
        return tuple(study for study in self.whole.studies if study.instrument == self.key)

    @property
    def hypotheses(self) -> tuple[HypothesisSeen, ...]:
        """The hypotheses about this instrument."""
        return tuple(each for each in self.whole.hypotheses if self.whole.about(each.id).aim is self.aim)

    @property
    def incumbent(self) -> dict[str, Scalar]:
        """Levels of the last configuration that a confirmation supported, where they differ from the defaults."""
        last = self.confirmed
        return {} if last is None else dict(last.arm(last.effects[0].treatment).levels)

    @property
    def confirmed(self) -> StudySeen | None:
        """The last confirmation that supports a claim."""
        return next((study for study in reversed(self.studies) if study.supports), None)

    @property
    def sigma(self) -> float:
        """Standard deviation between seeds: pooled over all arms, or else as the instrument states it, or else one margin."""
        known = [arm for study in self.studies for arm in study.arms if arm.sd is not None and arm.n > 1]
        freedom = sum(arm.n - 1 for arm in known)
        if freedom:
            pooled = math.sqrt(math.fsum((arm.n - 1) * (arm.sd or 0.0) ** 2 for arm in known) / freedom)
            if pooled > 0:
                return pooled
        return self.aim.sigma or self.aim.margin

    def measured(self) -> dict[str, tuple[dict[str, Scalar], int, float]]:
        """Return every configuration that has run, by `key_of`: its changed levels, the number of its finished trials, their mean.

        A configuration that held-out tasks contradict counts as the worst of all, whatever it reached in training.
        """
        found: dict[str, tuple[dict[str, Scalar], int, float]] = {}
        misled: set[str] = set()
        for study in self.studies:
            for arm in study.arms:
                if arm.mean is None or study.sentinels or study.apart:
                    continue
                key = key_of(arm.levels)
                if arm.misleads and arm.levels:
                    misled.add(key)
                elif arm.n > 1:  # a later study has nothing against it
                    misled.discard(key)
                _, n, mean = found.get(key, (arm.levels, 0, 0.0))
                total = n + arm.n
                found[key] = (dict(arm.levels), total, (n * mean + arm.n * arm.mean) / total)
        worst = min((self.aim.sign * mean for _, _, mean in found.values()), default=0.0) * self.aim.sign
        return found | {key: (*found[key][:2], worst) for key in misled}

    def tests(self, levels: Levels) -> list[StudySeen]:
        """Return the confirmations of this setting, oldest first. `levels` are those that differ from the defaults."""
        wanted = key_of(levels)
        found = (study for study in self.studies if study.confirms and study.planned[1:])
        return [study for study in found if key_of(study.planned[1]) == wanted]

    def confirmed_elsewhere(self) -> list[tuple[StudySeen, dict[str, Scalar]]]:
        """Return the studies that confirmed a setting on other instruments, with that setting in this one's terms, oldest first."""
        found = (study for study in self.whole.studies if study.supports and study.instrument != self.key)
        return [(study, changed(self.aim, study.arm(study.effects[0].treatment).levels)) for study in found]

    def can_set(self, levels: Levels) -> bool:
        """Return whether the instrument has all these factors."""
        return levels.keys() <= {factor.name for factor in self.aim.factors}

    def touched(self, levels: Levels) -> list[str]:
        """Return the factors that this setting changes although people want them left alone.

        Such a factor may only be at its default or at the incumbent's level.
        """
        incumbent = self.incumbent
        return [
            factor.name
            for factor in self.aim.factors
            if factor.left_alone
            and levels.get(factor.name, factor.default)
            not in (factor.default, incumbent.get(factor.name, factor.default))
        ]


def key_of(levels: Levels) -> str:
    """Return a key that is equal for equal settings."""
    return json.dumps(dict(sorted(levels.items())), sort_keys=True)


def study_seen(
    decision: DecisionRecord,
    aim: Aim,
    plan: Plan,
    trials: Sequence[TrialRecord],
    verdicts: Sequence[VerdictRecord],
    *,
    status: str,
    reason: str,
    spent: Mapping[str, float],
    instrument: str = "",
) -> StudySeen:
    """Build the row of a study that has ended.

    Args:
        aim: the aim on its instrument.
        trials: the trials that count.
        status: the study's status when it ended.
        reason: why it ended.
        spent: amounts spent, by kind of budget.
        instrument: name of its instrument; empty for the campaign's first.
    """
    assert decision.role is not None
    step: Mapping[str, Any] = next((each for each in decision.proposals if each["chosen"]), {})
    frozen = decision.plan is None or Plan.model_validate_json(decision.plan).digest() == plan.digest()
    confirms = decision.role == "confirm"
    invalid = [record for record in verdicts if record.verdict is Verdict.INVALID]
    broken = [record for record in invalid if not _is_opposed(record)]
    misled = _misled(plan, trials, invalid)
    decided = _decided(plan, aim, verdicts)
    why = decided[-1][1].reason if decided else reason
    return StudySeen(
        seq=decision.seq,
        study=decision.study_id or "",
        action=decision.action,
        role=decision.role,
        hypothesis=decision.hypothesis or "",
        status=status,
        reason=why if confirms else "",
        design=_design(plan),
        planned=tuple(_levels(plan, aim, arm.name) for arm in plan.arms),
        arms=tuple(
            _arm(plan, aim, arm.name, trials, misled) for arm in plan.arms if any(t.arm == arm.name for t in trials)
        ),
        effects=tuple(_effect(asked, record, confirms=confirms) for asked, record in decided),
        sentinels=tuple(sorted({name for record in broken for name in record.sentinels[:1]})),
        unfit=_unfit(aim, trials, invalid if confirms else broken)
        if frozen
        else "its plan is not the one that was decided",
        apart=_apart(aim, plan, step.get("spec", {})),
        baseline=str(step.get("baseline", "")),
        trials=len(trials),
        wall_s=round(spent.get("wall_s", 0.0), 3),
        tokens=spent.get("tokens", 0.0),
        last_seed=plan.last_seed,
        alpha=decision.alpha,
        instrument=instrument,
    )


def _design(plan: Plan) -> Literal["screen", "levels", "compare"]:
    if not any(stage.kind is StageKind.SCREEN for stage in plan.stages):
        return "compare"
    return "screen" if any(hypothesis.treatment_arms for hypothesis in plan.hypotheses) else "levels"


def _decided(plan: Plan, aim: Aim, verdicts: Sequence[VerdictRecord]) -> list[tuple[Hypothesis, VerdictRecord]]:
    """Return the hypotheses on the aim's metric that have an effect, each with its verdict."""
    by_hypothesis = {record.hypothesis: record for record in verdicts}
    found = ((asked, by_hypothesis.get(asked.id)) for asked in plan.hypotheses if asked.metric == aim.metric)
    return [(asked, record) for asked, record in found if record is not None and record.effect is not None]


def _effect(asked: Hypothesis, record: VerdictRecord, *, confirms: bool) -> EffectSeen:
    """Build the row of an effect, which `record` must have. The row has the verdict only if the study `confirms`."""
    effect = record.effect
    assert effect is not None
    return EffectSeen(
        statement=asked.statement,
        factor=asked.factor,
        baseline=asked.baseline,
        treatment=asked.treatment,
        diff=_short(effect.diff),
        low=_short(effect.low),
        high=_short(effect.high),
        level=_short(effect.level),
        verdict=record.verdict if confirms else None,
        misleads=_is_opposed(record),
    )


def _is_opposed(record: VerdictRecord) -> bool:
    """Return whether held-out tasks contradict the result and no other sentinel fired."""
    return record.sentinels == (WORSE_ON_HELDOUT,)


def _misled(plan: Plan, trials: Sequence[TrialRecord], verdicts: Sequence[VerdictRecord]) -> set[str]:
    """Return the arms that look better in training but are worse on held-out tasks.

    Hypotheses with several arms per side do not count, because they are about a factor and not about single arms.
    """
    opposed = {record.hypothesis for record in verdicts if _is_opposed(record)}
    done = [trial for trial in trials if trial.status is TrialStatus.DONE]
    asked = [each for each in plan.hypotheses if each.id in opposed and len(each.sides) == 2]
    return {arm for each in asked for arm in better_first(plan, each, done)[0]}


def _arm(plan: Plan, aim: Aim, name: str, trials: Sequence[TrialRecord], misled: Collection[str]) -> ArmSeen:
    found = sample(trials, name, aim.metric)
    values = list(found.values.values())
    mean = math.fsum(values) / len(values) if values else None
    spread = None
    if mean is not None and len(values) > 1:
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return ArmSeen(
        name=name,
        levels=_levels(plan, aim, name),
        n=len(values),
        failed=found.failed,
        mean=None if mean is None else _short(mean),
        sd=None if spread is None else _short(spread),
        misleads=name in misled,
    )


def _levels(plan: Plan, aim: Aim, name: str) -> dict[str, Scalar]:
    """Return the arm's levels that differ from the defaults. Only the aim's factors count."""
    known = default_levels(aim)
    return changed(aim, {factor: level for factor, level in plan.arm(name).levels.items() if factor in known})


def _apart(aim: Aim, plan: Plan, spec: Mapping[str, Any]) -> bool:
    known = {factor.name for factor in aim.factors}
    foreign = any(name not in known for arm in plan.arms for name in arm.levels)
    return foreign or dict(spec.get("set", {})) != aim.settings or spec.get("steps") != aim.steps


def _unfit(aim: Aim, trials: Sequence[TrialRecord], invalid: Sequence[VerdictRecord]) -> str:
    """Say why no claim can rest on the study; empty if one can. `invalid` are the verdicts that count against it.

    Decisions are hashed with these texts: changing one breaks the verification of earlier campaigns.
    """
    if aim.generated:
        return "an LLM wrote the instrument and its reward"
    if any(trial.evidence and trial.evidence.model and trial.evidence.model.engine == "echo" for trial in trials):
        return "it ran on the echo engine, which trains nothing"
    if any(not _is_opposed(record) for record in invalid):
        return "a sentinel fired"
    if invalid:
        return "what looks better in training is worse on held-out tasks"
    if not any(trial.status is TrialStatus.DONE for trial in trials):
        return "no trial was finished"
    return ""


def _short(value: float) -> float:
    """Round to ten significant digits, so that every machine computes the same value."""
    return float(f"{value:.10g}")
