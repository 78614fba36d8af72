"""The numbers of one topic and the names around them, as far as it can be said before any number has its place."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.instruments.instrument import Factor
from researcher.planner.mentions import Mention
from researcher.planner.wording import LESS, MORE, SCALES, Token, key_at, words

SEPARATORS = words(
    ", / ; - or and vs versus v than to through against compared & nor over beat underperform dominate overtake either both only -> => > < >= <="
)
LISTING = words(", / ; - or nor and vs versus v to & than against rather instead -> => > < >= <=")
BRIDGES = words("of = : ( { [ a an the to")
PLAIN = (
    SEPARATORS
    | MORE
    | LESS
    | words(
        "is are was were test testing need require doe do will can should would could compare use using try choose prefer if when whether with from "
        "between at beat than as after first then afterward thereafter value setting sampling relative : level one instead rather outperform exceed by better worse faster slower "
        "matter differ change relative while which what among best baseline control reference treatment equivalent equal identical "
        "similar comparable match"
    )
)
"""What may stand before a number that bears no name of its own."""


class Numerals:
    """Tokens, and which name each belongs to.

    about: keys of the words for what the instrument is about, which name no number. numbers, spelled: tokens that are no part of a
    name, in digits and in words.
    """

    def __init__(self, found: Sequence[Token], named: Sequence[Mention], about: frozenset[str]) -> None:
        self.found = found
        self.about = about
        self.factors = [m for m in named if isinstance(m.what, Factor) and m.choice is None]
        self.owner = {i: m for m in named for i in range(m.start, m.end)}
        self.named = named
        inside = set(self.owner)
        self.numbers = [i for i, t in enumerate(found) if t.kind == "number" and i not in inside]
        self.spelled = [
            i
            for i, t in enumerate(found)
            if t.kind == "word" and t.value is not None and i not in inside and not self._is_word_only(i)
        ]

    def key(self, i: int) -> str:
        return key_at(self.found, i)

    def factor_at(self, i: int) -> Mention | None:
        mention = self.owner.get(i)
        return mention if mention in self.factors else None

    def number_at(self, i: int) -> bool:
        return 0 <= i < len(self.found) and self.found[i].kind == "number"

    def back(self, i: int, over: frozenset[str], *, numbers: bool = False) -> int:
        """The token before `i` that is none of `over`, and with `numbers` no number."""
        j = i - 1
        while j >= 0 and j not in self.owner and (self.key(j) in over or (numbers and self.number_at(j))):
            j -= 1
        return j

    def _is_word_only(self, i: int) -> bool:
        """`a group size of 16 beats one of 4`, `does it double the reward`, `two group sizes, 4 and 8`: they are no levels."""
        if self.found[i].key in SCALES:
            return self.factor_at(i + 1) is None
        if (mention := self.factor_at(i + 1)) is not None and self._counts_levels(i, mention):
            return True
        return self.found[i].key == "one" and self.key(i + 1) in ("of", "with", "without", "at", "?", "that", "where")

    def _counts_levels(self, i: int, mention: Mention) -> bool:
        """`two algorithms`, `two group sizes, 4 and 8`."""
        j, many = mention.end, 0
        while self.number_at(j) or self.key(j) in LISTING | {":", "(", "of"}:
            many += self.number_at(j)
            j += 1
        return factor_of(mention).type == "choice" or many == self.found[i].value


def factor_of(mention: Mention) -> Factor:
    if not isinstance(mention.what, Factor):
        raise TypeError(f"{mention.what.name} is no factor")
    return mention.what
