"""The run that a server works on: its row, its specs by config version, its client versions, and the checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import orjson
from pydantic import ValidationError

from foundation import strict_json
from foundation.nearest import nearest
from foundation.strict import FieldError, explain
from swarm.engine.seam import EngineInfo
from swarm.protocol.problem import invalid_spec
from swarm.protocol.runspec import AS_STORED, TUNABLE, LoraSpec, RunSpec, merge_patch
from swarm.server.state.batching import groups_needed
from swarm.server.state.rows import ConfigRow, EpisodeRow, HeldOutRow, RunRow, VersionRow

EVALUATED_ENOUGH = 0.9
"""A step counts as evaluated if it has at least this share of the eval episodes of the best-covered step: fewer could be a lucky
subset of the tasks."""
MOST_DEPTH = 64
"""Maximum nesting depth of a field in a patch; no field needs that much."""
_FIXED = ("name", "loss", "sources")
"""Fields of a run's algorithm that no patch may change."""
WINDOW = 64
"""Number of episodes compared on either side of a version change: few enough that the policy has hardly changed."""

VersionKey = tuple[str | None, str]
"""(mix, client_version). Families have different rewards, so we do not compare them with each other."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The server's newest run."""

    row: RunRow
    configs: list[ConfigRow]
    specs: dict[int, RunSpec] = field(default_factory=dict)
    """Specs by config version."""
    step: int = 0
    """The newest completed step."""
    tokens: int = 0
    """Number of tokens sampled by closed episodes."""

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
        """The newest step that has a checkpoint; 0 if there is none."""
        return self.row.checkpoints[-1] if self.row.checkpoints else 0

    @property
    def oldest_kept_step(self) -> int:
        """The step from which a replay may have to start: that of the oldest kept checkpoint, or 0 for the hosted model."""
        kept = self.row.checkpoints[-self.spec.checkpoint.keep :]
        return kept[0] if len(kept) == self.spec.checkpoint.keep else 0

    def limit_reached(self, now: float) -> str | None:
        """Say which limit of the spec was reached; None if none was."""
        limits = self.spec.limits
        if limits.steps is not None and self.step >= limits.steps:
            return f"reached its limit of {limits.steps} steps"
        if limits.wall_s is not None and now >= self.row.started_at + limits.wall_s:
            return f"reached its limit of {limits.wall_s:g} s"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return f"reached its limit of {limits.tokens} sampled tokens"
        return None


def refused_now(run: Run) -> str | None:
    """Say why this version refuses the run's spec, which an older version accepted; None if it accepts the spec."""
    try:
        RunSpec.model_validate(run.configs[-1].spec)
    except ValidationError as error:
        faults = "; ".join(str(fault) for fault in explain(error, RunSpec))
        return f"this version refuses the spec of run {run.run_id}, which an older version accepted; stop the run or patch it: {faults}"
    return None


def judge_spec(spec: RunSpec, info: EngineInfo, *, allow_algorithms: bool = False) -> None:
    """Refuse a spec that this server cannot run. With `allow_algorithms`, the server executes a run's own functions.

    Codes: invalid_spec{errors}.
    """
    errors = own_code_faults(spec, info, allowed=allow_algorithms)
    if spec.model is not None and not info.is_named(spec.model):
        errors.append(
            FieldError(
                field="model", problem=f"this server hosts {info.model!r}; leave the field out to use that model"
            )
        )
    if spec.max_model_len is not None and spec.max_model_len > info.max_model_len:
        problem = f"the engine was started with at most {info.max_model_len} tokens"
        errors.append(FieldError(field="max_model_len", problem=problem))
    targets = spec.parameters.targets if isinstance(spec.parameters, LoraSpec) and info.layers else ()
    if wrong := [target for target in targets if target not in info.layers]:
        problem = (
            f"the model has no linear layer {', '.join(map(repr, wrong))}; it has {', '.join(sorted(info.layers))}"
        )
        errors.append(FieldError(field="parameters.targets", problem=problem, nearest=nearest(wrong[0], info.layers)))
    if spec.sampling.train == "exact" and not info.masks:
        problem = (
            f"the {info.backend} engine cannot reproduce how a grammar or top-p restricts sampling; use policy or off"
        )
        errors.append(FieldError(field="sampling.train", problem=problem))
    needed = groups_needed(spec.batch) * spec.batch.group_size
    if needed > spec.batch.max_pool_episodes:
        problem = f"must hold at least one batch, which is {needed} episodes"
        errors.append(FieldError(field="batch.max_pool_episodes", problem=problem))
    if errors:
        raise invalid_spec(errors)


def own_code_faults(spec: RunSpec, info: EngineInfo, *, allowed: bool) -> list[FieldError]:
    """Return an error for each user function in the spec; none if this server executes such functions."""
    if info.own_functions and allowed:
        return []
    problem = "this server does not execute users' functions; start it with `swarm serve --allow-algorithms`"
    if not info.own_functions:
        problem = (
            f"the {info.backend} engine does not support users' functions; serve with --engine local --allow-algorithms"
        )
    return [FieldError(field=f"algorithm.{field}", problem=problem) for field in spec.algorithm.own_functions]


def settled(spec: RunSpec, info: EngineInfo) -> RunSpec:
    """Return the spec with the engine's choice for each field that it leaves open."""
    return spec.computed_in(info.dtype).trained_as("exact" if info.masks else "policy")


def patched(spec: RunSpec, patch: Mapping[str, Any]) -> RunSpec:
    """Apply a merge patch to the spec's tunable fields, and return the new spec. Codes: invalid_spec{errors}."""
    errors = [_not_tunable(name) for name in patch if name not in TUNABLE]
    errors += [
        FieldError(field=name, problem=problem)
        for name, value in patch.items()
        if name in TUNABLE and (problem := _not_stored(value))
    ]
    if errors:
        raise invalid_spec(errors)
    stated = spec.model_dump(mode="json")
    if not spec.batch.states_partial_min:  # it follows the group size, even if that is patched
        del stated["batch"]["partial_min"]
    merged = merge_patch(stated, dict(patch))
    try:
        changed = RunSpec.model_validate(merged)
    except ValidationError as error:
        raise invalid_spec(explain(error, RunSpec)) from error
    fixed = [name for name in _FIXED if getattr(changed.algorithm, name) != getattr(spec.algorithm, name)]
    if fixed:
        raise invalid_spec([_not_tunable(f"algorithm.{name}") for name in fixed])
    return changed


def _not_stored(value: Any) -> str | None:
    """Return why this part of a patch cannot be stored; None if it can."""
    if strict_json.is_deeper(value, MOST_DEPTH):
        return "is nested too deeply"
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        return f"cannot be stored: {error}; write a large number with a point or an exponent"
    return None


def _not_tunable(name: str) -> FieldError:
    if name.split(".")[0] in RunSpec.model_fields:
        return FieldError(field=name, problem="cannot be changed during a run")
    return FieldError(field=name, problem="unknown field", nearest=nearest(name, TUNABLE))


# -- client versions --------------------------------------------------------------------------------------------------


class Versions:
    """The client versions of one run, in the order of their first groups."""

    def __init__(self, rows: Iterable[VersionRow] = ()) -> None:
        self._rows: dict[VersionKey, VersionRow] = {(row.mix, row.client_version): row for row in rows}

    @property
    def rows(self) -> list[VersionRow]:
        return list(self._rows.values())

    def knows(self, key: VersionKey) -> bool:
        return key in self._rows

    def begin(self, run_id: str, key: VersionKey, at: float) -> VersionRow:
        """Add a version that opens its first group, and return the row to write."""
        mix, client_version = key
        row = VersionRow(run_id=run_id, mix=mix, client_version=client_version, first_at=at)
        self._rows[key] = row
        return row

    def rewarded(self, episode: EpisodeRow, at: float) -> VersionRow:
        """Count an ended train episode, and return the row to write."""
        assert episode.reward is not None
        key = (episode.mix, episode.client_version)
        row = self._rows.get(key) or self.begin(episode.run_id, key, at)
        if not row.ended:
            self._compare_with_newest(row)
        row.ended += 1
        row.last_at = at
        row.reward_sum += episode.reward
        row.square_sum += episode.reward * episode.reward
        if len(row.opening) < WINDOW:
            row.opening.append(episode.reward)
        row.recent = [*row.recent[1 - WINDOW :], episode.reward]
        return row

    def _compare_with_newest(self, row: VersionRow) -> None:
        others = [other for other in self._rows.values() if other.mix == row.mix and other.ended]
        if others:
            newest = max(others, key=lambda other: other.last_at)
            row.before, row.baseline = newest.client_version, newest.recent


def shift(row: VersionRow) -> float | None:
    """Return how much the mean reward changed with this version; None if there was no earlier version."""
    return fmean(row.opening) - fmean(row.baseline) if row.opening and row.baseline else None


def shifts(rows: Iterable[VersionRow]) -> dict[VersionKey, float | None]:
    return {(row.mix, row.client_version): shift(row) for row in rows}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def best_of(kept: Sequence[int], evaluated: Sequence[HeldOutRow]) -> HeldOutRow | None:
    """Return the kept step with the highest mean reward over its eval episodes, the newest if several are equal; None without evals."""
    steps = [row for row in evaluated if row.step in kept]
    most = max((row.episodes for row in steps), default=0)
    enough = [row for row in steps if row.episodes >= EVALUATED_ENOUGH * most]
    return max(enough, key=lambda row: (row.reward, row.step), default=None)


def kept_steps(made: Sequence[int], keep: int, best: int | None) -> list[int]:
    """Return the steps of the checkpoints to keep: the newest `keep` of those made, and the best."""
    ordered = sorted(set(made))
    return [step for step in ordered if step in ordered[-keep:] or step == best]
