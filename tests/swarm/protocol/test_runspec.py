"""The spec of a run: its algorithm, its batches, its adapters."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from foundation.strict import explain
from swarm.protocol.algorithms import ALGORITHMS, AlgorithmSpec
from swarm.protocol.errors import InvalidSpec, Refusal, SwarmError
from swarm.protocol.problem import ClientModel
from swarm.protocol.quantities import MOST
from swarm.protocol.runspec import BatchSpec, LoraSpec, RunSpec, merge_patch
from swarm.protocol.status import RunRequest
from swarm.server.state.runs import patched


def run(**algorithm: Any) -> RunSpec:
    return RunSpec.model_validate({"algorithm": algorithm})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_spec_comes_back_from_json_as_it_was(name: str) -> None:
    spec = run(name=name, kl=0.1)
    again = RunSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert {field: getattr(spec.algorithm, field) for field in ALGORITHMS[name].defaults} == ALGORITHMS[name].defaults


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("grpo", "gae_lambda", 0.9),
        ("rloo", "advantage_norm", "std"),
        ("dr_grpo", "advantage_norm", "none"),
        ("ppo", "overlong_buffer", 0.1),
        ("dapo", "gamma", 1.0),
        ("gspo", "value_coef", 0.1),
        ("reinforce_pp", "value_clip", 0.2),
        ("cispo", "baseline", "group"),
        ("icepop", "tau_positive", 1.0),
        ("sapo", "clip_high", 0.2),
    ],
)
def test_a_field_of_another_algorithm_is_refused_even_at_its_default(name: str, field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        run(name=name, **{field: value})
    (fault,) = explain(refused.value, RunSpec)
    assert fault.field == f"algorithm.{field}"
    assert f"{name} does not use {field}" in fault.problem
    assert "leave it out" in fault.problem
    assert field not in AlgorithmSpec(name=name).model_dump()


def test_a_bound_of_another_correction_is_refused_and_yields_with_its_correction() -> None:
    for correction in ("none", "truncated_call"):
        with pytest.raises(ValidationError) as refused:
            run(importance_correction=correction, importance_floor=0.5)
        (fault,) = explain(refused.value, RunSpec)
        assert fault.field == "algorithm.importance_floor"
        assert "a field of masked, masked_call: leave it out" in fault.problem
    with pytest.raises(ValidationError, match="must not exceed importance_limit"):
        run(importance_correction="masked", importance_floor=3.0)
    assert run(name="icepop").algorithm.importance_floor == 0.5
    uncorrected = run(name="icepop", importance_correction="none")
    assert "importance_floor" not in uncorrected.model_dump()["algorithm"]
    assert RunSpec.model_validate(uncorrected.model_dump()) == uncorrected


def test_in_python_all_faults_of_a_spec_are_told_at_once_with_the_nearest_names() -> None:
    wrong: Any = {
        "optimizr": {},
        "optimizer": {"learning_rte": 1e-4},
        "parameters": "lorra",
        "algorithm": {"name": "gprpo"},
    }
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(wrong)
    with pytest.raises(InvalidSpec) as in_python:
        RunSpec(**wrong)
    faults = explain(refused.value, RunSpec)
    assert in_python.value.detail == "; ".join(map(str, faults))
    assert set(in_python.value.nearest) == {"optimizer", "optimizer.learning_rate", "lora", "grpo"}


@pytest.mark.parametrize("model", ClientModel.__subclasses__())
def test_a_misspelt_keyword_of_what_clients_build_is_refused_with_the_nearest_name(model: type[ClientModel]) -> None:
    name = max(model.model_fields, key=len)
    with pytest.raises(SwarmError) as refused:
        model(**{f"{name}x": 1})
    assert name in refused.value.nearest


def test_misspelt_fields_and_unknown_algorithms_are_refused() -> None:
    with pytest.raises(ValidationError) as refused:
        run(name="ppo", gae_lamda=0.9)
    assert "did you mean 'algorithm.gae_lambda'" in str(explain(refused.value, RunSpec)[0])
    for name in ("grpoo", None, 3, ["ppo"]):
        with pytest.raises(ValidationError):
            run(name=name)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"algorithm": {"name": "grpoo"}}, "got 'grpoo' (did you mean 'grpo'?)"),
        ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate: should be greater than or equal to 0, got -1"),
        (
            {"optimizer": {"learning_rate": "fast"}},
            "should be a valid number, unable to parse string as a number, got 'fast'",
        ),
        ({"batch": 3}, "batch: should be an object, got 3"),
        (
            {"sampling": {"temperature": 0.005}},
            "such calls could not be trained on; use 0.01 or more, or 0 for a run that only evaluates",
        ),
        (
            {"batch": {"group_size": 1}},
            "batch.group_size: grpo compares episodes of one group: must be at least 2, got 1",
        ),
    ],
)
def test_a_refusal_says_what_should_be_there_and_what_was(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(spec)
    assert str(explain(refused.value, RunSpec)[0]).endswith(said)


def test_a_patch_to_a_temperature_that_trains_nothing_is_refused() -> None:
    assert [patched(run(), {"sampling": {"temperature": at}}).sampling.temperature for at in (0, 0.01)] == [0, 0.01]
    with pytest.raises(Refusal, match=r"vLLM would sample at 0\.01 instead of 1e-05"):
        patched(run(), {"sampling": {"temperature": 1e-5}})


def test_groups_of_one_are_taken_only_where_nothing_is_compared_in_them() -> None:
    alone = {"group_size": 1}
    for name in ("ppo", "reinforce_pp"):
        assert RunSpec.model_validate({"algorithm": {"name": name}, "batch": alone}).batch.group_size == 1
    for algorithm in ({"name": "rloo"}, {"name": "reinforce_pp", "baseline": "group"}):
        with pytest.raises(ValidationError, match="compares episodes of one group: must be at least 2"):
            RunSpec.model_validate({"algorithm": algorithm, "batch": alone})


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ({"batch": {"rule": "episodes"}}, ["batch.episodes"]),
        ({"batch": {"group_size": 4, "partial_min": 5}}, ["batch.partial_min"]),
        ({"batch": {"group_size": 1, "partial_min": 2}}, ["batch.group_size", "batch.partial_min"]),
        ({"algorithm": {"name": "grpo", "gamma": 0.5, "value_clip": 1.0}}, ["algorithm.gamma", "algorithm.value_clip"]),
    ],
)
def test_where_fields_must_agree_the_one_to_change_is_named(spec: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(spec)
    assert [fault.field for fault in explain(refused.value, RunSpec)] == fields
    with pytest.raises(ValidationError) as refused:
        RunRequest.model_validate({"spec": spec})
    assert [fault.field for fault in explain(refused.value, RunRequest)] == [f"spec.{field}" for field in fields]


def test_the_least_of_a_partial_group_follows_its_size_where_it_is_not_stated() -> None:
    assert [BatchSpec(group_size=size).partial_min for size in (1, 2, 8)] == [1, 2, 2]
    assert BatchSpec(group_size=4, partial_min=1).partial_min == 1
    spec = RunSpec.model_validate({"algorithm": {"name": "ppo"}})
    alone = patched(spec, {"batch": {"group_size": 1}})
    assert (alone.batch.partial_min, patched(alone, {"batch": {"group_size": 8}})) == (1, spec)
    stated = patched(spec, {"batch": {"partial_min": 6}})
    with pytest.raises(Refusal) as refused:
        patched(stated, {"batch": {"group_size": 4}})
    assert [error["field"] for error in refused.value.fields["errors"]] == ["batch.partial_min"]


def test_dapo_samples_dynamically_unless_told_otherwise() -> None:
    assert run(name="dapo").batch.rule == "informative_tasks"
    assert RunSpec(algorithm=AlgorithmSpec(name="dapo")).batch.rule == "informative_tasks"
    told = RunSpec.model_validate({"algorithm": {"name": "dapo"}, "batch": {"rule": "tasks"}})
    assert told.batch.rule == "tasks"
    assert run(name="grpo").batch.rule == "tasks"


def test_a_patch_changes_an_algorithms_fields_and_not_its_name() -> None:
    spec = run(name="ppo")
    assert patched(spec, {"algorithm": {"gae_lambda": 0.5}}).algorithm.gae_lambda == 0.5
    assert patched(run(name="dapo", clip_high=0.4), {"algorithm": {"clip_high": None}}).algorithm.clip_high == 0.28
    with pytest.raises(Refusal, match=r"algorithm\.name"):
        patched(run(name="rloo"), {"algorithm": {"name": "dr_grpo"}})
    with pytest.raises(Refusal, match="does not use overlong_buffer"):
        patched(spec, {"algorithm": {"overlong_buffer": 0.5}})


def test_a_pool_that_is_not_sized_holds_two_steps_whatever_their_size() -> None:
    assert BatchSpec().max_pool_episodes == 4096
    assert BatchSpec(tasks=4096, group_size=1024).max_pool_episodes == 2 * 4096 * 1024
    assert BatchSpec(rule="episodes", episodes=5000).max_pool_episodes == 10_000
    assert BatchSpec(tasks=MOST).max_pool_episodes == MOST
    assert BatchSpec(tasks=8, group_size=8, max_pool_episodes=64).max_pool_episodes == 64


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
