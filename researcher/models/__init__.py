"""The words of a study: instrument, plan, arms, trials, effects, verdicts. Data only; no SQL, no HTTP, no LLM.

One noun per module; everything is imported from here.
"""

from researcher.models.conclusions import Claim, Effect, Finding, Verdict, VerdictRecord
from researcher.models.instruments import Direction, Factor, Instrument, InstrumentDefaults, Metric, Role, Scalar
from researcher.models.plans import (
    Arm,
    Branch,
    Budget,
    Condition,
    Hypothesis,
    Plan,
    PlanModel,
    PlanRole,
    Relation,
    Stage,
    StageKind,
    trial_key,
)
from researcher.models.records import (
    AttemptRecord,
    BudgetState,
    Event,
    LeaseInfo,
    LlmCall,
    StudyData,
    StudyRecord,
    StudyStatus,
    TrialEvidence,
    TrialRecord,
    TrialStatus,
)
from researcher.models.repairs import PERSON, RepairRecord

__all__ = [
    "PERSON",
    "Arm",
    "AttemptRecord",
    "Branch",
    "Budget",
    "BudgetState",
    "Claim",
    "Condition",
    "Direction",
    "Effect",
    "Event",
    "Factor",
    "Finding",
    "Hypothesis",
    "Instrument",
    "InstrumentDefaults",
    "LeaseInfo",
    "LlmCall",
    "Metric",
    "Plan",
    "PlanModel",
    "PlanRole",
    "Relation",
    "RepairRecord",
    "Role",
    "Scalar",
    "Stage",
    "StageKind",
    "StudyData",
    "StudyRecord",
    "StudyStatus",
    "TrialEvidence",
    "TrialRecord",
    "TrialStatus",
    "Verdict",
    "VerdictRecord",
    "trial_key",
]
