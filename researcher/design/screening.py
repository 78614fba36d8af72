"""The runs of a screen: a two-level design in which no main effect is mixed with another main effect.

It may be mixed with interactions of two factors (resolution III): a screen explores, and a comparison confirms.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache


@lru_cache(maxsize=8)
def screen_runs(factors: int) -> list[tuple[int, ...]]:
    """Signs by run, -1 for a factor's first level; the first run has the first level of every factor.

    The design with the fewest runs: a fractional factorial of resolution IV, else of III, else Plackett and Burman's, which takes 12
    runs for 8 to 11 factors where a fractional factorial takes 16.
    """
    # Here and not above: importing pydoe takes more than a second, and only a screen needs it.
    from pydoe import fracfact_by_res, pbdesign

    designs = [fracfact_by_res(factors, resolution) for resolution in (4, 3)]
    with suppress(ValueError):  # there is none of 28 runs
        designs.append(pbdesign(factors))
    design = min(designs, key=len)
    design = design * -design[0]  # turning a factor round keeps the columns at right angles
    return [tuple(int(sign) for sign in run) for run in design]
