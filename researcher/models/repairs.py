"""Changes of an instrument's code while a study ran: what failed, what was changed, by whom."""

from __future__ import annotations

from pydantic import BaseModel


class RepairRecord(BaseModel):
    """One mended version that a study took up. Trials that began before it ran on the old one."""

    trial: str
    """Key of the trial whose client had failed."""
    attempt: int
    old: str
    """SHA-256 over the instrument's files before, and after."""
    new: str
    files: tuple[str, ...]
    diff: str
    """Unified, whole."""
    failed: str
    """The failure that led to it: where, and the exception's last line."""
    reason: str
    """What was wrong, in the words of whoever mended it."""
    by: str
    """`person`, or the LLM's name with `LLM` before it."""
    rehearsed: str
    """What was tried before it was taken up, in words."""
    at: float = 0.0

    @property
    def by_person(self) -> bool:
        return self.by == PERSON


PERSON = "person"
