"""JSON as every reader takes it, and refused where some would take it otherwise."""

from __future__ import annotations

import json

import pytest

from foundation import strict_json


@pytest.mark.parametrize("value", [0, 2**63, 2**64 - 1, -(2**63), 1.5, 1e300, "é", {"a": [None, True]}, [], {}])
def test_what_is_read_is_what_was_written(value: object) -> None:
    assert strict_json.loads_plain(json.dumps(value)) == value
    assert type(strict_json.loads_plain(json.dumps(value).encode())) is type(value)


def test_halves_of_characters_become_replacement_characters() -> None:
    read = {"a\ufffd": "x\ufffdy", "whole": "\U0001f600"}
    assert strict_json.loads_plain(rb'{"a\ud83d": "x\uDE00y", "whole": "\ud83d\ude00"}') == read


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[NaN]",
        b"[Infinity]",
        b"[1e400]",
        rb'["\ud83d", 1e400]',
        b'["\xff"]',
        b"[18446744073709551616]",
        b"[-9223372036854775809]",
        b"[" + b"1" * 5000 + b"]",
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_what_readers_do_not_agree_on_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.loads_plain(raw)


def test_a_name_stands_once_unless_the_last_may_count() -> None:
    with pytest.raises(strict_json.RepeatedName, match="'a' appears twice"):
        strict_json.loads('{"b": {"a": 1, "\\u0061": 2}}')
    assert strict_json.loads_plain('{"a": 1, "a": 2}') == {"a": 2}


def test_numbers_that_a_field_refuses_by_name_are_read() -> None:
    value = strict_json.loads(b'{"n": [NaN, 1e400, -18446744073709551616]}')
    assert str(value) == "{'n': [nan, inf, -18446744073709551616]}"


def test_depth_counts_lists_and_objects_within_each_other() -> None:
    assert not strict_json.is_deeper("x", 0)
    assert strict_json.is_deeper([1], 0)
    assert not strict_json.is_deeper({"a": [1, {"b": 2}], "c": "d"}, 3)
    assert strict_json.is_deeper({"a": [1, {"b": 2}], "c": "d"}, 2)
