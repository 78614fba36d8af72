"""A view and a copy of the records that take everything and show nothing."""

from __future__ import annotations

from researcher.view import StudyPicture


class Quiet:
    """Neither view nor copy."""

    def show(self, picture: StudyPicture) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...

    def drain(self, study_id: str | None = None) -> int:
        return 0
