"""A topic's clauses: no number of one goes to a factor that another names, so that `A, 1 or 2, and which B, 3 or 4` keeps both apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor
from researcher.planner.levels import LIMITS, Placed
from researcher.planner.mentions import Mention, is_given
from researcher.planner.placing import place
from researcher.planner.switches import settle_lone_off
from researcher.planner.wording import Token, words
from researcher.refusals import PlanningRefused

_MARKS = words("? . ;")
_ASKING = words("which what find tune compare choose pick select determine")
_VERBS = words("is are doe does do can should would")
_JOINTS = words("and or but before , ? . ;")
_TAKEN_UP = (("best", "one"), ("with", "it"))
"""Before a verb these begin a question of its own: `and with it, is 4 or 8 …`."""


def place_by_clause(
    found: Sequence[Token], named: Sequence[Mention], parts: Sequence[range], about: frozenset[str]
) -> Placed:
    """As `place`, clause by clause where that leaves no number over; else part by part, or all at once where there are none.

    Raises: PlanningRefused where two parts ask for different seeds, budgets or thresholds.
    """
    starts = {part.start for part in parts} | {i for i in range(1, len(found)) if _begins(found, i)}
    apart = _placed(found, named, cut(found, named, starts), about)
    if apart.unplaced or any(level_problem(level.factor, level.value) for level in apart.levels):
        apart = _placed(found, named, parts or [range(len(found))], about)
    settle_lone_off(found, named, apart)
    return apart


def cut(found: Sequence[Token], named: Sequence[Mention], starts: Iterable[int]) -> list[range]:
    """Tokens, cut at `starts`: a piece that names no factor belongs to the one before, the first one to that after it."""
    factors = [m for m in named if isinstance(m.what, Factor) and not is_given(m.what)]
    edges = sorted({0, *starts})
    pieces: list[range] = []
    for start, stop in zip(edges, [*edges[1:], len(found)], strict=True):
        nothing = not any(m.start in range(start, stop) for m in factors)
        before = pieces[-1] if pieces else None
        if before is not None and (nothing or not any(m.start in before for m in factors)):
            pieces[-1] = range(before.start, stop)
        else:
            pieces.append(range(start, stop))
    return pieces


def _begins(found: Sequence[Token], i: int) -> bool:
    key, before = found[i].key, found[i - 1].key
    joined = before in _JOINTS or tuple(token.key for token in found[max(0, i - 2) : i]) in _TAKEN_UP
    return key in _ASKING or before in _MARKS or (key in _VERBS and joined)


def _placed(found: Sequence[Token], named: Sequence[Mention], pieces: Sequence[range], about: frozenset[str]) -> Placed:
    whole = Placed()
    for piece in pieces:
        own = [replace(m, start=m.start - piece.start, end=m.end - piece.start) for m in named if m.start in piece]
        placed = place(found[piece.start : piece.stop], own, about)
        whole.levels += [replace(level, at=level.at + piece.start) for level in placed.levels]
        whole.effects += placed.effects
        whole.shifts += placed.shifts
        whole.unplaced += placed.unplaced
        for name in (*LIMITS, "threshold"):
            before, now = getattr(whole, name), getattr(placed, name)
            if None not in (before, now) and before != now:
                raise PlanningRefused(
                    f"the parts of the topic ask for different {name}, {before:g} and {now:g}; give one for both"
                )
            setattr(whole, name, before if now is None else now)
    return whole
