"""A new instrument that a decision asks for: an LLM writes it, a person approves it, and it joins the campaign. Journal entries:

    writing    an LLM call, recorded as soon as it is answered
    written    a sound instrument: its aim, folder, files and digest; it waits for a person's approval
    unwritten  the attempt failed, and why; also after an approval, if the files were changed after they were written
    joined     a person approved it: decisions see it from now on

Each entry is written once, so a campaign that is killed at any instruction continues after the last one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from researcher.campaign.goal import Aim
from researcher.campaign.records import JOINED, UNWRITTEN, WRITING, aims_on_record, joining, observe
from researcher.campaign.seen import Left
from researcher.instruments.catalogue import InstrumentFolder, files_digest, folder_digest
from researcher.models import CampaignEvent, CampaignRecord, DecisionRecord, LlmCall
from researcher.refusals import PlanningRefused
from researcher.store.store import Store

WRITTEN = "written"
NO_LLM = "no LLM is configured here that could write an instrument"
_CHANGED = "are not those that a person approved: they were changed after they were written"


class NotWritten(Exception):
    """The attempt produced no instrument; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewInstrument:
    """An instrument that an LLM wrote and that passed its rehearsal. `files` has the files' texts, by name."""

    aim: Aim
    folder: str
    author: str
    files: dict[str, str]


class InstrumentWriter(Protocol):
    """Makes an LLM write instruments."""

    def __call__(
        self, words: str, aims: Sequence[Aim], left: Left, kept: Sequence[LlmCall], keep: Callable[[LlmCall], None]
    ) -> Awaitable[NewInstrument]:
        """Write an instrument that measures what `words` ask for.

        Args:
            aims: the goal on each of the campaign's instruments so far.
            left: what is left of the campaign's budget.
            kept: answered calls of an interrupted attempt, which are not repeated.
            keep: receives each new call.
        Raises: NotWritten; StrategistAway if the LLM cannot be reached now.
        """


@dataclass(frozen=True, slots=True)
class Making:
    """Progress of the instrument that one decision asked for."""

    outcome: CampaignEvent | None
    """The entry `written` or `unwritten`; None until there is one."""
    answer: CampaignEvent | None
    """A person's answer to `written`: `approved` or `vetoed`."""
    end: CampaignEvent | None
    """The last entry: `joined` or `unwritten`."""

    @classmethod
    def of(cls, events: Sequence[CampaignEvent], decision: int) -> Making:
        """Read the progress from the journal. `events` is the whole journal, oldest first."""
        own = [event for event in events if event.detail.get("decision") == decision]
        outcome = next((event for event in own if event.kind in (WRITTEN, UNWRITTEN)), None)
        answers = (event for event in own if event.kind in ("approved", "vetoed"))
        end = next((event for event in own if event.kind in (JOINED, UNWRITTEN)), None)
        return cls(outcome, None if outcome is None else next(answers, None), end)

    @property
    def waits(self) -> bool:
        """Whether the instrument waits for a person's answer."""
        return self.outcome is not None and self.outcome.kind == WRITTEN and self.answer is None

    @property
    def approved(self) -> bool:
        return self.answer is not None and self.answer.kind == "approved"

    def text(self) -> str:
        """Say what happened to the instrument, in a sentence or two; empty until it is written or fails."""
        if self.outcome is None:
            return ""
        said = self.outcome.detail
        if self.outcome.kind == UNWRITTEN:
            return f"No instrument came of it: {said['words']}"
        made = f"{said['by']} wrote {said['aim']['instrument']}, whose results support no claim."
        if self.answer is None:
            return f"{made} It waits for a person's word."
        person, words = self.answer.detail.get("by") or "somebody", self.answer.detail.get("words")
        answered = f"{made} {person} {self.answer.kind} it{f': {words}' if words else '.'}"
        if self.end is not None and self.end.kind == UNWRITTEN:
            return f"{answered.rstrip('.')}; it did not join: {self.end.detail['words']}."
        return answered


async def carry_on(
    store: Store, record: CampaignRecord, decision: DecisionRecord, writer: InstrumentWriter | None
) -> None:
    """Take the next step: have the instrument written, or let an approved one join. Raises: StrategistAway."""
    events = store.campaigns.events(record.id)
    making = Making.of(events, decision.seq)
    if making.outcome is None:
        kind, detail = await _written(store, record, decision, events, writer)
        store.campaigns.record(record.id, kind, {"decision": decision.seq, **detail})
    elif making.approved and making.end is None:
        kind, detail = _joined(making.outcome.detail)
        store.campaigns.record(record.id, kind, {"decision": decision.seq, **detail})


def _joined(made: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the journal entry that follows an approval: `joined`, or `unwritten` if the files are no longer those that the person
    read.

    `made` is the detail of the entry `written`.
    """
    if folder_digest(Path(made["folder"])) != made.get("code"):
        return UNWRITTEN, {"words": f"the files in {made['folder']} {_CHANGED}", "by": ""}
    return JOINED, {**joining(Aim.model_validate(made["aim"]), made["folder"]), "code": made["code"]}


def check_approved(joined: Sequence[CampaignEvent], folder: InstrumentFolder) -> None:
    """Check that the folder's code is the approved code. `joined` are the journal entries of the instruments that joined.

    Raises: PlanningRefused if it is not.
    """
    for event in joined:
        own = event.detail["aim"]["instrument"] == folder.instrument.name
        if own and event.detail.get("code", folder.code) != folder.code:
            raise PlanningRefused(
                f"the files in {folder.path} {_CHANGED}; the entry `written` in the campaign's journal has the approved ones"
            )


def code_of(files: Mapping[str, str]) -> str:
    """Return the digest of an instrument's code, from the texts of its files. It equals the digest of the instrument's folder."""
    return files_digest((name, text.encode()) for name, text in sorted(files.items()))


async def _written(
    store: Store,
    record: CampaignRecord,
    decision: DecisionRecord,
    events: Sequence[CampaignEvent],
    writer: InstrumentWriter | None,
) -> tuple[str, dict[str, Any]]:
    """Have the instrument written. Return the journal entry about it: `written` or `unwritten`."""
    if writer is None:
        return UNWRITTEN, {"words": NO_LLM, "by": ""}
    own = [event for event in events if event.kind == WRITING and event.detail["decision"] == decision.seq]
    kept = [LlmCall.model_validate(call) for event in own for call in event.detail["llm_calls"]]

    def keep(call: LlmCall) -> None:
        detail = {"decision": decision.seq, "llm_calls": [call.model_dump(mode="json")]}
        store.campaigns.record(record.id, WRITING, detail)

    aims = aims_on_record(record, [event for event in events if event.kind == JOINED])
    try:
        made = await writer(decision.because, aims, observe(store, record.id).left, kept, keep)
    except NotWritten as error:
        return UNWRITTEN, {"words": str(error), "by": ""}
    line = {"aim": made.aim.model_dump(mode="json"), "folder": made.folder, "by": made.author, "files": made.files}
    return WRITTEN, {**line, "code": code_of(made.files)}
