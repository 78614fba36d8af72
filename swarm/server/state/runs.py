"""The run that a server works on: its row, its spec by config version, and how a spec is judged and changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from foundation import strict_json
from foundation.nearest import nearest
from foundation.strict import FieldError, explain
from swarm.engine.seam import EngineInfo
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import AS_STORED, TUNABLE, RunSpec, merge_patch
from swarm.server.state.batches import groups_needed
from swarm.server.state.rows import ConfigRow, RunRow

MOST_DEPTH = 64
"""Objects and lists within each other in a field of a patch: no field has so many."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The newest run of the server."""

    row: RunRow
    configs: list[ConfigRow]
    specs: dict[int, RunSpec] = field(default_factory=dict)
    """By config version."""
    step: int = 0
    """The newest step that is done."""
    tokens: int = 0
    """Sampled by closed episodes."""

    def __post_init__(self) -> None:
        for config in self.configs:
            self.specs.setdefault(config.config_version, RunSpec.model_validate(config.spec, context=AS_STORED))

    @property
    def run_id(self) -> str:
        return self.row.run_id

    @property
    def config_version(self) -> int:
        return self.configs[-1].config_version

    @property
    def spec(self) -> RunSpec:
        return self.specs[self.config_version]

    @property
    def kept_step(self) -> int:
        """The newest step that a checkpoint holds."""
        return self.row.checkpoints[-1] if self.row.checkpoints else 0

    @property
    def oldest_kept_step(self) -> int:
        """Where a replay may have to begin: the oldest checkpoint that is kept, or the hosted model."""
        kept = self.row.checkpoints[-self.spec.checkpoint.keep :]
        return kept[0] if len(kept) == self.spec.checkpoint.keep else 0

    def limit_reached(self, now: float) -> str | None:
        """Which limit of the spec ends the run, in words; None when none does."""
        limits = self.spec.limits
        if limits.steps is not None and self.step >= limits.steps:
            return f"reached its limit of {limits.steps} steps"
        if limits.wall_s is not None and now >= self.row.started_at + limits.wall_s:
            return f"reached its limit of {limits.wall_s:g} s"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return f"reached its limit of {limits.tokens} sampled tokens"
        return None


def refused_now(run: Run) -> str | None:
    """Why a run with this spec could not be started any more, where an older version took it; None when it could."""
    try:
        RunSpec.model_validate(run.configs[-1].spec)
    except ValidationError as error:
        faults = "; ".join(str(fault) for fault in explain(error, RunSpec))
        return f"an older version took the spec of run {run.run_id}, which is refused now; it can be stopped, or patched: {faults}"
    return None


def judge(spec: RunSpec, info: EngineInfo) -> None:
    """Refuse a spec that this server cannot carry out. Codes: invalid_spec{errors}."""
    errors: list[FieldError] = []
    if spec.model is not None and not info.is_named(spec.model):
        errors.append(FieldError(field="model", problem=f"this server hosts {info.model!r}; leave it out to use that"))
    if spec.max_model_len is not None and spec.max_model_len > info.max_model_len:
        problem = f"the engine was started with at most {info.max_model_len} tokens"
        errors.append(FieldError(field="max_model_len", problem=problem))
    needed = groups_needed(spec.batch) * spec.batch.group_size
    if needed > spec.batch.max_pool_episodes:
        problem = f"must hold at least one batch, which is {needed} episodes"
        errors.append(FieldError(field="batch.max_pool_episodes", problem=problem))
    if errors:
        raise invalid_spec(errors)


def patched(spec: RunSpec, patch: Mapping[str, Any]) -> RunSpec:
    """The spec after a merge patch of its tunable fields. Codes: invalid_spec{errors}."""
    errors = [
        _not_tunable(name) if name not in TUNABLE else FieldError(field=name, problem="is nested too deeply")
        for name, value in patch.items()
        if name not in TUNABLE or strict_json.is_deeper(value, MOST_DEPTH)
    ]
    if errors:
        raise invalid_spec(errors)
    stated = spec.model_dump(mode="json")
    if not spec.batch.states_partial_min:  # follows the size of groups, also a new one
        del stated["batch"]["partial_min"]
    merged = merge_patch(stated, dict(patch))
    try:
        changed = RunSpec.model_validate(merged)
    except ValidationError as error:
        raise invalid_spec(explain(error, RunSpec)) from error
    if changed.algorithm.name != spec.algorithm.name:
        raise invalid_spec([_not_tunable("algorithm.name")])
    return changed


def _not_tunable(name: str) -> FieldError:
    if name.split(".")[0] in RunSpec.model_fields:
        return FieldError(field=name, problem="cannot be changed while a run goes on")
    return FieldError(field=name, problem="unknown field", nearest=nearest(name, TUNABLE))
