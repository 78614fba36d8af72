"""JSON with integers of any size: read and written as it is, and refused where it is none."""

from __future__ import annotations

import json

import pytest

from foundation import wide_json


@pytest.mark.parametrize(
    "value", [0, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**300, 10**400, 1.5, "é", {"a": [None]}]
)
def test_what_is_read_is_what_was_written(value: object) -> None:
    assert wide_json.loads(wide_json.dumps(value)) == value
    assert type(wide_json.loads(json.dumps(value).encode())) is type(value)


def test_halves_of_characters_become_replacement_characters_whichever_way_they_go() -> None:
    told = {"a\ufffd": "x\ufffdy", "whole": "\U0001f600"}
    assert wide_json.loads(rb'{"a\ud83d": "x\ude00y", "whole": "\ud83d\ude00"}') == told
    assert json.loads(wide_json.dumps({"a\ud83d": "x\ude00y", "whole": "\U0001f600"})) == told


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[NaN]",
        b"[Infinity]",
        b"[1e400]",
        rb'["\ud83d", 1e400]',
        rb'["\ud83d", NaN]',
        b'["\xff"]',
        b"[" + b"1" * 5000 + b"]",
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        wide_json.loads(raw)


def test_keys_may_be_sorted_either_way() -> None:
    assert wide_json.dumps({"b": 1, "a": 2}, sort_keys=True) == b'{"a":2,"b":1}'
    assert wide_json.dumps({"b": 2**70, "a": 2}, sort_keys=True) == b'{"a":2,"b":%d}' % 2**70


def test_depth_counts_lists_and_objects_within_each_other() -> None:
    assert not wide_json.is_deeper("x", 0)
    assert wide_json.is_deeper([1], 0)
    assert not wide_json.is_deeper({"a": [1, {"b": 2}], "c": "d"}, 3)
    assert wide_json.is_deeper({"a": [1, {"b": 2}], "c": "d"}, 2)
