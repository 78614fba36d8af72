"""Parts of a report's page with their claims: hypothesis, arm, trial, decision, sentinel, earlier finding. Contains no wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.instruments.instrument import Metric
from researcher.models import KINDS, Claim, Kind, TrialRecord
from researcher.report.claims import Ledger, Style
from researcher.report.expressions import call
from researcher.report.records import Records
from researcher.study.plan import ALPHA, Arm, Hypothesis, Known, Plan, Stage, StageKind
from swarm.protocol.episodes import Cause

Claims = dict[str, Claim]
"""Claims by the short names that the templates use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HypothesisPart:
    hypothesis: Hypothesis
    stage: Stage
    """Stage that decides the hypothesis."""
    verdict: str
    reason: str
    measured: bool
    censored: bool
    """True if any of its trials never reached the metric's threshold."""
    left_behind: str | None
    """Why the plan's rules left the hypothesis untested; None if they did not."""
    crossed: bool
    """True if it is an interaction, whose sides are not levels of a factor."""
    log_scale: bool
    """True if it is a trend over the logarithm of its levels."""
    claims: Claims
    secondary: dict[str, Claims]
    """Claims by secondary metric: diff, low, high and level."""

    @property
    def trend(self) -> bool:
        """True if it tests the change along a fitted line."""
        return bool(self.hypothesis.between_arms)

    @property
    def explored(self) -> bool:
        """True if a screen explores it without a test."""
        return self.stage.explores

    @property
    def bends(self) -> bool:
        """True if the levels of a trend deviate from its line."""
        lacks = self.claims["p_lack_of_fit"].value if self.trend else None
        return isinstance(lacks, float) and lacks < ALPHA  # fixed, so that stricter studies get no fewer warnings

    @property
    def size(self) -> float:
        """Absolute size of the effect; negative if there is no effect."""
        diff = self.claims["diff"].value
        return abs(diff) if isinstance(diff, int | float) else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPart:
    arm: Arm
    claims: Claims
    levels: Claims
    summaries: dict[str, Claims]
    """Claims by metric, each with mean, sd and iqm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPart:
    trial: TrialRecord
    claims: Claims
    finals: Claims
    """Final values by metric."""
    spark: str
    held: str
    """Held-out reward at interim evaluations, drawn like `spark`; empty if there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CensoredPart:
    """Number of trials that never reached a metric's threshold, in total and by arm."""

    metric: Metric
    trials: Claim
    arms: Claims
    decides: bool
    """True if a hypothesis uses this metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One decision on the study's path."""

    after: str
    action: str
    to: str | None
    reason: str
    claims: Claims


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelPart:
    name: str
    state: Claim
    findings: Sequence[tuple[str, str, Claim, tuple[str, ...]]]
    """Severity, text, value and arms of each finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPart:
    """An earlier finding that the plan quotes."""

    known: Known
    claims: Claims
    agreements: list[tuple[str, Claim]]
    """How the verdict relates to the finding, for each hypothesis that asks the same question."""

    @property
    def contradicted(self) -> bool:
        return any(str(claim.value).startswith("contradicts") for _, claim in self.agreements)


def study_claims(ledger: Ledger, plan: Plan) -> Claims:
    """Make the claims about the study as a whole: its plan, and counts of trials, verdicts and findings."""
    asked = {
        "plan_hash": (call("plan_hash"), Style.WORD),
        "version": (call("plan", "version"), Style.COUNT),
        "steps": (call("plan", "steps"), Style.COUNT),
        "heldout_tasks": (call("plan", "heldout_tasks"), Style.COUNT),
        "heldout_episodes": (call("plan", "heldout_episodes"), Style.COUNT),
        "heldout_temperature": (call("plan", "heldout_temperature"), Style.PLAIN),
        "power": (call("plan", "power"), Style.PERCENT),
        "sigma_confidence": (call("plan", "sigma_confidence"), Style.PERCENT),
        "hypotheses": (call("count_hypotheses"), Style.COUNT),
        "tested": (call("count_tested"), Style.COUNT),
        "trials": (call("count_trials"), Style.COUNT),
    }
    if plan.heldout_from:
        skipped, scored = call("plan", "heldout_from"), call("plan", "heldout_tasks")
        asked |= {
            "heldout_first": (f"{skipped} + 1", Style.COUNT),
            "heldout_last": (f"{skipped} + {scored}", Style.COUNT),
        }
    for status in ("done", "failed", "open"):
        asked[status] = (call("count_trials", status=status), Style.COUNT)
    for verdict in ("supported", "refuted", "equivalent", "inconclusive", "invalid"):
        asked[verdict] = (call("count_verdicts", verdict), Style.COUNT)
    for severity in ("invalid", "warning", "unchecked"):
        asked[f"findings_{severity}"] = (call("count_findings", severity), Style.COUNT)
    return ledger.claims_of("study", asked)


def budget_claims(ledger: Ledger, *, tokens: bool) -> Claims:
    """Make the claims about the plan's limits, by kind. `tokens`: whether the plan limits tokens."""
    styles = {"wall_s": Style.SECONDS, "trials": Style.COUNT} | ({"tokens": Style.COUNT} if tokens else {})
    return ledger.claims_of("budget", {kind: (call("budget", kind), style) for kind, style in styles.items()})


def stage_claims(ledger: Ledger, stage: Stage) -> Claims:
    """Make the claims about a stage: seeds, trials, the alpha of a look, and the first fresh seed after a screen."""
    own = call("stage", stage.id)
    asked = {name: (f"{own}.{name}", Style.COUNT) for name in ("seeds", "max_seeds", "first_seed")}
    if stage.spends is not None:
        asked["spends"] = (f"{own}.spends", Style.PLAIN)
    if stage.kind is StageKind.SCREEN:
        asked["fresh"] = (f"{own}.first_seed + {own}.max_seeds", Style.COUNT)
    asked["trials"] = (call("count_trials", stage=stage.id), Style.COUNT)
    return ledger.claims_of(f"stage.{stage.id}", asked)


_KNOWN = {
    "verdict": Style.WORD,
    "diff": Style.PLAIN,
    "low": Style.PLAIN,
    "high": Style.PLAIN,
    "level": Style.LEVEL,
    "n_baseline": Style.COUNT,
    "n_treatment": Style.COUNT,
}


def known_part(ledger: Ledger, known: Known) -> KnownPart:
    """Quote an earlier finding, and say how this study's verdicts relate to it."""
    name = f"known.{known.id}"
    claims = ledger.fields(name, call("known", known.id), _KNOWN)
    asked = {hypothesis: (call("agreement", known.id, hypothesis), Style.WORD) for hypothesis in known.same_as}
    return KnownPart(known=known, claims=claims, agreements=list(ledger.claims_of(name, asked).items()))


_TESTED = {
    "baseline": Style.PERCENT,
    "treatment": Style.PERCENT,
    "method": Style.WORD,
    "p_adjusted": Style.P,
    "level": Style.PLAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLosses:
    """One arm's attempts at episodes of one kind. `claims` holds attempts, set_aside, share, and one count per cause of losses in the
    study.
    """

    arm: str
    kind: Kind
    claims: Claims


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLost:
    """The first attempt of an arm that was lost to a cause, with the message of its client or grader."""

    arm: str
    seed: int
    cause: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Lost attempts of a study.

    `claims` holds attempts and lost for the study as a whole, and the sentinel's alpha and limit.
    """

    claims: Claims
    causes: list[str]
    """Causes of losses in finished trials."""
    arms: list[ArmLosses]
    tests: list[tuple[Hypothesis, Kind, Claims]]
    first: list[FirstLost]
    watched: bool
    """True if the plan has the sentinel."""

    @property
    def counted(self) -> bool:
        """True if every finished trial recorded its attempts."""
        return self.claims["attempts"].value is not None

    @property
    def any(self) -> bool:
        return bool(self.claims["lost"].value)


def losses(ledger: Ledger, records: Records) -> Losses:
    """Collect the lost attempts of the finished trials."""
    watched = "attrition" in records.plan.sentinels
    found = [trial.evidence.attrition for trial in records.done if trial.evidence and trial.evidence.attrition]
    causes = [cause.value for cause in Cause if any(each.of(kind).lost.get(cause) for each in found for kind in KINDS)]
    asked = {"attempts": (call("episodes_tried"), Style.COUNT), "lost": (call("episodes_lost"), Style.COUNT)}
    if watched:
        asked["alpha"] = (call("attrition_alpha"), Style.PLAIN)
        asked["limit"] = (call("attrition_limit"), Style.PERCENT)
    arms = [arm.name for arm in records.plan.arms if any(trial.arm == arm.name for trial in records.done)]
    return Losses(
        claims=ledger.claims_of("losses", asked),
        causes=causes,
        arms=[_arm(ledger, arm, kind, causes) for arm in arms for kind in KINDS] if causes else [],
        tests=[_test(ledger, records, test.hypothesis, test.kind) for test in records.loss_tests] if watched else [],
        first=_first(records, arms),
        watched=watched,
    )


def _arm(ledger: Ledger, arm: str, kind: Kind, causes: list[str]) -> ArmLosses:
    asked = {
        "attempts": (call("episodes_tried", arm=arm, kind=kind), Style.COUNT),
        "set_aside": (call("tasks_set_aside", arm=arm, kind=kind), Style.COUNT),
        "share": (call("lost_share", arm=arm, kind=kind), Style.PERCENT),
    }
    asked |= {cause: (call("episodes_lost", cause, arm=arm, kind=kind), Style.COUNT) for cause in causes}
    return ArmLosses(arm=arm, kind=kind, claims=ledger.claims_of(f"losses.{arm}.{kind}", asked))


def _test(ledger: Ledger, records: Records, hypothesis: str, kind: Kind) -> tuple[Hypothesis, Kind, Claims]:
    own = next(each for each in records.plan.hypotheses if each.id == hypothesis)
    return own, kind, ledger.fields(f"losses.{hypothesis}.{kind}", call("loss_test", hypothesis, kind), _TESTED)


def _first(records: Records, arms: list[str]) -> list[FirstLost]:
    """Find the first loss for each arm and cause, in the order of trials."""
    found: dict[tuple[str, str], FirstLost] = {}
    for trial in records.done:
        said = trial.evidence.attrition.first if trial.evidence and trial.evidence.attrition else {}
        for cause, words in said.items():
            one = FirstLost(arm=trial.arm, seed=trial.seed, cause=cause.value, words=words)
            found.setdefault((trial.arm, cause.value), one)
    causes = [cause.value for cause in Cause]
    return sorted(found.values(), key=lambda one: (arms.index(one.arm), causes.index(one.cause)))
