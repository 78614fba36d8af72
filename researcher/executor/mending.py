"""The executor's side of self-repair: which code clients run, and whom it asks when that code fails.

The executor diagnoses and restarts; it knows neither LLMs nor how a mended version is checked (`researcher.workshop`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from researcher.executor.blueprint import Code
from researcher.executor.diagnosis import Diagnosis
from researcher.models import TrialRecord
from researcher.study.plan import Plan
from swarm.protocol.blueprint import TrialBlueprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A client that failed by its own code.

    last: starting the same code again is no use any more. tasks: of the episodes that failed.
    """

    study_id: str
    plan: Plan
    trial: TrialRecord
    attempt: int
    code: Code
    blueprint: TrialBlueprint
    diagnosis: Diagnosis
    tasks: tuple[str, ...] = ()
    last: bool = False


class Mender(Protocol):
    """Who mends. One for all trials of a study: a version that it took up is for every client that starts after."""

    def code(self) -> Code:
        """What a client that starts now is to run."""

    async def opinion(self, diagnosis: Diagnosis) -> Diagnosis:
        """Where rules could not tell: the same, or labelled with whose opinion it is. Never raises for want of an answer."""

    async def mend(self, case: Case) -> Code:
        """The version to go on with; the case's own where it is worth another try.

        Raises: Unmended when this trial cannot be saved; MendByHand when a person has to.
        """
