"""AgentJet's settings as a RunSpec, and which of their keys a refusal names."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from swarm.engine.seam import EngineInfo
from swarm.protocol.errors import Refusal
from swarm.protocol.runspec import LoraSpec, RunSpec
from swarm.server.agentjet.config import run_spec

INFO = EngineInfo(
    backend="fake", device="cpu", model="Qwen2.5-0.5B@0123", fingerprint="f" * 64, max_model_len=20_000, dtype="float32"
)


def spec_of(**ajet: Any) -> RunSpec:
    return run_spec(yaml.safe_dump({"ajet": {"model": {"path": "Qwen/Qwen2___5-0.5B"}} | ajet}), INFO)


def test_a_job_that_sets_nothing_is_trained_by_their_defaults() -> None:
    spec = spec_of()
    assert (spec.model, spec.algorithm.name, spec.algorithm.kl, spec.algorithm.kl_in) == (None, "grpo", 0.002, "loss")
    assert (spec.batch.rule, spec.batch.tasks, spec.batch.group_size) == ("tasks", 32, 4)
    assert (spec.optimizer.learning_rate, spec.optimizer.weight_decay, spec.optimizer.max_grad_norm) == (1e-6, 0.01, 20)
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens) == (0.9, 1.0, 4096)
    assert (spec.parameters, spec.limits.steps, spec.checkpoint.every_steps) == ("full", None, 20)


def test_what_a_job_sets_is_what_is_trained() -> None:
    spec = spec_of(
        project_name="p",
        experiment_name="e",
        swarm_mode_sample_collection_method="rollout_until_finish_enough_episodes",
        data={"train_batch_size": 3},
        rollout={"num_repeat": 5, "temperature": 0.7, "top_p": 0.95, "max_response_length_in_one_turn": 100},
        lora={"lora_rank": 8, "lora_alpha": 16, "target_modules": "q_proj, v_proj"},
        trainer_common={
            "algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"},
            "use_kl_loss": False,
            "mini_batch_num": 2,
            "ppo_epochs": 3,
            "total_training_steps": 7,
            "save_freq": 4,
            "optim": {"lr": "1e-5", "lr_scheduler_type": "cosine", "lr_warmup_steps": 2},
        },
        unheard_of={"of": "this"},
    )
    assert (spec.batch.rule, spec.batch.episodes, spec.batch.group_size) == ("episodes", 15, 5)
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens) == (0.7, 0.95, 100)
    assert (spec.algorithm.name, spec.algorithm.baseline, spec.algorithm.kl) == ("reinforce_pp", "group", 0)
    assert isinstance(spec.parameters, LoraSpec)
    assert (spec.parameters.rank, spec.parameters.alpha, spec.parameters.targets) == (8, 16, ("q_proj", "v_proj"))
    assert (spec.optimizer.learning_rate, spec.optimizer.schedule, spec.optimizer.warmup) == (1e-5, "cosine", 2)
    assert (spec.optimizer.minibatches, spec.optimizer.epochs) == (2, 3)
    assert (spec.limits.steps, spec.checkpoint.every_steps) == (7, 4)
    method = "rollout_until_finish_enough_episodes"
    assert spec.labels == {"project": "p", "experiment": "e", "agentjet_method": method}


@pytest.mark.parametrize(("tasks", "repeat", "pool"), [(32, 4, 4096), (32, 3, 4095), (1000, 8, 16_000)])
@pytest.mark.parametrize("who", ["any_client", "all_clients"])
def test_the_pool_of_a_run_whose_batches_clients_close_is_bounded_as_any_other(
    who: str, tasks: int, repeat: int, pool: int
) -> None:
    method = f"rollout_until_{who}_agree_sync_weight"
    spec = spec_of(
        swarm_mode_sample_collection_method=method, data={"train_batch_size": tasks}, rollout={"num_repeat": repeat}
    )
    batch = spec.batch
    assert (batch.group_size, batch.max_pool_episodes, batch.tasks) == (repeat, pool, pool // repeat)


@pytest.mark.parametrize(
    ("ajet", "key"),
    [
        ({"model": {"path": "Qwen/Qwen3-4B"}}, "ajet.model.path"),
        ({"trainer_common": {"algorithm": {"adv_estimator": "remax"}}}, "ajet.trainer_common.algorithm.adv_estimator"),
        ({"trainer_common": {"use_kl_in_reward": True}}, "ajet.trainer_common.use_kl_in_reward"),
        ({"trainer_common": {"optim": {"lr": "fast"}}}, "ajet.trainer_common.optim.lr"),
        ({"trainer_common": {"optim": {"lr": -1}}}, "ajet.trainer_common.optim"),
        ({"rollout": {"num_repeat": "four"}}, "ajet.rollout.num_repeat"),
        ({"rollout": {"num_repeat": 1}}, "ajet.rollout.num_repeat"),
        ({"rollout": {"max_model_len": 40_000}}, "ajet.rollout.max_model_len"),
        ({"swarm_mode_sample_collection_method": "whenever"}, "ajet.swarm_mode_sample_collection_method"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_key(ajet: dict[str, Any], key: str) -> None:
    with pytest.raises(Refusal) as caught:
        spec_of(**ajet)
    assert key in caught.value.detail


def test_aliases_within_aliases_are_not_written_out() -> None:
    layers = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    text = "\n".join(["x:", "  a0: &a0 [lol]", *layers, "ajet: {rollout: {num_repeat: *a39}}"])
    with pytest.raises(Refusal, match=r"ajet\.rollout\.num_repeat: must be of type int, got list"):
        run_spec(text, INFO)


@pytest.mark.parametrize("text", ["", "- a", "ajet: 3", "ajet: {", "ajet: !!python/object:os.system {}"])
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="yaml_as_string"):
        run_spec(text, INFO)
