"""Sampling masks: rows in their three forms, and what a request changes of the logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.engine.local.mask_rows import encode
from swarm.protocol.sampling_mask import BITS, BUT, ONLY, LogitChanges, SamplingMask, allows, only, size

VOCABULARY = 200


def row_of(tokens: set[int]) -> bytes:
    allowed_RV = torch.zeros(1, VOCABULARY, dtype=torch.bool)
    allowed_RV[0, sorted(tokens)] = True
    return encode(allowed_RV)[0]


@given(tokens=st.sets(st.integers(0, VOCABULARY - 1), min_size=1), complement=st.booleans())
def test_a_row_says_which_tokens_it_allows_whatever_its_form(tokens: set[int], complement: bool) -> None:
    wanted = set(range(VOCABULARY)) - tokens if complement else tokens
    row = row_of(wanted)
    assert {token for token in range(VOCABULARY + 9) if allows(row, token)} == wanted
    assert size(row) == len(wanted)
    assert row[:1] == ONLY if len(wanted) <= 6 else row[:1] == BUT if len(wanted) >= VOCABULARY - 6 else row[:1] == BITS
    if row[:1] == ONLY:
        assert only(wanted) == row, "as an engine without tensors writes it"


def test_equal_rows_are_kept_once_and_a_mask_travels_as_json() -> None:
    rows = [row_of({1, 2}), row_of(set(range(100))), row_of({1, 2}), row_of({7})]
    mask = SamplingMask.of(rows)
    assert (mask.row_of, len(mask.rows)) == ([0, 1, 0, 2], 3)
    assert [mask.rows[row] for row in mask.row_of] == rows
    assert mask.forced == 1
    assert SamplingMask.model_validate_json(mask.model_dump_json()) == mask


@pytest.mark.parametrize(
    ("request_body", "wanted"),
    [
        ({}, None),
        ({"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}}, None),
        ({"logit_bias": {"5": 300, "3": -1}}, LogitChanges(bias=((3, -1.0), (5, 100.0)))),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, LogitChanges(frequency=0.5, repetition=1.2)),
    ],
)
def test_what_a_request_changes_of_the_logits(request_body: dict[str, object], wanted: LogitChanges | None) -> None:
    assert LogitChanges.of(request_body) == wanted
