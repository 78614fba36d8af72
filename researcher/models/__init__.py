"""The records of a study: trials, attempts, effects, findings, repairs. Data only; no SQL, no HTTP, no LLM.

One noun per module; everything is imported from here.
"""

from researcher.models.attrition import (
    ENDED,
    KINDS,
    LONGEST_TRACEBACK,
    Attrition,
    EpisodeAttempts,
    Kind,
    together,
)
from researcher.models.conclusions import Claim, Effect, Finding, VerdictRecord
from researcher.models.records import (
    LONGEST_TOPIC,
    MODELS_KEPT,
    MODELS_NOT_KEPT,
    OVER_BUDGET,
    SEAL,
    AttemptRecord,
    BudgetState,
    Event,
    HostedModel,
    LeaseInfo,
    LlmCall,
    ReportSeal,
    SampledCall,
    SampledEpisode,
    StudyData,
    StudyRecord,
    StudyStatus,
    TrialEvidence,
    TrialRecord,
    TrialStatus,
)
from researcher.models.repairs import PERSON, RepairRecord

__all__ = [
    "ENDED",
    "KINDS",
    "LONGEST_TOPIC",
    "LONGEST_TRACEBACK",
    "MODELS_KEPT",
    "MODELS_NOT_KEPT",
    "OVER_BUDGET",
    "PERSON",
    "SEAL",
    "AttemptRecord",
    "Attrition",
    "BudgetState",
    "Claim",
    "Effect",
    "EpisodeAttempts",
    "Event",
    "Finding",
    "HostedModel",
    "Kind",
    "LeaseInfo",
    "LlmCall",
    "RepairRecord",
    "ReportSeal",
    "SampledCall",
    "SampledEpisode",
    "StudyData",
    "StudyRecord",
    "StudyStatus",
    "TrialEvidence",
    "TrialRecord",
    "TrialStatus",
    "VerdictRecord",
    "together",
]
