"""Drafts: options of the command line edit them, and reading them as study files gives the same fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foundation.commandline import UsageError
from researcher.study.draft import (
    Draft,
    arms_of,
    edited,
    marked,
    options_of,
    seeds_of,
    settings_of,
    study_text,
    vary_of,
)
from researcher.study.file import read_study_file
from researcher.study.spec import StudySpec

FIELDS = {
    "compare": {"kl": {"levels": [0.1]}},
    "set": {"epochs": 2},
    "seeds": {"min": 3, "max": 8},
    "claim": "increase",
}
DRAFT = Draft(
    fields=FIELDS, sources=marked(FIELDS, "file"), author="file", because="it matters", uncovered=("the cost",)
)


def test_the_first_level_is_the_baseline_and_a_single_one_stands_against_the_default() -> None:
    assert vary_of(["lr=1e-5, 4e-5", "algorithm=rloo", "hints=true,false"]) == {
        "lr": {"baseline": 1e-5, "levels": [4e-5]},
        "algorithm": {"levels": ["rloo"]},
        "hints": {"baseline": True, "levels": [False]},
    }


def test_a_spec_can_be_written_as_options() -> None:
    spec = StudySpec.model_validate(
        {"question": "Is it better?", "instrument": "arithmetic", **FIELDS, "heldout_every": 2}
    )
    assert options_of(spec, {"kl": 0})[-4:] == ["--claim", "increase", "--heldout-every", "2"]


def test_arms_settings_and_seeds_are_read() -> None:
    assert arms_of(["vanilla:", "dapo:clip_high=0.28,kl=0,loss_agg=token"]) == {
        "vanilla": {},
        "dapo": {"clip_high": 0.28, "kl": 0, "loss_agg": "token"},
    }
    assert settings_of("--set", ["said=a=b", "epochs=2"]) == {"said": "a=b", "epochs": 2}
    assert seeds_of("3") == {"min": 3, "max": 3}
    assert seeds_of("3..8") == {"min": 3, "max": 8}


@pytest.mark.parametrize(
    ("read", "given", "says"),
    [
        (lambda text: vary_of([text]), "lr", "--vary 'lr' is not valid; write --vary FACTOR=A,B"),
        (lambda text: vary_of([text]), "lr=1,,2", "has an empty level"),
        (lambda text: vary_of([text, text]), "lr=1", "--vary lr is given twice"),
        (lambda text: arms_of([text]), "kl=1", "has no colon; write --arm NAME:FACTOR=LEVEL"),
        (lambda text: arms_of([text, text]), "a:kl=1", "is given twice"),
        (lambda text: arms_of([text]), "a:kl", "--arm 'kl' is not valid"),
        (lambda text: settings_of("--set", [text]), "kl=", "--set 'kl=' is not valid; write --set FACTOR=LEVEL"),
        (seeds_of, "3-8", "--seeds '3-8' is not a number of seeds; write a number such as 3, or a range such as 3..8"),
        (seeds_of, "-1", "is not a number of seeds"),
    ],
)
def test_what_is_no_option_says_how_to_write_it(read, given: str, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=re.escape(says)):
        read(given)


def test_options_replace_what_is_compared_and_add_to_settings_seeds_and_budget() -> None:
    edits = {"set": {"digits": 2}, "seeds": {"first": 9}, "budget": {"wall": 60.0}, "claim": "none"}
    found = edited(DRAFT, edits)
    added = {"set": {"epochs": 2, "digits": 2}, "seeds": {"min": 3, "max": 8, "first": 9}, "budget": {"wall": 60.0}}
    assert found.fields == {**FIELDS, **added, "claim": "none"}
    flagged = {path for path, source in found.sources.items() if source == "flag"}
    assert flagged == {"set.digits", "seeds.first", "budget.wall", "claim"}
    assert found.sources["seeds.min"] == "file"
    assert (found.author, found.because, found.uncovered) == ("file", "it matters", ("the cost",))
    empty = Draft(fields={"set": None}, author="file")
    assert edited(empty, {"set": {"digits": 2}}).fields == {"set": {"digits": 2}}


def test_arms_take_the_place_of_what_is_compared_and_the_other_way_round() -> None:
    arms = edited(DRAFT, {"arms": {"a": {}, "b": {"kl": 0.1}}})
    assert "compare" not in arms.fields
    assert not [path for path in arms.sources if path.startswith("compare")]
    compared = edited(arms, {"compare": {"epochs": {"levels": [2]}}})
    assert "arms" not in compared.fields
    assert compared.sources["compare.epochs"] == "flag"
    assert not [path for path in compared.sources if path.startswith("arms")]


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--set sets epochs twice"):
        settings_of("--set", ["epochs=2", "epochs=3"])
    with pytest.raises(UsageError, match="--arm sets kl twice"):
        arms_of(["a:kl=0,kl=0.1"])


WHOLE: dict[str, Any] = {
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
    text = study_text(Draft(fields=WHOLE, author="builtin"))
    assert again(text, tmp_path) == WHOLE
    spec = StudySpec.model_validate(again(text, tmp_path))
    assert StudySpec.model_validate(again(study_text(Draft(fields=spec.document(), author="file")), tmp_path)) == spec


@pytest.mark.parametrize(
    "text", ["yes", "null", "~", "-", "- a", "a: b", "a #b", "'", '"', "a\nb", "[x]", "{x}", "&a", "*a", "!a", "%", "é 数", " x", "x ", "a\tb", "1.", "true", "a\u2028b", "a\x85b", "😀"]
)  # fmt: skip
def test_texts_of_any_kind_come_back(text: str, tmp_path: Path) -> None:
    fields = {"question": text, "set": {"said": text, text: 1}, "arms": {"a": {"said": text}}}
    assert again(study_text(Draft(fields=fields, author="flags")), tmp_path) == fields


def test_comments_say_who_wrote_it_why_and_where_each_setting_came_from(tmp_path: Path) -> None:
    sources = {**marked(WHOLE, "topic"), "seeds.min": "planner", "seeds.max": "default", "margin": "flag"}
    draft = Draft(
        fields=WHOLE,
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
    assert again(text, tmp_path) == WHOLE


def test_a_field_that_no_spec_has_is_written_for_a_person_to_mend(tmp_path: Path) -> None:
    assert again(study_text(Draft(fields={"sede": 3}, author="builtin"), ("sede: unknown",)), tmp_path) == {"sede": 3}
