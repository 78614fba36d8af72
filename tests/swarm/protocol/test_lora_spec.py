"""LoRA's alpha: as it is, or as a multiple of the rank."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from foundation.strict import explain
from swarm.protocol.runspec import LoraSpec, RunSpec, merge_patch


@pytest.mark.parametrize(
    ("given", "alpha"),
    [
        ({}, 32.0),
        ({"rank": 8}, 32.0),
        ({"alpha_ratio": 2}, 32.0),
        ({"rank": 8, "alpha_ratio": 2}, 16.0),
        ({"alpha": 5}, 5.0),
    ],
)
def test_a_ratio_is_held_whatever_the_rank_is(given: dict[str, Any], alpha: float) -> None:
    spec = LoraSpec.model_validate(given)
    assert spec.alpha == alpha
    assert LoraSpec.model_validate_json(spec.model_dump_json()) == spec
    assert ("alpha_ratio" in spec.model_dump()) == ("alpha_ratio" in given)


def test_another_rank_over_a_ratio_changes_alpha() -> None:
    run = merge_patch({"parameters": {"alpha_ratio": 4.0}}, {"parameters": {"rank": 32}})
    parameters = RunSpec.model_validate(run).parameters
    assert isinstance(parameters, LoraSpec)
    assert parameters.alpha == 128.0


def test_alpha_and_a_ratio_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError) as error:
        RunSpec.model_validate({"parameters": {"rank": 8, "alpha": 32, "alpha_ratio": 2}})
    (fault,) = explain(error.value, RunSpec)
    assert fault.field == "parameters.alpha"
    assert "give alpha or alpha_ratio, not both" in fault.problem


def test_adapters_are_named_by_a_word_by_their_fields_or_both() -> None:
    whole = RunSpec.model_validate({"parameters": {"rank": 4}})
    assert RunSpec.model_validate({"parameters": {"lora": {"rank": 4}}}) == whole
    assert RunSpec.model_validate({"parameters": "lora"}).parameters == LoraSpec()
    with pytest.raises(ValidationError):
        RunSpec.model_validate({"parameters": {"lora": {"rank": 4}, "rank": 8}})
