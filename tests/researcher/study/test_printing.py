"""A draft as a study file: reading it gives the same fields, and comments say where each came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.study.draft import Draft, marked, study_text
from researcher.study.file import read_study_file
from researcher.study.spec import StudySpec

FIELDS: dict[str, Any] = {
    "question": 'Does "clip-higher" help: yes, or no? # really',
    "instrument": "arithmetic",
    "model": ["Qwen/Qwen3-0.6B", "smollm2-135m"],
    "compare": {"clip_high": {"baseline": 0.2, "levels": [1e-05]}},
    "design": "factorial",
    "set": {"hints": True, "said": "on", "told": "1e-5", "empty": "", "null": "null", "rate": 4e-05, "n": 3},
    "margin": 0.05,
    "seeds": {"min": 3, "max": 8},
    "budget": {"wall": "8h"},
    "schedule": {"windows": ["22:00-07:00", "sat,sun 00:00-24:00"]},
}


def again(text: str, folder: Path) -> dict[str, Any]:
    (folder / "study.yaml").write_text(text)
    return read_study_file(folder / "study.yaml")[0]


def test_what_is_written_reads_as_the_same_fields(tmp_path: Path) -> None:
    text = study_text(Draft(fields=FIELDS, author="builtin"))
    assert again(text, tmp_path) == FIELDS
    spec = StudySpec.model_validate(again(text, tmp_path))
    assert StudySpec.model_validate(again(study_text(Draft(fields=spec.document(), author="file")), tmp_path)) == spec


@pytest.mark.parametrize(
    "text", ["yes", "null", "~", "-", "- a", "a: b", "a #b", "'", '"', "a\nb", "[x]", "{x}", "&a", "*a", "!a", "%", "é 数", " x", "x ", "a\tb", "1.", "true", "a\u2028b", "a\x85b", "😀"]
)  # fmt: skip
def test_texts_of_any_kind_come_back(text: str, tmp_path: Path) -> None:
    fields = {"question": text, "set": {"said": text, text: 1}, "arms": {"a": {"said": text}}}
    assert again(study_text(Draft(fields=fields, author="flags")), tmp_path) == fields


def test_comments_say_who_wrote_it_why_and_where_each_setting_came_from(tmp_path: Path) -> None:
    sources = {**marked(FIELDS, "topic"), "seeds.min": "planner", "seeds.max": "default", "margin": "flag"}
    draft = Draft(
        fields=FIELDS,
        sources=sources,
        author="some-llm",
        because="It asks\nfor clipping. " + "word " * 40,
        uncovered=("the cost of it",),
    )
    text = study_text(draft, ("compare: which levels?",))
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert head[0] == "# Study file, written by some-llm. Run it: researcher start FILE"
    assert "# Not covered: the cost of it" in head
    assert "# To be settled: compare: which levels?" in head
    assert all(len(line) <= 100 for line in head)
    comments = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in text.splitlines() if "  # " in line}
    assert comments["instrument"] == "from the topic"
    assert (comments["min"], comments["max"]) == ("chosen by the planner", "the instrument's default")
    assert comments["margin"] == "from an option"
    assert again(text, tmp_path) == FIELDS


def test_a_field_that_no_spec_has_is_written_for_a_person_to_mend(tmp_path: Path) -> None:
    assert again(study_text(Draft(fields={"sede": 3}, author="builtin"), ("sede: unknown",)), tmp_path) == {"sede": 3}
