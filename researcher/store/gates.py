"""Gates, at which a study waits for a person: a question in the journal, and its first answer.

The study's owner asks (`asked`) and records when it has seen the answer (`answered`). People can answer (`answer_given`) even
while no worker runs the study. All three are journal entries.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from researcher.models import Answer, OpenGate
from researcher.store.errors import WrongState
from researcher.store.journal import lines, newest
from researcher.store.retries import retried
from researcher.store.transactions import Part

_ASKED, _GIVEN, _MET = "asked", "answer_given", "answered"


class GateRecords(Part):
    """The gates of studies. A gate's name is `plan/1` (with the plan's version) or `stage/1/compare`."""

    @retried
    def ask(self, study_id: str, name: str, question: dict[str, Any]) -> Answer | None:
        """Ask the question, unless it was already asked. Return the answer, or None if there is none yet.

        Only the study's owner may ask.
        """
        detail = {"gate": name, **question}
        with self._db.owning(study_id) as session:
            if all(row.detail != detail for row in session.scalars(lines(study_id, _ASKED, gate=name))):
                self._db.note(session, study_id, _ASKED, **detail)
            answer = _answer(session, study_id, name)
            if answer is not None and newest(session, study_id, _MET, gate=name) is None:
                self._db.note(session, study_id, _MET, gate=name, **answer.model_dump())
            return answer

    @retried
    def open(self, study_id: str) -> OpenGate | None:
        """Return the gate at which the study waits, or None. A newer question replaces an older one."""
        with self._db.reading() as session:
            return _open(session, study_id)

    @retried
    def give(self, study_id: str, name: str, answer: Answer) -> Answer:
        """Answer the gate called `name`. Return the answer that counts, which is the first one given.

        Raises: WrongState when the study is not waiting at this gate.
        """
        with self._db.writing() as session:
            self._db.study_row(session, study_id, lock=True)  # serialises two simultaneous answers
            gate = _open(session, study_id)
            if gate is None or gate.name != name:
                raise WrongState(f"{study_id} is not waiting at {name}")
            if gate.answer is None:
                self._db.note(session, study_id, _GIVEN, gate=name, **answer.model_dump())
            return gate.answer or answer


def _open(session: Session, study_id: str) -> OpenGate | None:
    asked = newest(session, study_id, _ASKED)
    if asked is None or newest(session, study_id, _MET, gate=asked.detail["gate"]) is not None:
        return None
    question = dict(asked.detail)
    name = str(question.pop("gate"))
    return OpenGate(name=name, question=question, answer=_answer(session, study_id, name))


def _answer(session: Session, study_id: str, name: str) -> Answer | None:
    first = session.scalars(lines(study_id, _GIVEN, _MET, gate=name).limit(1)).first()
    return None if first is None else Answer.model_validate({k: v for k, v in first.detail.items() if k != "gate"})
