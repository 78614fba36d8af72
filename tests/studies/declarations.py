"""What every instrument's `instrument.toml` must keep: read by the planner's loader, defaults that agree with its factors."""

from __future__ import annotations

import inspect
from pathlib import Path

from foundation.strict import StrictModel
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.instruments.instrument import Factor, Metric
from swarm.client.workflow import Workflow, load_workflow
from swarm.protocol.runspec import LoraSpec, RunSpec, merge_patch

STUDIES = Path(__file__).parents[2] / "studies"


def declared(name: str) -> tuple[InstrumentFolder, Workflow]:
    """The instrument, by the loaders that a study uses."""
    folder = read_instrument(STUDIES / name)
    return folder, load_workflow(folder.path, folder.instrument.workflow)


def assert_declaration_fits_the_code(name: str) -> None:
    """Defaults of factors are those of a trial, task factors are parameters of `tasks`, no alias stands twice."""
    folder, workflow = declared(name)
    instrument = folder.instrument
    spec = RunSpec.model_validate(instrument.defaults.run)
    parameters = set(inspect.signature(workflow.tasks).parameters) - {"split", "seed", "count"}
    assert set(instrument.defaults.task) <= parameters
    known: dict[str, object] = {
        "steps": instrument.defaults.steps,
        "model": instrument.model,
        **instrument.defaults.task,
    }
    for factor in instrument.factors:
        room, _, path = factor.target.partition(".")
        if room == "run":
            assert at(spec, path) in (None, factor.default), factor.name
        elif room == "roles":
            role, _, field = path.partition(".")
            run = merge_patch(instrument.defaults.run, instrument.roles[role].run)
            assert at(RunSpec.model_validate(run), field) == factor.default, factor.name
        else:
            assert known[path] == factor.default, factor.name
    named: list[Factor | Metric] = [*instrument.factors, *instrument.metrics]
    aliases = [alias for thing in named for alias in thing.aliases]
    assert len(aliases) == len(set(aliases))


def at(spec: object, path: str) -> object:
    """The value at a dotted path through models and dicts; adapters' fields as they would be."""
    for part in path.split("."):
        spec = LoraSpec() if spec == "full" else spec
        spec = getattr(spec, part) if isinstance(spec, StrictModel) else spec[part]  # type: ignore[index]
    return spec
