"""Translates an AgentJet job's configuration into a `RunSpec`. An error names each setting that this server cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from foundation.strict import FieldError, explain
from swarm.engine.seam import EngineInfo
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.errors import Refusal
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import BatchSpec, RunSpec

T = TypeVar("T", bool, int, float, str)

RULES = {
    "rollout_until_finish_enough_tasks": "tasks",
    "rollout_until_finish_enough_non_dummy_tasks": "informative_tasks",
    "rollout_until_finish_enough_episodes": "episodes",
}
"""Maps AgentJet's method of collecting samples to our batch rule."""
CLOSED_BY_CLIENTS = ("rollout_until_any_client_agree_sync_weight", "rollout_until_all_clients_agree_sync_weight")
"""Methods with which clients close a batch: it holds whatever was collected when they agreed; see `agreed`."""
METHOD_LABEL = "agentjet_method"
"""The run label that names the collection method."""
GROUP_PATIENCE_S = 600.0
"""Seconds that a group waits for its episodes here. AgentJet's own groups wait without limit."""
_A_DAY_S = 86_400.0
_METHOD = "swarm_mode_sample_collection_method"
_LEARNER = "trainer_common"
_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "gae": {"name": "ppo"},
    "reinforce_plus_plus": {"name": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {"name": "reinforce_pp", "baseline": "group"},
    **{name: {"name": name} for name in ALGORITHMS},
}
_KL_IN_REWARD = 0.001
_OURS = {
    "algorithm": f"{_LEARNER}.algorithm.adv_estimator",
    "optimizer": f"{_LEARNER}.optim",
    "batch": "rollout.num_repeat, data.train_batch_size",
    "sampling": "rollout",
    "parameters": "lora",
    "limits": f"{_LEARNER}.total_training_steps",
    "checkpoint": f"{_LEARNER}.save_freq",
}
"""Maps each part of our spec to the AgentJet settings that fill it."""


def run_spec(text: str, info: EngineInfo) -> RunSpec:
    """Build the spec from a job's YAML. The YAML is complete, as AgentJet's client sends it, or has only the non-default settings.

    Raises: Refusal(invalid_spec) that names AgentJet's key.
    """
    job = _Job(text)
    _require_model(job, info)
    method = job.text(_METHOD, "rollout_until_finish_enough_tasks")
    if method not in (*RULES, *CLOSED_BY_CLIENTS):
        raise _unfit(_METHOD, f"unknown method {method!r}; use one of {', '.join((*RULES, *CLOSED_BY_CLIENTS))}")
    longest = job.whole("rollout.max_model_len", info.max_model_len)
    if longest > info.max_model_len:
        more = f"is {longest}, but this server was started with {info.max_model_len}: ask for less, or raise its --max-model-len"
        raise _unfit("rollout.max_model_len", more)
    spec = {
        "algorithm": _algorithm(job),
        "optimizer": _optimizer(job),
        "parameters": _parameters(job),
        "batch": _batch(job, method),
        "sampling": {
            "temperature": job.number("rollout.temperature", 0.9),
            "top_p": job.number("rollout.top_p", 1.0),
            "top_k": job.whole("rollout.top_k", -1),
            "max_tokens": job.whole("rollout.max_response_length_in_one_turn", 4096),
        },
        "limits": {"steps": job.whole_or_none(f"{_LEARNER}.total_training_steps")},
        "checkpoint": {"every_steps": job.whole(f"{_LEARNER}.save_freq", 20)},
        "labels": {name: job.text(f"{name}_name", "") for name in ("project", "experiment")} | {METHOD_LABEL: method},
    }
    try:
        found = RunSpec.model_validate(spec)
        return _never_closed(found) if method in CLOSED_BY_CLIENTS else found
    except ValidationError as error:
        faults = explain(error, RunSpec)
        stated = {str(fault.field).partition(".")[0] for fault in faults}
        theirs = ", ".join(f"ajet.{_OURS[name]}" for name in sorted(stated) if name in _OURS)
        detail = "; ".join(map(str, faults))
        raise invalid_spec(faults, f"{detail} (from {theirs or 'the whole job'})") from error


def all_the_pool_holds(batch: BatchSpec) -> int:
    """Return the number of groups that fit in the pool. If clients close a run's batches, it asks for this many until they agree."""
    return batch.max_pool_episodes // batch.group_size


def _never_closed(spec: RunSpec) -> RunSpec:
    """Return the spec with batches as large as its pool (in whole groups), so that no batch is complete before the pool is full."""
    groups = all_the_pool_holds(spec.batch)
    batch = {"tasks": groups, "max_pool_episodes": groups * spec.batch.group_size}
    return spec.model_copy(update={"batch": spec.batch.model_copy(update=batch)})


def _require_model(job: _Job, info: EngineInfo) -> None:
    """Refuse any model but the hosted one. AgentJet's names have `___` for a dot and may begin with a path. Raises: Refusal."""
    path = job.text("model.path", "")
    hosted = info.model.partition("@")[0]
    last = path.rstrip("/").rpartition("/")[2].replace("___", ".")
    if path and not info.is_named(path) and last.lower() != hosted.rpartition("/")[2].lower():
        raise _unfit("model.path", f"{path[:200]!r} is not hosted here: this server trains {hosted!r}")


def _batch(job: _Job, method: str) -> dict[str, Any]:
    tasks, repeat = job.whole("data.train_batch_size", 32), job.whole("rollout.num_repeat", 4)
    if method in CLOSED_BY_CLIENTS:
        return {"tasks": tasks, "group_size": repeat, "group_patience_s": _A_DAY_S}
    batch: dict[str, Any] = {"rule": RULES[method], "group_size": repeat, "group_patience_s": GROUP_PATIENCE_S}
    return batch | ({"episodes": tasks * repeat} if batch["rule"] == "episodes" else {"tasks": tasks})


def _algorithm(job: _Job) -> dict[str, Any]:
    key = f"{_LEARNER}.algorithm.adv_estimator"
    name = job.text(key, "grpo")
    if name not in _ALGORITHMS:
        raise _unfit(key, f"unknown algorithm {name!r}; use one of {', '.join(_ALGORITHMS)}")
    found = dict(_ALGORITHMS[name])
    in_loss, in_reward = job.flag(f"{_LEARNER}.use_kl_loss", True), job.flag(f"{_LEARNER}.use_kl_in_reward", False)
    if in_loss and in_reward:
        raise _unfit(
            f"{_LEARNER}.use_kl_in_reward",
            "and use_kl_loss are both on, but a run has one KL penalty: turn one of them off",
        )
    if in_loss:
        return found | {"kl": job.number(f"{_LEARNER}.kl_loss_coef", 0.002), "kl_in": "loss"}
    return found | {"kl": _KL_IN_REWARD if in_reward else 0.0}


def _optimizer(job: _Job) -> dict[str, Any]:
    optim = f"{_LEARNER}.optim"
    return {
        "learning_rate": job.number(f"{optim}.lr", 1e-6),
        "weight_decay": job.number(f"{optim}.weight_decay", 0.01),
        "max_grad_norm": job.number(f"{optim}.grad_clip", 20.0),
        "schedule": job.text(f"{optim}.lr_scheduler_type", "constant"),
        "warmup": max(0, job.whole(f"{optim}.lr_warmup_steps", -1)),
        "minibatches": job.whole(f"{_LEARNER}.mini_batch_num", 1),
        "epochs": job.whole(f"{_LEARNER}.ppo_epochs", 1),
    }


def _parameters(job: _Job) -> Any:
    rank = job.whole("lora.lora_rank", 0)
    if not rank:
        return "full"
    adapters: dict[str, Any] = {"rank": rank, "alpha": job.number("lora.lora_alpha", 16)}
    targets = job.value("lora.target_modules")
    if isinstance(targets, list):
        adapters["targets"] = targets
    elif isinstance(targets, str) and targets != "all-linear":
        adapters["targets"] = [each.strip() for each in targets.split(",")]
    return adapters


class _Job:
    """The `ajet` settings of a job. Settings that are missing or null take their defaults. Raises: Refusal(invalid_spec)."""

    def __init__(self, text: str) -> None:
        try:
            whole = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise invalid_spec([], f"yaml_as_string is not plain YAML: {str(error)[:300]}") from error
        tree = whole.get("ajet") if isinstance(whole, dict) else None
        if not isinstance(tree, dict):
            raise invalid_spec(
                [], "yaml_as_string has no settings under `ajet`: send the whole configuration of an AgentJet job"
            )
        self._tree: dict[str, Any] = tree

    def value(self, key: str) -> Any:
        found: Any = self._tree
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def text(self, key: str, default: str) -> str:
        return self._of(key, str, default)

    def flag(self, key: str, default: bool) -> bool:
        return self._of(key, bool, default)

    def whole(self, key: str, default: int) -> int:
        return self._of(key, int, default)

    def whole_or_none(self, key: str) -> int | None:
        return None if self.value(key) is None else self.whole(key, 0)

    def number(self, key: str, default: float) -> float:
        found = self.value(key)
        try:
            return default if found is None or isinstance(found, bool) else float(found)  # YAML reads 1e-6 as a string
        except (TypeError, ValueError) as error:
            raise _unfit(key, f"must be a number, got {_shown(found)}") from error

    def _of(self, key: str, kind: type[T], default: T) -> T:
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise _unfit(key, f"must be of type {kind.__name__}, got {_shown(found)}")
        return found


def _shown(found: object) -> str:
    """Format a value for an error message. Show only the type of a list or mapping: YAML aliases can make a small text huge."""
    return (
        repr(found[:80])
        if isinstance(found, str)
        else repr(found)
        if isinstance(found, bool | int | float)
        else type(found).__name__
    )


def _unfit(key: str, problem: str) -> Refusal:
    fault = FieldError(field=f"ajet.{key}", problem=problem)
    return invalid_spec([fault])
