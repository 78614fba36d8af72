"""What is said of a bad field: where it is, what is wrong, and what was probably meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from foundation.strict import StrictModel, explain


class Inner(StrictModel):
    rank: int = 1


class Other(StrictModel):
    size: int = 1


class Spec(StrictModel):
    kind: Inner | str = "a"
    either: Inner | Other | None = None
    number: int | None = None
    many: list[int | Inner] = []
    named: dict[str, Inner | None] = {}


def refused(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as error:
        Spec.model_validate(document)
    return [str(fault) for fault in explain(error.value, Spec)]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"nummer": 1}, ["nummer: unknown field (did you mean 'number'?)"]),
        ({"number": []}, ["number: should be a valid integer"]),
        ({"kind": {"rnk": 1}}, ["kind.rnk: unknown field (did you mean 'kind.rank'?)"]),
        ({"kind": 5}, ["kind: should be an object or a valid string, got 5"]),
        ({"either": {"x": 1}}, ["either.x: unknown field"]),
        ({"either": 1}, ["either: should be an object, got 1"]),
        ({"many": [1, {"rnk": 2}]}, ["many.1.rnk: unknown field (did you mean 'many.1.rank'?)"]),
        ({"named": {"x": {"rnk": 2}}}, ["named.x.rnk: unknown field (did you mean 'named.x.rank'?)"]),
        (
            {"number": "x", "kind": None},
            [
                "kind: should be an object or a valid string, got None",
                "number: should be a valid integer, unable to parse string as an integer, got 'x'",
            ],
        ),
    ],
)
def test_what_fits_none_of_several_types_is_one_fault_without_their_names(
    document: dict[str, Any], told: list[str]
) -> None:
    assert refused(document) == told
