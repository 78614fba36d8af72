"""Everything that running the `repeat` instrument on an echo server takes, for tests of the executor and above."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from researcher.analysis.metrics import finals
from researcher.executor.blueprint import Setup
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Instrument, Metric
from researcher.study.plan import Plan
from tests.fakes.example_plan import example_plan

FOLDER = Path(__file__).resolve().parents[1] / "instruments" / "repeat"
CODE_VERSION = "0" * 64


def repeat_instrument() -> Instrument:
    return Instrument.model_validate(tomllib.loads((FOLDER / "instrument.toml").read_text()))


def repeat_setup(studies: Path, folder: Path = FOLDER, *others: InstrumentFolder) -> Setup:
    return Setup(
        instrument=repeat_instrument(),
        instrument_dir=folder,
        code_version=CODE_VERSION,
        finals=finals,
        studies=studies,
        others={each.instrument.name: each for each in others},
    )


def repeat_plan(**changes: Any) -> Plan:
    """Two arms, four steps, a handful of held-out words."""
    metrics: tuple[Metric, ...] = repeat_instrument().metrics
    return example_plan(**{"metrics": metrics, "steps": 4, "heldout_tasks": 8, **changes})
