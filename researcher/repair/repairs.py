"""Repairs an instrument's code for one study: stores each version that clients run, and may ask an LLM for a repair.

Steps of a repair: rehearse the old code; ask; check the answer (it parses, keeps public names, and changes only the instrument's
own files); rehearse the new code and compare; adopt it.

If the old code cannot be rehearsed, there is nothing to compare a repair with. Then a person is asked.

Once adopted, a version runs in every client that starts afterwards, in all arms. `by_hand` adopts a person's repair when the study
is resumed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from foundation.logs import redact
from foundation.strict import StrictModel, explain
from researcher.executor.blueprint import Code
from researcher.executor.clients import Case
from researcher.executor.diagnosis import Cause, Diagnosis
from researcher.executor.errors import MendByHand, Unmended
from researcher.instruments.catalogue import InstrumentFolder, declaration_in
from researcher.llm.endpoint import LlmError, LlmUnusable
from researcher.llm.templates import filled
from researcher.models import PERSON, RepairRecord
from researcher.repair.asking import PROMPTS, Form, Llm, Messages, Unreadable, ask, object_in, prompt, strict, told
from researcher.repair.code import Unfit, Versions, check_changes, check_entries, diff, texts
from researcher.repair.rehearsal import Rehearsal, RehearsalRequest, check, check_comparable, compare, rehearse
from researcher.sandbox.launch import sandbox
from researcher.store.errors import OverBudget
from researcher.store.journal import REPAIRED
from researcher.store.store import Store
from researcher.study.plan import Plan

REFUSED, BY_HAND, SANDBOXED = "repair_refused", "mend_by_hand", "sandboxed"
"""Kinds of journal events that this module writes, besides `REPAIRED`."""
_SHOWN_FILES = 80_000
"""Maximum characters of an instrument's files in a prompt. Files beyond it are only listed by name."""
_TASKS = 8

_TEXT = {"type": "string"}
_PROPOSAL = Form(
    "mended_code",
    "files",
    strict(reason=_TEXT, files={"type": "array", "items": strict(name=_TEXT, content=_TEXT)}),
)
_OPINION = Form("opinion", "cause", strict(cause={"type": "string", "enum": ["infrastructure", "code"]}, why=_TEXT))


class MendedFile(StrictModel):
    name: str
    content: str


class Proposal(StrictModel):
    """The LLM's answer to a repair prompt."""

    reason: Annotated[str, Field(min_length=1)]
    files: Annotated[tuple[MendedFile, ...], Field(min_length=1)]


class Opinion(StrictModel):
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairLimits:
    """Maximum number of repair rounds per study and per trial, failed rounds included, and of answers per round."""

    per_study: int = 3
    per_trial: int = 2
    answers: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """LLMs to ask for help.

    `mending` writes repairs; if it is None, a person has to write them, and `why_none` says why. `opinion` gives quick opinions on the
    cause of a failure.
    """

    mending: Llm | None = None
    opinion: Llm | None = None
    why_none: str = "no planner LLM is configured (RESEARCHER_LLM_MODEL)"


class Repairer:
    """Implements `Mender` for one study.

    Args:
        store: the store of the study's owner.
        folder: the person's copy of the instrument.
        root: folder that holds the versions.
        python: interpreter that runs the clients.
    """

    def __init__(
        self,
        store: Store,
        study_id: str,
        plan: Plan,
        folder: InstrumentFolder,
        root: Path,
        *,
        python: str = sys.executable,
        helpers: Helpers | None = None,
        limits: RepairLimits | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._study_id = study_id
        self._plan = plan
        self._own = folder
        self._versions = Versions(root)
        self._python = python
        self._helpers = helpers or Helpers()
        self._limits = limits or RepairLimits()
        self._tell = tell
        self._lock = asyncio.Lock()
        self._opinions: dict[str, Diagnosis] = {}
        repairs = store.journal.repairs(study_id)
        newest = repairs[-1] if repairs else None
        self._code = self._as_it_lies()
        if newest is not None and not newest.by_person:
            self._code = self._versions.mended(newest.new)
        store.budgets.set(study_id, "repairs", self._limits.per_study)

    def code(self) -> Code:
        return self._code

    def tell_sandbox(self) -> None:
        """Record in the journal, and so in the report, which sandbox runs code that an LLM wrote."""
        words = f"{self._own.instrument.name} runs {sandbox().words}"
        if not self._code.sandboxed:
            return
        self._tell(words)
        detail = {"mode": sandbox().mode.value, "words": words}
        self._store.journal.record_once(self._study_id, SANDBOXED, detail)

    def _as_it_lies(self) -> Code:
        """Return the code in the person's folder as it is now. A generated instrument stays sandboxed, whoever repairs it."""
        return Code(folder=self._own.path, version=self._own.code, sandboxed=self._own.instrument.generated is not None)

    @property
    def taken_up(self) -> tuple[str, ...]:
        """Versions of the code that this study adopted."""
        return tuple(record.new for record in self._store.journal.repairs(self._study_id))

    # -- by hand ------------------------------------------------------------------------------------------------------

    def by_hand(self) -> RepairRecord | None:
        """Adopt a person's repair, if the study waits for one and the instrument's files have changed.

        Raises: Unfit when the files cannot be used.
        """
        waiting = self._waiting()
        own = [record.new for record in self._store.journal.repairs(self._study_id) if record.by_person]
        expected = own[-1] if own else self._plan.instrument_code
        if waiting is None or self._own.code == expected:
            return None
        old, failing = str(waiting["code"]), self._versions.kept(str(waiting["code"]))
        before, after = texts(failing) if failing else {}, texts(self._own.path)
        workflow = self._own.instrument.workflow
        check_entries(workflow, after[workflow])
        if failing and _declared(failing) != _declared(self._own.path):
            raise Unfit(
                f"{declaration_in(self._own.path)} was changed, but the plan was made for the old file; restore it"
            )
        self._versions.keep(self._own.path)
        record = RepairRecord(
            trial=str(waiting["trial"]),
            attempt=int(waiting["attempt"]),
            old=old,
            new=self._own.code,
            files=tuple(sorted(name for name in {*before, *after} if before.get(name) != after.get(name))),
            diff=diff(before, after) if failing else "the old files were not kept",
            failed=str(waiting["failed"]),
            reason="mended by hand",
            by=PERSON,
            rehearsed="not rehearsed: it parses, and defines what clients call",
        )
        return self._take(record, self._as_it_lies())

    def _waiting(self) -> dict[str, Any] | None:
        """Return the open request for a repair by a person, or None."""
        last = self._store.journal.last(self._study_id, BY_HAND, REPAIRED)
        return last.detail if last is not None and last.kind == BY_HAND else None

    def _ask_a_person(self, case: Case, why: str) -> Code:
        """Ask a person for a repair. Returns the same code for another try if attempts are left; on the last attempt, raises
        MendByHand.
        """
        if not case.last:
            return case.code
        self._versions.keep(case.code.folder)
        found, place = case.diagnosis, case.diagnosis.place
        file = self._own.path / place if place else self._own.path / self._own.instrument.workflow
        detail = {
            "trial": case.trial.key,
            "attempt": case.attempt,
            "place": str(file),
            "failed": redact(str(found)),
            "code": case.code.version,
            "why": why,
        }
        self._store.journal.record(self._study_id, BY_HAND, detail)
        raise MendByHand(
            f"the client of {case.trial.key} failed because of its own code at {file}: {redact(found.error) or found.why}. "
            f"It was not repaired automatically: {why}. Fix the file, then run `researcher resume {self._study_id}`; "
            "the trial keeps its progress"
        )

    # -- by an LLM ----------------------------------------------------------------------------------------------------

    async def opinion(self, diagnosis: Diagnosis) -> Diagnosis:
        llm = self._helpers.opinion
        if llm is None:
            return diagnosis
        if diagnosis.error not in self._opinions:
            messages = [
                {"role": "system", "content": prompt("opinion.md")},
                {"role": "user", "content": f"{diagnosis.why}\n\n{redact(diagnosis.trace)}"},
            ]
            try:
                raw = await ask(llm, messages, _OPINION, "opinion on a failure")
                said = Opinion.model_validate(object_in(raw, _OPINION))
            except (LlmError, Unreadable, ValidationError) as error:
                self._tell(f"the LLM gave no opinion on the failure: {error}")
                return diagnosis
            by = f"LLM {llm.model}"
            self._opinions[diagnosis.error] = replace(diagnosis, cause=said.cause, why=said.why[:300], by=by)
        given = self._opinions[diagnosis.error]
        return replace(diagnosis, cause=given.cause, why=given.why, by=given.by)

    async def mend(self, case: Case) -> Code:
        async with self._lock:
            if self._code.version != case.code.version:
                return self._code  # another trial's repair was taken up meanwhile
            llm = self._helpers.mending
            if llm is None:
                return self._ask_a_person(case, self._helpers.why_none)
            number = self._rounds(case) + 1
            self._reserve(case, number)
            rounds = 0
            try:
                before = await self._as_it_was(case)
                rounds = 1
                self._tell(
                    f"{case.trial.key} failed because of its own code ({case.diagnosis}); asking {llm.model} to repair it"
                )
                return await self._mended(case, llm, number, before)
            except Unfit as error:
                return self._ask_a_person(case, f"the old code cannot be rehearsed in the sandbox: {error}")
            except LlmUnusable as error:
                return self._ask_a_person(replace(case, last=True), f"the LLM cannot be used: {error}")
            finally:
                self._store.budgets.spend(self._study_id, "repairs", f"{case.trial.key}#{number}", rounds)

    def _rounds(self, case: Case) -> int:
        """Return the number of repair rounds that this trial has had."""
        had = self._store.journal.events(self._study_id, REFUSED, trial=case.trial.key)
        mended = [each for each in self._store.journal.repairs(self._study_id) if each.trial == case.trial.key]
        return len(had) + sum(not each.by_person for each in mended)

    def _reserve(self, case: Case, number: int) -> None:
        """Reserve one repair. Raises: Unmended when the trial or the study has used up its repairs."""
        found = redact(str(case.diagnosis))
        if number > self._limits.per_trial:
            raise Unmended(f"{found}; the trial has used all of its {self._limits.per_trial} repairs")
        try:
            self._store.budgets.reserve(self._study_id, "repairs", f"{case.trial.key}#{number}", 1)
        except OverBudget as error:
            raise Unmended(f"{found}; the study has used all of its {self._limits.per_study} repairs") from error

    async def _as_it_was(self, case: Case) -> Rehearsal:
        """Rehearse the failing code. Raises: Unfit if a repair cannot be compared with it."""
        request = self._request(case, case.code.folder)
        if self._own.instrument.roles:
            raise Unfit("a rehearsal has no models for the instrument's other roles")
        before = await rehearse(request, python=self._python)
        if before.error and request.tasks:  # perhaps the failed tasks cannot be listed
            before = await rehearse(request.model_copy(update={"tasks": []}), python=self._python)
        check_comparable(before, case.diagnosis)
        return before

    async def _mended(self, case: Case, llm: Llm, number: int, before: Rehearsal) -> Code:
        """Ask until an answer can be used. Raises: Unmended when no answer can; LlmUnusable."""
        files = texts(case.code.folder)
        messages, wrong = self._question(case, files), ""
        for answer in range(1, self._limits.answers + 1):
            raw = await ask(llm, messages, _PROPOSAL, f"repair {number} of {case.trial.key}, answer {answer}")
            try:
                proposal = Proposal.model_validate(object_in(raw, _PROPOSAL))
                return await self._tried(case, llm, files, proposal, before)
            except ValidationError as error:
                wrong = "; ".join(str(problem) for problem in explain(error, Proposal))
            except (Unreadable, Unfit) as error:
                wrong = str(error)
            self._tell(f"answer {answer} of {llm.model} cannot be used: {wrong.splitlines()[-1][:200]}")
            messages = [*messages, *told(raw, wrong)]
        why = f"{self._limits.answers} answers of {llm.model} could not be used; the last: {wrong}"
        detail = {
            "trial": case.trial.key,
            "attempt": case.attempt,
            "code": case.code.version,
            "why": redact(why)[:4000],
        }
        self._store.journal.record(self._study_id, REFUSED, detail)
        raise Unmended(f"{redact(str(case.diagnosis))}; {redact(why)}")

    async def _tried(self, case: Case, llm: Llm, files: dict[str, str], proposal: Proposal, before: Rehearsal) -> Code:
        """Check, rehearse and adopt the proposal. Raises: Unfit."""
        changes = {file.name: file.content for file in proposal.files if files.get(file.name) != file.content}
        check_changes(files, changes, self._own.instrument.workflow)
        version, folder = self._versions.keep(case.code.folder, changes)
        after = await rehearse(self._request(case, folder), python=self._python)
        check(after)
        words = compare(before, after)
        record = RepairRecord(
            trial=case.trial.key,
            attempt=case.attempt,
            old=case.code.version,
            new=version,
            files=tuple(sorted(changes)),
            diff=diff({name: files[name] for name in changes}, changes),
            failed=redact(str(case.diagnosis)),
            reason=redact(proposal.reason)[:1000],
            by=f"LLM {llm.model}",
            rehearsed=f"{words}; runs {sandbox().words}",
        )
        self._take(record, Code(folder=folder, version=version, sandboxed=True))
        self.tell_sandbox()
        return self._code

    def _take(self, record: RepairRecord, code: Code) -> RepairRecord:
        kept = self._store.journal.record_repair(self._study_id, record)
        self._code = code
        self._tell(
            f"the code was repaired by {record.by} ({', '.join(record.files)}: {record.reason}); "
            f"`researcher show {self._study_id}` shows the change. {record.rehearsed}"
        )
        return kept

    def _request(self, case: Case, folder: Path) -> RehearsalRequest:
        return RehearsalRequest(
            folder=str(folder.resolve()),
            workflow=self._own.instrument.workflow,
            parameters=case.blueprint.parameters,
            seed=case.blueprint.seed,
            heldout=case.blueprint.heldout.upto,
            tasks=list(case.tasks[:_TASKS]),
        )

    def _question(self, case: Case, files: dict[str, str]) -> Messages:
        shown, left_out, letters = [], [], 0
        for name, text in sorted(files.items(), key=lambda each: (not each[0].endswith(".py"), each[0])):
            letters += len(text)
            if letters <= _SHOWN_FILES:
                shown.append((name, text))
            else:
                left_out.append(name)
        found = case.diagnosis
        question = filled(
            PROMPTS,
            "repair_case.md.jinja",
            place=found.place,
            error=redact(found.error or found.why),
            trace=redact(found.trace).replace(f"{case.code.folder}/", ""),
            seed=case.blueprint.seed,
            parameters=case.blueprint.parameters,
            tasks=list(case.tasks[:_TASKS]),
            workflow=self._own.instrument.workflow,
            files=shown,
            left_out=left_out,
        )
        return [{"role": "system", "content": prompt("repair.md")}, {"role": "user", "content": question}]


def _declared(folder: Path) -> bytes | None:
    """Return the content of the folder's declaration file."""
    file = declaration_in(folder)
    return None if file is None else file.read_bytes()
