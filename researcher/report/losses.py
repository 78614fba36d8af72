"""What a report says of attempts at episodes that were lost: its claims and quotations, before any wording."""

from __future__ import annotations

from dataclasses import dataclass

from researcher.models import KINDS, Kind
from researcher.report.claims import Ledger, Style
from researcher.report.expressions import call
from researcher.report.parts import Claims
from researcher.report.records import Records
from researcher.study.plan import Hypothesis
from swarm.protocol.episodes import Cause

_TESTED = {
    "baseline": Style.PERCENT,
    "treatment": Style.PERCENT,
    "method": Style.WORD,
    "p_adjusted": Style.P,
    "level": Style.PLAIN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLosses:
    """Attempts of one arm at episodes of one kind. claims: attempts, set_aside, share, and each cause that lost any in the study."""

    arm: str
    kind: Kind
    claims: Claims


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLost:
    """The first attempt that a cause lost in an arm, in its client's or grader's words."""

    arm: str
    seed: int
    cause: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """claims: attempts and lost of the whole study, alpha and limit of the sentinel."""

    claims: Claims
    causes: list[str]
    """Those that lost any attempt of a finished trial."""
    arms: list[ArmLosses]
    tests: list[tuple[Hypothesis, Kind, Claims]]
    first: list[FirstLost]
    watched: bool
    """Whether the plan has the sentinel."""

    @property
    def counted(self) -> bool:
        """Whether every finished trial recorded its attempts."""
        return self.claims["attempts"].value is not None

    @property
    def any(self) -> bool:
        return bool(self.claims["lost"].value)


def losses(ledger: Ledger, records: Records) -> Losses:
    """Of the finished trials."""
    watched = "attrition" in records.plan.sentinels
    found = [trial.evidence.attrition for trial in records.done if trial.evidence and trial.evidence.attrition]
    causes = [cause.value for cause in Cause if any(each.of(kind).lost.get(cause) for each in found for kind in KINDS)]
    asked = {"attempts": (call("episodes_tried"), Style.COUNT), "lost": (call("episodes_lost"), Style.COUNT)}
    if watched:
        asked["alpha"] = (call("attrition_alpha"), Style.PLAIN)
        asked["limit"] = (call("attrition_limit"), Style.PERCENT)
    arms = [arm.name for arm in records.plan.arms if any(trial.arm == arm.name for trial in records.done)]
    return Losses(
        claims={name: ledger.claim(f"losses.{name}", text, style) for name, (text, style) in asked.items()},
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
    name = f"losses.{arm}.{kind}"
    claims = {word: ledger.claim(f"{name}.{word}", text, style) for word, (text, style) in asked.items()}
    return ArmLosses(arm=arm, kind=kind, claims=claims)


def _test(ledger: Ledger, records: Records, hypothesis: str, kind: Kind) -> tuple[Hypothesis, Kind, Claims]:
    own = next(each for each in records.plan.hypotheses if each.id == hypothesis)
    asked = call("loss_test", hypothesis, kind)
    claims = {
        field: ledger.claim(f"losses.{hypothesis}.{kind}.{field}", f"{asked}.{field}", style)
        for field, style in _TESTED.items()
    }
    return own, kind, claims


def _first(records: Records, arms: list[str]) -> list[FirstLost]:
    """Of each arm and cause, by the order of its trials."""
    found: dict[tuple[str, str], FirstLost] = {}
    for trial in records.done:
        said = trial.evidence.attrition.first if trial.evidence and trial.evidence.attrition else {}
        for cause, words in said.items():
            one = FirstLost(arm=trial.arm, seed=trial.seed, cause=cause.value, words=words)
            found.setdefault((trial.arm, cause.value), one)
    causes = [cause.value for cause in Cause]
    return sorted(found.values(), key=lambda one: (arms.index(one.arm), causes.index(one.cause)))
