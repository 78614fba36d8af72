"""Reads an `instrument.toml`, merges it with what all instruments share (`factors.toml`, `metrics.toml`), and checks its
consistency.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.instruments.instrument import (
    ALGORITHM,
    COSTS,
    NO_INTERIM_FOR_TEAMS,
    OUTCOME_NAME,
    STUDY_MODEL,
    STUDY_STEPS,
    UNTIL,
    Factor,
    Instrument,
    Metric,
    Scalar,
    leaf_at,
    nested,
)
from researcher.instruments.levels import level_problem
from researcher.instruments.shares import share_problem, with_shares_marked
from swarm.protocol.algorithms import ALGORITHMS
from swarm.protocol.runspec import RunSpec, merge_patch

_SIZE = re.compile(r"(\d+(?:\.\d+)?)(m|b)(?![a-z0-9])", re.IGNORECASE)
_TARGETS = "run.<field>, roles.<role>.<field>, task.<name>, study.steps, study.model"


def instrument_of(declared: dict[str, Any]) -> Instrument:
    """Merge the declaration with the shared factors and metrics. Raises: ValidationError."""
    for what, merged in (("factors", _factors), ("metrics", _metrics)):
        own = declared.get(what, [])
        if isinstance(own, list) and all(isinstance(each, dict) for each in own):  # else validation reports it
            declared = declared | {what: merged(own, declared)}
    return with_shares_marked(Instrument.model_validate(declared))


def shared_factors() -> list[Factor]:
    """Return the factors of every run, unless an instrument overrides them."""
    return [Factor.model_validate(each) for each in _shared("factors").values()]


def shared_metrics() -> list[Metric]:
    """Return the metrics of every run, unless an instrument overrides them."""
    return [Metric.model_validate(each) for each in _shared("metrics").values()]


@cache
def _shared(what: str) -> dict[str, dict[str, Any]]:
    """Return the entries of `factors.toml` or `metrics.toml`, by name."""
    text = Path(__file__).with_name(f"{what}.toml").read_text(encoding="utf-8")
    found = {each["name"]: each for each in tomllib.loads(text)[what]}
    for each in found.values():
        if each.get("target") == ALGORITHM:
            each["choices"] = list(ALGORITHMS)
    return found


def _factors(own: list[dict[str, Any]], declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Merge the instrument's own factors into shared ones of the same name, field by field. A run setting in the declaration
    becomes the factor's default.
    """
    shared = dict[str, dict[str, Any]]()
    for name, each in _shared("factors").items():
        usual = leaf_at(declared.get("defaults"), each["target"].removeprefix("study.").split("."))
        if each["target"] != STUDY_MODEL:
            shared[name] = each | ({"default": usual} if isinstance(usual, Scalar) else {})
        elif declared.get("model") in each["choices"] and not declared.get("roles"):
            shared[name] = each | {"default": declared["model"]}
    names = {str(each.get("name")) for each in own}
    laid_over = [shared.get(str(each.get("name")), {}) | each for each in own]
    return [*laid_over, *(each for name, each in shared.items() if name not in names)]


def _metrics(own: list[dict[str, Any]], declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Merge the instrument's own metrics into shared ones of the same name, field by field, unless the kind differs.

    Topic words that the instrument gives to a metric are removed from the shared metrics.
    """
    taken = {
        str(alias).casefold() for each in own if isinstance(each.get("aliases"), list) for alias in each["aliases"]
    }
    shared = {
        name: each | {"aliases": [alias for alias in each["aliases"] if alias.casefold() not in taken]}
        for name, each in _shared("metrics").items()
    }
    laid_over = list[dict[str, Any]]()
    for each in own:
        base = shared.get(str(each.get("name")), {})
        laid_over.append(base | each if each.get("kind", base.get("kind")) == base.get("kind") else each)
    names, decides = {str(each.get("name")) for each in own}, leaf_at(declared.get("defaults"), ["metric"])
    further = (each | {"on_request": name != decides} for name, each in shared.items() if name not in names)
    return [*laid_over, *further]


# -- inconsistencies ----------------------------------------------------------------------------------------------------


def misfits(instrument: Instrument) -> Iterator[str]:
    """Yield `FIELD: problem` for each inconsistency in a declaration."""
    defaults = instrument.defaults
    yield from _shared_names("factors", instrument.factors)
    yield from _shared_names("metrics", instrument.metrics)
    metrics = [metric.name for metric in instrument.metrics]
    if defaults.metric not in metrics:
        yield f"defaults.metric: {defaults.metric!r} is not one of {', '.join(metrics)}"
    if instrument.reward is not None and instrument.reward[0] >= instrument.reward[1]:
        yield "reward: give the lowest reward first, then the highest"
    if instrument.roles and defaults.heldout_every:
        yield f"defaults.heldout_every: {NO_INTERIM_FOR_TEAMS}"
    if defaults.max_seeds < defaults.seeds:
        yield "defaults.max_seeds: must not be below defaults.seeds"
    for metric in instrument.metrics:
        yield from _metric_misfits(metric, instrument)
    wrong_runs = list(_run_misfits("defaults.run", defaults.run, {}))
    for name, role in instrument.roles.items() if not wrong_runs else ():
        wrong_runs += _run_misfits(f"roles.{name}.run", defaults.run, role.run)
    yield from wrong_runs
    for factor in instrument.factors:
        yield from _factor_misfits(factor, instrument)
        for target in factor.targets:
            if not (wrong_runs and target.startswith(("run.", "roles."))):
                yield from _target_misfits(factor, target, instrument)


def _shared_names(what: str, declared: Sequence[Factor] | Sequence[Metric]) -> Iterator[str]:
    """Yield a problem for each name that is declared twice, and each topic word with two meanings."""
    for name, count in Counter(each.name for each in declared).items():
        if count > 1:
            yield f"{what}: {name!r} is declared {count} times"
    owners: dict[str, str] = {}
    for each in declared:
        for alias in dict.fromkeys(alias.casefold() for alias in each.aliases):
            other = owners.setdefault(alias, each.name)
            if other != each.name:
                yield f"{what}.{each.name}.aliases: {alias!r} is already an alias of {other!r}"


def _metric_misfits(metric: Metric, instrument: Instrument) -> Iterator[str]:
    kind, stated = metric.kind, metric.model_fields_set
    outcome, until = kind == "outcome", kind in UNTIL
    staged = outcome or kind.startswith("heldout_")
    wrong = (
        (metric.margin <= 0, "margin: must be above 0"),
        (until and metric.threshold is None, f"threshold: {kind} needs one"),
        (
            (outcome or kind in COSTS) and "direction" not in stated,
            f'direction: {kind} needs one; "decrease" where less is better',
        ),
        (
            not until and metric.threshold is not None,
            f"threshold: {kind} has none; only {' and '.join(UNTIL)} do",
        ),
        (
            not staged and "when" in stated,
            f"when: {kind} has none; only heldout_accuracy, heldout_reward and outcome do",
        ),
        (staged and not outcome and metric.when == "training", f"when: {kind} takes before, after or gain"),
        (
            outcome and not re.fullmatch(OUTCOME_NAME, metric.reported_as),
            "source: must be a name in Outcome.metrics, with only letters, digits, _, - and .",
        ),
        (not outcome and metric.source is not None, f"source: {kind} has none; only outcome does"),
        (not outcome and metric.true, f"true: {kind} cannot be; only outcome can"),
        (metric.role is not None and metric.role not in instrument.roles, f"role: there is no role {metric.role!r}"),
    )
    yield from (f"metrics.{metric.name}.{problem}" for is_wrong, problem in wrong if is_wrong)


def _factor_misfits(factor: Factor, instrument: Instrument) -> Iterator[str]:
    if factor.share and (problem := share_problem(factor, instrument.defaults.run)):
        yield f"factors.{factor.name}.share: {problem}"
    room, _, name = factor.target.partition(".")
    passed = instrument.defaults.task.get(name, factor.default) if room == "task" else factor.default
    if factor.type == "choice" and not factor.choices:
        yield f"factors.{factor.name}.choices: a factor of type choice needs them"
    elif factor.proper and factor.type != "choice":
        yield f"factors.{factor.name}.proper: only a factor of type choice can have proper names"
    elif problem := level_problem(factor, factor.default):
        yield f"factors.{factor.name}.default: {problem}"
    elif passed != factor.default:
        yield f"factors.{factor.name}.default: it is {factor.default}, but defaults.task has {passed}; give both the same value"


def _target_misfits(factor: Factor, target: str, instrument: Instrument) -> Iterator[str]:
    """Yield a problem if the target does not exist. Run targets are checked by validating a RunSpec."""
    room, _, path = target.partition(".")
    role, _, field = path.partition(".")
    run = instrument.defaults.run
    if target == STUDY_MODEL:
        yield from _model_misfits(factor, instrument)
    elif room == "run" and path:
        yield from _run_misfits(f"factors.{factor.name}", run, nested(path, factor.default))
    elif room == "roles" and field and role in instrument.roles:
        run = merge_patch(run, instrument.roles[role].run)
        yield from _run_misfits(f"factors.{factor.name}", run, nested(field, factor.default))
    elif target != STUDY_STEPS and not (room == "task" and path):
        yield f"factors.{factor.name}.target: {target!r} is not one of {_TARGETS}"


def _model_misfits(factor: Factor, instrument: Instrument) -> Iterator[str]:
    named = [found[-1] for model in factor.choices if (found := _SIZE.findall(str(model)))]
    sizes = [float(number) * (1e6 if unit.lower() == "m" else 1e9) for number, unit in named]
    if factor.type != "choice" or len(factor.choices) < 2:
        yield f"factors.{factor.name}: models must be a choice of two or more, from the smallest to the largest"
    elif sizes != sorted(sizes):
        yield f"factors.{factor.name}.choices: list models from the smallest to the largest"
    elif factor.default != instrument.model:
        yield f"factors.{factor.name}.default: must be the instrument's model, {instrument.model}"
    if instrument.roles:
        yield f"factors.{factor.name}: the model of an instrument with roles cannot be varied"


def _run_misfits(what: str, run: Mapping[str, object], patch: Mapping[str, object]) -> Iterator[str]:
    try:
        RunSpec.model_validate(merge_patch(run, patch))
    except ValidationError as error:
        yield f"{what}: {'; '.join(str(problem) for problem in explain(error, RunSpec))}"
