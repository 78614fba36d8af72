"""The tutorials work as they are written: their files are written, their commands typed, and what they show is what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reader_fixture import ROOT, Reader, blocks, missing
from tests.studies.playing import take

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
QUICK = {"first-agent", "mix", "tool-agent"}
"""Those that `make test` follows; the others are campaigns."""
INSTRUMENT = blocks((ROOT / "docs" / "tutorials" / "instrument.md").read_text())


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.campaign, id=page.stem) for page in PAGES],
)
def test_a_tutorial_works_as_it_is_written(page: Path, reader: Reader) -> None:
    reader.follow(page.read_text())
    assert reader.said


def test_the_page_on_instruments_shows_three_whole_files() -> None:
    files = [block.file for block in INSTRUMENT if block.file]
    assert files == ["last_word/reward.py", "last_word/workflow.py", "last_word/instrument.toml"]


def test_its_reward_and_its_splits_are_sound(reader: Reader) -> None:
    from swarm.client.workflow import load_workflow

    for block in INSTRUMENT:
        if block.file:
            reader.writes(block.file, block.text)
    loaded = load_workflow(reader.folder / "last_word", "workflow.py")
    train = take(loaded.tasks("train", 1, None), 500)
    assert train == take(loaded.tasks("train", 1, 500), 500)
    held_out = take(loaded.tasks("heldout", 1, 100), 100)
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert held_out == take(loaded.tasks("heldout", 2, 100), 100)


def test_what_a_page_shows_has_to_be_said_in_its_order() -> None:
    said = "run run-12 started\nstep 1\nstep 2\n"
    assert missing("run run-… started\nstep 2\n", said) is None
    assert missing("step 2\nstep 1", said) == "step 1"
    assert missing("step", said) == "step"
