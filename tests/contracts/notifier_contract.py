"""What every service of notices must do. Subclass, and give the fixtures `notifier`, `away` (the same, where nobody listens) and `received`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from researcher.models import Notice, NoticeKind
from researcher.notify.services import Notifier, NotSent

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Received:
    """What a person finds at the service."""

    title: str
    body: str
    pictures: int


def a_notice(kind: NoticeKind = NoticeKind.GATE, picture: Path | None = None) -> Notice:
    return Notice(
        kind=kind, subject_id="st-1", key=f"{kind}/1", title=f"st-1: {kind}", body="Is it <better>?", picture=picture
    )


class NotifierContract:
    @pytest.mark.parametrize("kind", list(NoticeKind))
    def test_a_notice_of_each_kind_arrives_once_as_it_was_written(
        self, notifier: Notifier, received: Callable[[], list[Received]], kind: NoticeKind
    ) -> None:
        notifier.send(a_notice(kind))
        assert received() == [Received(f"st-1: {kind}", "Is it <better>?", 0)]

    def test_its_picture_arrives_with_it(
        self, notifier: Notifier, received: Callable[[], list[Received]], tmp_path: Path
    ) -> None:
        file = tmp_path / "curves.png"
        file.write_bytes(PNG)
        notifier.send(a_notice(picture=file))
        assert [each.pictures for each in received()] == [1]

    def test_without_the_file_of_its_picture_it_arrives_all_the_same(
        self, notifier: Notifier, received: Callable[[], list[Received]], tmp_path: Path
    ) -> None:
        notifier.send(a_notice(picture=tmp_path / "gone.png"))
        assert [each.pictures for each in received()] == [0]

    def test_a_service_that_is_away_says_so(self, away: Notifier) -> None:
        with pytest.raises(NotSent):
            away.send(a_notice())
