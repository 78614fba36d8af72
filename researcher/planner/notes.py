"""What a topic leaves open and how that was filled, in words: a plan's assumptions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from researcher.instruments.instrument import Factor, Metric, Scalar
from researcher.planner.levels import Placed, level_text, off_level, on_level
from researcher.planner.mentions import Mention, words_before, words_over
from researcher.planner.wording import SWITCHED_OFF, Token, words

_NOT = words("not non isn't never")
_PRESENT = words("with using under given")


@dataclass(slots=True)
class Notes:
    """Lines, each once, in the order in which they were added."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def add_unread(self, left: Sequence[str]) -> None:
        """left: words that were not understood."""
        if left:
            self.add(f"These words of the topic play no part in the plan: {', '.join(left)}.")


def better(metric: Metric) -> str:
    """Which way a metric is better, as a word."""
    return "more" if metric.direction == "increase" else "less"


def settings_of(
    found: Sequence[Token], varied: Collection[Factor], named: Sequence[Mention], placed: Placed, notes: Notes
) -> tuple[tuple[Factor, Scalar], ...]:
    """Levels of the other factors: the same for all arms. `LoRA` says nothing more where its rank or alpha is named."""
    result: list[tuple[Factor, Scalar]] = []
    factors = {m.what.name: m.what for m in named if isinstance(m.what, Factor)}.values()
    for other in factors:
        if other in varied or any(part.target.startswith(f"{other.target}.") for part in factors):
            continue
        levels = placed.of(other)
        if levels:
            result.append((other, levels[0].value))
            if _on_one_side(found, levels[0].at, varied, placed):
                notes.add(f"{other.name}={level_text(levels[0].value)} is named on one side, and set in all arms.")
        elif other.type == "bool" and other.default is False and not _denied(found, other, named):
            result.append((other, True))
            notes.add(f"{other.name} is named without a level: it is on in all arms.")
        elif other.default == off_level(other) and _present(found, other, named):
            level = on_level(other)
            result.append((other, level))
            notes.add(f"{other.name} is named without a level: it is {level_text(level)} in all arms.")
        else:
            notes.add(f"{other.name} is named without a level: it stays at its default, {level_text(other.default)}.")
    return tuple(result)


def _on_one_side(found: Sequence[Token], at: int, varied: Collection[Factor], placed: Placed) -> bool:
    """`A=1 and B=3 beats A=2`, `A=1 beats A=2 and B=3`: tied by `and` to a level of one side."""
    own = sorted(level.at for factor in varied for level in placed.of(factor) if level.at >= 0)
    before = [i for i in own if i < at]
    between = [token.key for token in found[before[-1] + 1 : at]] if before else []
    return len(own) > 1 and "and" in between and not {",", "?", ".", ";", "with", "at"} & set(between)


def _present(found: Sequence[Token], factor: Factor, named: Sequence[Mention]) -> bool:
    """`with a KL penalty`, `with a warm-up and KL`: it is to be there, though its default is not."""
    return any(is_present(found, m.start) for m in named if m.what == factor)


def is_present(found: Sequence[Token], at: int) -> bool:
    """Whether what begins there is said to be there."""
    near = words_over(found, at)
    return bool(near & _PRESENT) and not near & SWITCHED_OFF


def _denied(found: Sequence[Token], factor: Factor, named: Sequence[Mention]) -> bool:
    """`without slippery ice`, `a lake that is not slippery`."""
    own = [m for m in named if m.what == factor]
    return any(words_before(found, m) & (SWITCHED_OFF | _NOT) for m in own)
