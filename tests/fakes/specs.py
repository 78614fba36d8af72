"""Plans for tests: a spec's fields, and the plan that the design step makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from researcher.design.planning import plan_of
from researcher.design.pricing import Pace
from researcher.instruments.catalogue import InstrumentFolder, open_instrument, read_instrument
from researcher.study.plan import ALPHA, Plan
from researcher.study.spec import StudySpec


def spec(instrument: str = "arithmetic", **fields: Any) -> StudySpec:
    """A spec. fields: as in a study file; by default two learning rates are compared, and the higher is claimed to be better."""
    differing = {"compare", "arms"} & fields.keys() or isinstance(fields.get("model"), list)
    usual = (
        {} if differing else {"compare": {"learning_rate": {"baseline": 1e-5, "levels": [4e-5]}}, "claim": "increase"}
    )
    return StudySpec.model_validate({"question": "Is it better?", "instrument": instrument, **usual, **fields})


def planned(
    folder: InstrumentFolder | Path | str = "arithmetic",
    *,
    servers: int = 1,
    paces: Sequence[Pace] = (),
    alpha: float = ALPHA,
    heldout_from: int = 0,
    heldout_tasks: int | None = None,
    **fields: Any,
) -> Plan:
    """The plan of a spec on an instrument: a folder that was read, its path, or a name."""
    found = open_instrument(folder) if isinstance(folder, str) else folder
    found = read_instrument(found) if isinstance(found, Path) else found
    return plan_of(
        spec(found.instrument.name, **fields),
        found,
        servers=servers,
        paces=paces,
        alpha=alpha,
        heldout_from=heldout_from,
        heldout_tasks=heldout_tasks,
    )
