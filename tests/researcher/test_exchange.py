"""Findings as JSON lines: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from researcher.exchange import FindingsRefused, read, written
from researcher.study.plan import Verdict
from tests.researcher.analysis.test_knowledge import a_finding, an_effect

SUPPORTED = a_finding("st-1", Verdict.SUPPORTED, an_effect(0.3), at=5.0)
NULL = a_finding("st-2", Verdict.EQUIVALENT, an_effect(0.01), at=6.0)
NOTHING = a_finding("st-3", Verdict.INCONCLUSIVE, None, at=7.0)


def a_line(**changes: Any) -> str:
    fields = json.loads(written([SUPPORTED], "Group 7"))
    for path, value in changes.items():
        *parents, last = path.split("__")
        inside = fields
        for parent in parents:
            inside = inside[parent]
        inside[last] = value
    return json.dumps(fields)


def test_what_is_written_is_read_and_says_whose_it_is() -> None:
    text = written([SUPPORTED, NULL, NOTHING], "Group 7")
    assert text.count("\n") == 3
    found = read(text, at=100.0)
    assert [number for number, _ in found] == [1, 2, 3]
    for finding, (_, back) in zip((SUPPORTED, NULL, NOTHING), found, strict=True):
        assert back == finding.model_copy(update={"origin": "Group 7", "imported_at": 100.0})
        assert not back.recomputable


def test_seeds_are_written_and_lines_without_them_are_read() -> None:
    [(_, back)] = read(written([SUPPORTED.model_copy(update={"seeds": (0, 1, 7)})], "Group 7"), at=1.0)
    assert back.seeds == (0, 1, 7)
    first = json.loads(a_line(schema_version=1))
    del first["seeds"]
    [(_, back)] = read(json.dumps(first), at=1.0)
    assert back.seeds is None


def test_a_question_that_is_too_long_for_a_line_is_cut() -> None:
    [(_, back)] = read(written([SUPPORTED.model_copy(update={"question": "?" * 30_000})], "Group 7"), at=1.0)
    assert back.question == "?" * 20_000


def test_what_was_imported_is_passed_on_under_the_name_it_came_with() -> None:
    [(_, theirs)] = read(written([SUPPORTED], "Group 7"), at=1.0)
    [(_, again)] = read(written([theirs], "Group 8"), at=2.0)
    assert again.origin == "Group 7"


def test_blank_lines_and_repeated_lines_are_nothing() -> None:
    line = a_line()
    assert len(read(f"\n{line}\n\n{line}\n", at=1.0)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (a_line(verdct="supported"), "verdct: unknown field (did you mean 'verdict'?)"),
        (a_line(effect__lwo=1), "effect.lwo: unknown field"),
        (a_line(schema_version=3), "schema_version is 3; this version reads 1 and 2: update"),
        (a_line(schema_version=1), "schema_version 2 requires the field seeds"),
        (a_line(seeds=[-1]), "seeds"),
        (a_line(seeds=[2**31]), "seeds"),
        (a_line(schema_version=True), "schema_version is True"),
        (a_line(schema_version=None), "schema_version is None"),
        (a_line(plan_hash="abc"), "plan_hash"),
        (a_line(verdict="invalid"), "an invalid study leaves no finding"),
        (a_line(verdict="great"), "verdict"),
        (a_line(effect=None), "there is no effect"),
        (a_line(effect__low=0.9), "not within its interval"),
        (a_line(effect__n_baseline=-1), "n_baseline"),
        (a_line(effect__metric="other"), "the effect is on 'other'"),
        (a_line(statement="two\nlines"), "statement"),
        (a_line(statement="x" * 3000), "statement"),
        (a_line(by=""), "by"),
        (a_line(margin=0), "margin"),
        (a_line(id="\x1b[31m"), "id"),
        (a_line(at=1e18), "at:"),
        (a_line(at=-1e15), "at:"),
        ("[]", "not a JSON object"),
        ("{", "not a JSON object on one line"),
        (a_line().replace("0.3,", "NaN,", 1), "NaN is not a number"),
        ("[" * 100_000, "not a JSON object"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_and_nothing_is_read(line: str, says: str) -> None:
    with pytest.raises(FindingsRefused) as refused:
        read(f"{a_line()}\n{line}\n", at=1.0)
    assert str(refused.value).startswith("line 2: ")
    assert says in str(refused.value)


def test_every_wrong_line_is_named_up_to_a_number() -> None:
    with pytest.raises(FindingsRefused) as refused:
        read("\n".join(["{"] * 15), at=1.0)
    assert str(refused.value).count("\n") == 10
    assert str(refused.value).endswith("... and 5 more lines")


def test_one_id_that_says_two_things_is_refused() -> None:
    with pytest.raises(FindingsRefused, match="line 2: st-1/H1 differs from line 1"):
        read(f"{a_line()}\n{a_line(margin=0.2)}", at=1.0)
