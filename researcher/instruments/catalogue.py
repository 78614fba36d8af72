"""Instruments on this machine: found, read from `instrument.toml`, validated, hashed.

Looks in `studies/` of the clone and in the folders of `RESEARCHER_STUDIES`; a folder may also be given directly. What any run
can vary and what is measured of it is declared once, in `factors.toml` and `metrics.toml`: every instrument has these beside its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from foundation.nearest import MOST_NAMES, a_few, nearest
from foundation.paths import shipped, visible_files
from foundation.strict import explain
from researcher.instruments.dotted import leaf_at, nested
from researcher.instruments.instrument import (
    COSTS,
    OUTCOME_NAME,
    STUDY_MODEL,
    STUDY_STEPS,
    UNTIL,
    Factor,
    Instrument,
    Metric,
    Scalar,
)
from researcher.instruments.shares import share_problem, with_shares_marked
from researcher.refusals import PlanningRefused
from swarm.protocol.runspec import RunSpec, merge_patch

DECLARATION, OLD_DECLARATION = "instrument.toml", "study.toml"
"""The file that makes a folder an instrument, and the name that it had when nothing else was called a study."""
OWN_STUDIES = shipped("studies")

_UNITS = {"m": 1e6, "million": 1e6, "b": 1e9, "billion": 1e9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(m|b)(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class InstrumentFolder:
    """An instrument as it lies on this machine. code: SHA-256 over the files of its folder."""

    instrument: Instrument
    path: Path
    code: str


def available(environ: Mapping[str, str] | None = None) -> list[InstrumentFolder]:
    """Every instrument, by name.

    Raises: PlanningRefused when a declaration is wrong, two instruments have one name, or a folder of RESEARCHER_STUDIES is not there.
    """
    paths = dict.fromkeys(path.resolve() for root in _roots(environ) for path in _declared(root))
    found = [read_instrument(path) for path in paths]
    twice = [name for name, count in Counter(each.instrument.name for each in found).items() if count > 1]
    if twice:
        places = ", ".join(str(each.path) for each in found if each.instrument.name == twice[0])
        raise PlanningRefused(f"two instruments are called {twice[0]!r} ({places}); rename one in its {DECLARATION}")
    return sorted(found, key=lambda each: each.instrument.name)


def open_instrument(name: str, environ: Mapping[str, str] | None = None) -> InstrumentFolder:
    """By name, or by folder.

    Raises: PlanningRefused with the nearest names.
    """
    if declaration_in(Path(name)) is not None:
        return read_instrument(Path(name))
    if os.sep in name:
        raise PlanningRefused(f"no instrument in {name!r}: the folder holds no {DECLARATION}")
    known = available(environ)
    for each in known:
        if each.instrument.name == name:
            return each
    names = [each.instrument.name for each in known]
    guess = nearest(name, names)
    hint = f"did you mean {guess!r}?" if guess else _listed(a_few(name, names), names)
    raise PlanningRefused(f"no instrument is called {name!r}; {hint}", [guess] if guess else a_few(name, names))


def as_frozen(folder: InstrumentFolder, code: str) -> InstrumentFolder:
    """The folder under the digest that a plan has of it, where it had that one before and only its declaration has changed since."""
    return replace(folder, code=code) if code in folder.instrument.earlier else folder


def read_instrument(path: Path) -> InstrumentFolder:
    """Read and check one folder.

    Raises: PlanningRefused naming the file and each bad field, misspelt ones with the nearest name.
    """
    file = declaration_in(path) or path / DECLARATION
    try:
        instrument = Instrument.model_validate(_with_shared(tomllib.loads(file.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningRefused(f"{file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise PlanningRefused(f"{file} is not valid TOML: {error}") from error
    except ValidationError as error:
        problems = [str(problem) for problem in explain(error, Instrument)]
        raise PlanningRefused(f"{file}: {'; '.join(problems)}", problems) from error
    instrument = with_shares_marked(instrument)
    problems = [*_inconsistencies(instrument), *_wrong_targets(instrument)]
    if not (path / instrument.workflow).is_file():
        problems.append(f"workflow: there is no file {instrument.workflow!r} in the folder")
    if instrument.requirements is not None and not (path / instrument.requirements).is_file():
        problems.append(f"requirements: there is no file {instrument.requirements!r} in the folder")
    if problems:
        raise PlanningRefused(f"{file}: {'; '.join(problems)}", problems)
    return InstrumentFolder(instrument, path.resolve(), folder_digest(path))


def declaration_in(folder: Path) -> Path | None:
    """The file that declares the folder's instrument; None where it is none.

    Raises: PlanningRefused when there are two.
    """
    found = [folder / name for name in (DECLARATION, OLD_DECLARATION) if (folder / name).is_file()]
    if len(found) > 1:
        raise PlanningRefused(
            f"{folder} holds {DECLARATION} and {OLD_DECLARATION}, an instrument's old and new declaration; keep one of them"
        )
    return found[0] if found else None


def folder_digest(path: Path) -> str:
    """SHA-256 over names and contents of the folder's files."""
    digest = hashlib.sha256()
    for name, file in visible_files(path):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def level_problem(factor: Factor, level: Scalar) -> str | None:
    """Why a factor cannot take this level, in words; None when it can."""
    if factor.type in ("choice", "bool"):
        allowed = [*map(str, factor.choices)] if factor.type == "choice" else ["on", "off"]
        if level in (factor.choices or (False, True)):
            return None
        more = len(allowed) - MOST_NAMES
        shown = allowed if more <= 0 else a_few(str(level), allowed)
        return f"{factor.name} is one of {', '.join(shown)}{f' and {more} more' if more > 0 else ''}, not {level}"
    if factor.type in ("text", "data"):
        return f"{factor.name} is a text, not {level}" if not isinstance(level, str) else None
    if isinstance(level, bool | str) or not math.isfinite(level):
        return f"{factor.name} takes numbers, not {level}"
    if factor.type == "int" and level != int(level):
        return f"{factor.name} takes whole numbers, not {level:g}"
    if factor.share and not 0 < level < 1:
        return f"{factor.name} is a share, above 0 and below 1, not {level:g}"
    if (factor.low is not None and level < factor.low) or (factor.high is not None and level > factor.high):
        return f"{factor.name} goes from {_bound(factor.low)} to {_bound(factor.high)}; {level:g} lies outside"
    return None


def _listed(shown: Sequence[str], names: Sequence[str]) -> str:
    more = len(names) - len(shown)
    return f"there are {', '.join(shown) or 'none'}{f' and {more} more' if more else ''} (`researcher instruments`)"


def size_of(model: str) -> float | None:
    """Parameters of a model, as its name says (`name-135m`); None where it says nothing."""
    found = _SIZE.findall(model)
    return parameters(*found[-1]) if found else None


def parameters(number: str, unit: str) -> float:
    """`135`, `M`."""
    return float(number) * _UNITS[unit.lower()]


def _with_shared(declared: dict[str, Any]) -> dict[str, Any]:
    """A declaration with what all instruments share behind its own factors and metrics.

    What is no list of named tables is left for validation.
    """
    for what, merged in (("factors", _with_shared_factors), ("metrics", _with_shared_metrics)):
        own = declared.get(what, [])
        if isinstance(own, list) and all(isinstance(each, dict) for each in own):
            declared = declared | {what: merged(own, declared)}
    return declared


def _with_shared_factors(own: list[dict[str, Any]], declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One of the same name changes the fields that it gives; a default of the declaration's runs is the factor's."""
    shared = {
        each["name"]: each | _default_of(each["target"], declared)
        for each in _shared("factors")
        if each["target"] != STUDY_MODEL or (declared.get("model") in each["choices"] and not declared.get("roles"))
    }
    names = {each.get("name") for each in own}
    laid_over = [shared.get(each.get("name"), {}) | each for each in own]
    return [*laid_over, *(each for name, each in shared.items() if name not in names)]


def _with_shared_metrics(own: list[dict[str, Any]], declared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One of the same name changes the fields that it gives; one of another kind stands alone. Words that an instrument gives to
    a metric are no longer those of a shared one."""
    shared = {each["name"]: each for each in _shared("metrics")}
    taken = {alias.casefold() for each in own for alias in _texts(each.get("aliases"))}
    for name, each in shared.items():
        shared[name] = each | {"aliases": [alias for alias in each["aliases"] if alias.casefold() not in taken]}
    names = {each.get("name") for each in own}
    named = declared.get("defaults", {}).get("metric") if isinstance(declared.get("defaults"), dict) else None
    laid_over = [
        base | each if each.get("kind", base.get("kind")) == base.get("kind") else each
        for each in own
        for base in [shared.get(each.get("name"), {})]
    ]
    further = [each | {"on_request": name != named} for name, each in shared.items() if name not in names]
    return [*laid_over, *further]


def _texts(given: object) -> list[str]:
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else []


def shared_factors() -> list[Factor]:
    """What any run can vary, as it is where an instrument says nothing of it."""
    return [Factor.model_validate(each) for each in _shared("factors")]


def shared_metrics() -> list[Metric]:
    """What is measured of any run, as it is where an instrument says nothing of it."""
    return [Metric.model_validate(each) for each in _shared("metrics")]


@cache
def _shared(what: str) -> list[dict[str, Any]]:
    """What is in `factors.toml` or `metrics.toml`."""
    return list(tomllib.loads(Path(__file__).with_name(f"{what}.toml").read_text(encoding="utf-8"))[what])


def _default_of(target: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """`{"default": …}` where the declaration's defaults say it."""
    if target == STUDY_MODEL:
        return {"default": declared.get("model")}
    value = leaf_at(declared.get("defaults"), target.removeprefix("study.").split("."))
    return {"default": value} if isinstance(value, Scalar) else {}


def _roots(environ: Mapping[str, str] | None) -> list[Path]:
    env = os.environ if environ is None else environ
    further = [Path(part).expanduser() for part in env.get("RESEARCHER_STUDIES", "").split(os.pathsep) if part]
    for root in further:
        if not root.is_dir():
            raise PlanningRefused(f"RESEARCHER_STUDIES names {root}, which is no folder")
    return [OWN_STUDIES, *further]


def _declared(root: Path) -> Iterable[Path]:
    if declaration_in(root) is not None:
        return [root]
    return sorted(folder for folder in root.glob("*") if declaration_in(folder) is not None)


def _inconsistencies(instrument: Instrument) -> Iterable[str]:
    for what, names in (
        ("factors", [factor.name for factor in instrument.factors]),
        ("metrics", [metric.name for metric in instrument.metrics]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{what}: {name!r} is declared {count} times"
    yield from _shared_aliases("factors", instrument.factors)
    yield from _shared_aliases("metrics", instrument.metrics)
    metrics = [metric.name for metric in instrument.metrics]
    if instrument.defaults.metric not in metrics:
        yield f"defaults.metric: {instrument.defaults.metric!r} is none of {', '.join(metrics)}"
    if instrument.defaults.max_seeds < instrument.defaults.seeds:
        yield "defaults.max_seeds: must not be below defaults.seeds"
    for metric in instrument.metrics:
        yield from _wrong_metric(metric)
    for factor in instrument.factors:
        if factor.share and (wrong := share_problem(factor, instrument.defaults.run)):
            yield f"factors.{factor.name}.share: {wrong}"
        if factor.type == "choice" and not factor.choices:
            yield f"factors.{factor.name}.choices: a choice needs them"
        elif factor.proper and factor.type != "choice":
            yield f"factors.{factor.name}.proper: only a choice has names of its own"
        elif problem := level_problem(factor, factor.default):
            yield f"factors.{factor.name}.default: {problem}"
        elif (passed := _passed(factor, instrument.defaults.task)) != factor.default:
            yield f"factors.{factor.name}.default: it is {factor.default}, but defaults.task has {passed}; write the same in both"


def _shared_aliases(what: str, named: Sequence[Factor] | Sequence[Metric]) -> Iterable[str]:
    """Words of a topic that would mean two things."""
    owners: dict[str, str] = {}
    for each in named:
        for alias in dict.fromkeys(alias.casefold() for alias in each.aliases):
            other = owners.setdefault(alias, each.name)
            if other != each.name:
                yield f"{what}.{each.name}.aliases: {alias!r} is one of {other!r} already"


def _wrong_metric(metric: Metric) -> Iterable[str]:
    if metric.margin <= 0:
        yield f"metrics.{metric.name}.margin: must be above 0"
    if metric.kind in UNTIL and metric.threshold is None:
        yield f"metrics.{metric.name}.threshold: {metric.kind} needs one"
    if metric.kind in COSTS and "direction" not in metric.model_fields_set:
        yield f'metrics.{metric.name}.direction: {metric.kind} needs one; "decrease" where less is better'
    if metric.kind not in UNTIL and metric.threshold is not None:
        yield f"metrics.{metric.name}.threshold: {metric.kind} has none; only {' and '.join(UNTIL)} do"
    if not (metric.kind.startswith("heldout_") or metric.kind == "outcome") and "when" in metric.model_fields_set:
        yield f"metrics.{metric.name}.when: {metric.kind} has none; only heldout_accuracy, heldout_reward and outcome do"
    elif metric.kind != "outcome" and metric.when == "training":
        yield f"metrics.{metric.name}.when: {metric.kind} takes before, after or gain"
    yield from _wrong_outcome(metric)


def _wrong_outcome(metric: Metric) -> Iterable[str]:
    if metric.kind == "outcome":
        if not re.fullmatch(OUTCOME_NAME, metric.reported_as):
            yield f"metrics.{metric.name}.source: must be a name in Outcome.metrics: only letters, digits, _, - and ."
        if "direction" not in metric.model_fields_set:
            yield f'metrics.{metric.name}.direction: outcome needs one; "decrease" where less is better'
        return
    if metric.source is not None:
        yield f"metrics.{metric.name}.source: {metric.kind} has none; only outcome does"
    if metric.true:
        yield f"metrics.{metric.name}.true: {metric.kind} cannot be; only outcome can"


def _passed(factor: Factor, task: Mapping[str, Scalar]) -> Scalar:
    """What `tasks` gets where a plan does not vary the factor; its default where the instrument's defaults do not say."""
    room, _, name = factor.target.partition(".")
    return task.get(name, factor.default) if room == "task" else factor.default


def _wrong_targets(instrument: Instrument) -> Iterable[str]:
    """Targets that nothing answers to. A run target is tried on a RunSpec, once the runs without it are right."""
    wrong_runs = list(_wrong_runs(instrument))
    yield from wrong_runs
    for factor in instrument.factors:
        for target in factor.targets:
            if not (wrong_runs and target.startswith(("run.", "roles."))):
                yield from _wrong_target(factor, target, instrument)
    for metric in instrument.metrics:
        if metric.role is not None and metric.role not in instrument.roles:
            yield f"metrics.{metric.name}.role: there is no role {metric.role!r}"


def _wrong_runs(instrument: Instrument) -> Iterable[str]:
    """What is wrong with the runs that the instrument declares: its own first, which those of its roles are laid over."""
    own = list(_wrong_run("defaults.run", instrument.defaults.run, {}))
    yield from own
    for name, further in instrument.roles.items() if not own else ():
        yield from _wrong_run(f"roles.{name}.run", instrument.defaults.run, further.run)


def _wrong_target(factor: Factor, target: str, instrument: Instrument) -> Iterable[str]:
    room, _, path = target.partition(".")
    role, _, field = path.partition(".")
    if target == STUDY_STEPS or (room == "task" and path):
        return
    if target == STUDY_MODEL:
        yield from _wrong_models(factor, instrument)
    elif room == "run" and path:
        yield from _wrong_run(f"factors.{factor.name}", instrument.defaults.run, nested(path, factor.default))
    elif room == "roles" and field and role in instrument.roles:
        run = merge_patch(instrument.defaults.run, instrument.roles[role].run)
        yield from _wrong_run(f"factors.{factor.name}", run, nested(field, factor.default))
    else:
        kinds = "run.<field>, roles.<role>.<field>, task.<name>, study.steps, study.model"
        yield f"factors.{factor.name}.target: {target!r} is none of {kinds}"


def _wrong_models(factor: Factor, instrument: Instrument) -> Iterable[str]:
    if factor.type != "choice" or len(factor.choices) < 2:
        yield f"factors.{factor.name}: models are a choice of two or more, from the smallest to the largest"
    elif (sizes := _sizes(factor)) != sorted(sizes):
        yield f"factors.{factor.name}.choices: models stand from the smallest to the largest"
    elif factor.default != instrument.model:
        yield f"factors.{factor.name}.default: it is the instrument's model, {instrument.model}"
    if instrument.roles:
        yield f"factors.{factor.name}: the model of an instrument with roles cannot be varied"


def _sizes(factor: Factor) -> list[float]:
    return [size for model in factor.choices if (size := size_of(str(model))) is not None]


def _wrong_run(what: str, run: Mapping[str, object], patch: Mapping[str, object]) -> Iterable[str]:
    try:
        RunSpec.model_validate(merge_patch(run, patch))
    except ValidationError as error:
        yield f"{what}: {'; '.join(str(problem) for problem in explain(error, RunSpec))}"


def _bound(value: float | None) -> str:
    return "anything" if value is None else f"{value:g}"
