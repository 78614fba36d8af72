"""The rules: a secret number in a range, a few guesses, and after each a hint. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Game:
    """One secret, `low <= secret <= high`. Every turn counts, also one without a number."""

    low: int
    high: int
    secret: int
    turns: int
    used: int = 0
    guesses: list[int] = field(default_factory=list)
    """Numbers that were named, in their order."""

    @property
    def solved(self) -> bool:
        return bool(self.guesses) and self.guesses[-1] == self.secret

    @property
    def over(self) -> bool:
        return self.solved or self.used >= self.turns

    def guess(self, number: int | None) -> str:
        """One turn, and the hint for it. None: the turn named no number."""
        self.used += 1
        if number is None:
            return f"That is no guess. Call guess with a whole number from {self.low} to {self.high}."
        self.guesses.append(number)
        if number == self.secret:
            return "Correct!"
        left = self.turns - self.used
        return f"{'Higher' if number < self.secret else 'Lower'}. Guesses left: {left}"
