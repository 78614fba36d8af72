"""Words of the expression language for lost attempts at episodes.

Counts cover the last attempt of each finished trial. They are None if a finished trial did not record them.
"""

from __future__ import annotations

from collections.abc import Mapping

from researcher.analysis.attrition import ALPHA, MOST_LOST, arm_share
from researcher.models import KINDS, EpisodeAttempts, Kind, TrialRecord, TrialStatus
from researcher.refusals import UnknownName
from researcher.report.records import Records
from researcher.study.plan import Plan
from swarm.protocol.episodes import Cause

_CAUSES = [cause.value for cause in Cause]


class LossWords:
    """Base class of `Vocabulary`: the words about lost attempts."""

    _records: Records
    _plan: Plan

    def episodes_tried(self, *, arm: str | None = None, kind: str | None = None) -> int | None:
        """Count attempts at episodes. `kind` is `train`, `eval` (held-out), or None for both."""
        counts = self._counts(arm, kind)
        return None if counts is None else sum(each.attempts for each in counts)

    def episodes_lost(self, cause: str | None = None, *, arm: str | None = None, kind: str | None = None) -> int | None:
        """Count attempts lost to a cause (`swarm.protocol.episodes.Cause`), or to any cause."""
        if cause is not None and cause not in _CAUSES:
            raise UnknownName(f"unknown cause {cause!r}; known: {_CAUSES}")
        counts = self._counts(arm, kind)
        if counts is None:
            return None
        return sum(count for each in counts for of, count in each.lost.items() if cause in (None, of.value))

    def tasks_set_aside(self, *, arm: str | None = None, kind: str | None = None) -> int | None:
        """Count tasks given up after repeated lost attempts."""
        counts = self._counts(arm, kind)
        return None if counts is None else sum(each.set_aside for each in counts)

    def lost_share(self, *, arm: str, kind: str) -> float | None:
        """Return the share of an arm's attempts that were lost. Attempts lost to server, network or a person are not
        counted."""
        asked = _kind(kind)
        return None if self._counts(arm, kind) is None else arm_share(self._done(arm), asked)

    def loss_test(self, hypothesis: str, kind: str) -> Mapping[str, float | int | str | None] | None:
        """Return the fields of researcher.analysis.attrition.LossTest; None if nothing was lost or too few trials are done."""
        asked = _kind(kind)
        if hypothesis not in {each.id for each in self._plan.hypotheses}:
            raise UnknownName(f"the plan has no hypothesis {hypothesis!r}")
        for test in self._records.loss_tests:
            if (test.hypothesis, test.kind) == (hypothesis, asked):
                names = ("baseline", "treatment", "method", "p_value", "p_adjusted", "level")
                return {name: getattr(test, name) for name in names}
        return None

    def attrition_alpha(self) -> float:
        """Return the significance level that all difference tests of a study share."""
        return ALPHA

    def attrition_limit(self) -> float:
        """Return the share of lost attempts above which the sentinel fires, whatever the other arms lost."""
        return MOST_LOST

    def _counts(self, arm: str | None, kind: str | None) -> list[EpisodeAttempts] | None:
        found = [trial.evidence.attrition if trial.evidence else None for trial in self._done(arm)]
        whole = [each for each in found if each is not None]
        if len(whole) < len(found):
            return None
        kinds = KINDS if kind is None else (_kind(kind),)
        return [each.of(one) for each in whole for one in kinds]

    def _done(self, arm: str | None) -> list[TrialRecord]:
        if arm is not None and arm not in {each.name for each in self._plan.arms}:
            raise UnknownName(f"the plan has no arm {arm!r}")
        trials = self._records.data.trials
        return [trial for trial in trials if trial.status is TrialStatus.DONE and arm in (None, trial.arm)]


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind
    raise UnknownName(f"unknown kind of episode {name!r}; known: {list(KINDS)}")
