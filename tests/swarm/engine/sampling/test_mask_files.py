"""What is read of the files that vLLM's worker writes, and which of them stay."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from swarm.engine.sampling.mask_files import MaskFiles

CHAT = "chatcmpl-ours-0123abcd"
ROWS = [b"\x01\x00", b"\x02\x80", b"\x01\x00"]


def record(number: int, row: bytes) -> bytes:
    return struct.pack("<II", number, len(row)) + row


def write(path: Path, *numbers: int) -> None:
    path.write_bytes(b"".join(record(number, ROWS[number]) for number in numbers))


def test_rows_are_read_as_they_come(tmp_path: Path) -> None:
    files = MaskFiles(tmp_path, "ours")
    assert files.rows(0, 0, 1) == []
    write(tmp_path / CHAT, 0, 1)
    assert files.rows(0, 0, 1) == ROWS[:1]
    with (tmp_path / CHAT).open("ab") as file:
        file.write(record(2, ROWS[2])[:-1])
    assert files.rows(0, 1, 2) == ROWS[1:2]
    with (tmp_path / CHAT).open("ab") as file:
        file.write(ROWS[2][-1:])
    assert files.rows(0, 2, 3) == ROWS[2:]


@pytest.mark.parametrize("name", ["1_chatcmpl-ours-0123abcd", "1_cmpl-ours-0-0123abcd"])
def test_each_choice_has_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, 0, 1, 2)
    write(tmp_path / name.replace("ours", "theirs").replace("1_", "0_"), 0)
    files = MaskFiles(tmp_path, "ours")
    assert files.rows(1, 0, 3) == ROWS
    assert files.rows(0, 0, 1) == []


def test_a_token_that_is_missing_leaves_none_known(tmp_path: Path) -> None:
    write(tmp_path / CHAT, 0, 2)
    assert MaskFiles(tmp_path, "ours").rows(0, 0, 3) == []


def test_a_token_that_was_drawn_again_counts_as_drawn_last(tmp_path: Path) -> None:
    (tmp_path / CHAT).write_bytes(record(0, b"\xff\xff") + record(0, ROWS[0]))
    assert MaskFiles(tmp_path, "ours").rows(0, 0, 1) == ROWS[:1]


def test_what_is_written_after_a_request_was_broken_off_goes_with_the_next_one(tmp_path: Path) -> None:
    broken_off, going_on = MaskFiles(tmp_path, "broken"), tmp_path / "0_chatcmpl-other-0123abcd"
    broken_off.remove({"ours", "other"})
    for path in (tmp_path / "chatcmpl-broken-0123abcd", tmp_path / CHAT, going_on):
        write(path, 0)
    MaskFiles(tmp_path, "ours").remove({"other"})
    assert list(tmp_path.iterdir()) == [going_on]
