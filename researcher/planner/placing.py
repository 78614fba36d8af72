"""Which number of a topic is a level of which factor.

In this order: the factor right behind the number (`16 steps`), the factor before it (`a learning rate of 4e-5`), the list it
stands in (`than with 1e-5`, `8 or 16 rollouts`), the only factor near it that has none. What is left is not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor, Metric, Scalar
from researcher.planner.levels import Level, Placed, as_level, off_level
from researcher.planner.mentions import Mention
from researcher.planner.numerals import BRIDGES, LISTING, PLAIN, SEPARATORS, Numerals, factor_of
from researcher.planner.quantities import VERBS, settle_seeds_and_time, settle_sizes
from researcher.planner.switches import settle_default, settle_switches
from researcher.planner.wording import (
    ARTICLES,
    BETTER,
    SCALES,
    SWITCHED_OFF,
    WORSE,
    Token,
    names_training,
    phrase,
    words,
)
from researcher.refusals import PlanningRefused

_OPPOSING = words("than vs versus or against instead")
_SCENES = words("with at for in using by")
_QUESTIONS = words("which what find compare tune does do")
_GLUE = words(
    "of = : is are be was were at to set ( ) { } [ ] from between among in with using being value level equal like into for at by range say"
)
_LINKS = SEPARATORS | _GLUE | ARTICLES
_USING = words("use using with any")
_DENYING = words("not non never don't doesn't dont")
_TURNING = words("turn turned turning switch switched switching")
_IS = words("is are was were be")
_PRONOUNS = words("it that this there one")
_SUPPOSING = words("expect expecting think believe guess suppose predict hypothesise hypothesize bet")
KNOWN_WORDS = _LINKS | BRIDGES | PLAIN | _SUPPOSING


def place(found: Sequence[Token], named: Sequence[Mention], about: frozenset[str] = frozenset()) -> Placed:
    """Levels by number, by choice and by switch (`with and without`), seeds, and a time budget.

    about: keys of the words for what the instrument is about, which name no number.
    """
    return _Placing(found, named, about).run()


class _Placing(Numerals):
    """One topic's numbers, on their way to factors."""

    def __init__(self, found: Sequence[Token], named: Sequence[Mention], about: frozenset[str]) -> None:
        super().__init__(found, named, about)
        self.placed = Placed()
        self.levels: dict[int, Factor] = {}

    def run(self) -> Placed:
        settle_seeds_and_time(self, self.placed)
        settle_sizes(self, self.placed)
        for i in self.numbers + self.spelled:
            named = self.factor_at(i - 2) if self.key(i - 1) in ("of", "=") else None
            tied = named is not None and not (self.number_at(named.start - 1) and self.factor_at(i + 1) is not None)
            factor = self._before(i) if tied else self._behind(i) or self._before(i)
            if factor is not None:
                self.levels[i] = factor
        self._settle_lists()
        self._settle_leftovers()
        for i, factor in self.levels.items():
            self.placed.levels.append(Level(i, factor, as_level(factor, self.found[i].value)))
        for mention in self.named:
            if isinstance(mention.what, Factor) and mention.choice is not None:
                self.placed.levels.append(Level(mention.start, mention.what, self._chosen(mention, mention.choice)))
        for factor in {m.what.name: m.what for m in self.factors if isinstance(m.what, Factor)}.values():
            settle_switches(self.found, self.owner, self.placed, factor)
            settle_default(self.found, self.owner, self.placed, factor)
        return self.placed

    def _chosen(self, mention: Mention, choice: Scalar) -> Scalar:
        """`without LoRA`, `LoRA turned off`: the factor is off. Raises: PlanningRefused where it cannot be."""
        factor, j, end = factor_of(mention), mention.start - 1, mention.end
        while self.key(j) in ARTICLES | _USING:
            j -= 1
        denied = self.key(j) in SWITCHED_OFF | _DENYING or (self.key(j) == "off" and self.key(j - 1) in _TURNING)
        after = self.key(end + 1) if self.key(end) in _TURNING else self.key(end)
        if not denied and after not in ("off", "removed", "disabled"):
            return choice
        off = off_level(factor)
        if off is None or off == choice:
            raise PlanningRefused(
                f"the topic says what {factor.name} is not ({choice}); name the level that it is", [factor.name]
            )
        return off

    def _behind(self, i: int) -> Factor | None:
        """`16 steps`, `two-digit`, `16 samples of 4 prompts`; not `4e-5 group size 8`, where the name has a number of its own."""
        mention = self.factor_at(i + 1)
        if mention is None:
            return None
        scale = self.found[i].key in SCALES and mention.end - mention.start > 1
        own_number = self.found[mention.end].kind == "number" if mention.end < len(self.found) else False
        valued = self.key(mention.end) in ("of", "=", ":") and self.number_at(mention.end + 1)
        if scale or (valued and self.factor_at(mention.end + 2) is None):
            return None
        return None if own_number and self._before(i) else factor_of(mention)

    def _before(self, i: int, *, fitting: bool = True) -> Factor | None:
        """The factor that a chain of small words and other numbers leads back to, over more than bridges if it can take it."""
        bridged = True
        for j in range(i - 1, -1, -1):
            mention = self.owner.get(j)
            if mention is not None:
                fits = mention in self.factors and (bridged or not fitting or self._fits(factor_of(mention), i))
                return factor_of(mention) if fits else None
            token = self.found[j]
            if self._closed(j):
                return None
            bridged = bridged and token.key in BRIDGES
            if token.value is None and token.key not in _LINKS:
                return None
            if token.key in _SCENES and j > 0 and self.found[j - 1].kind == "number":
                return None  # `temperature 0.7 with 8 ...`: something else begins
        return None

    def _closed(self, j: int) -> bool:
        """`which A is best at B=8: 4 or 16?`: behind the colon stand levels of what is asked for, and none of B."""
        mention = self.factor_at(j - 1)
        valued = self.number_at(j - 1) or (mention is not None and self.number_at(mention.start - 1))
        return self.key(j) == ":" and valued and any(self.key(k) in ("which", "what") for k in range(j))

    def _settle_lists(self) -> None:
        """`than with 1e-5` follows the number before it; `8 or 16 rollouts` the one behind it."""
        for i in sorted({*self.numbers, *self.spelled} - set(self.levels), reverse=True):
            later = next((j for j in sorted(self.levels) if j > i), None)
            if later is not None and self._listed(range(i + 1, later)):
                self.levels[i] = self.levels[later]
        for i in sorted({*self.numbers, *self.spelled} - set(self.levels)):
            earlier = self._begun(i)
            if earlier is None:
                continue
            listed = all(self.key(j) in SEPARATORS for j in range(earlier + 1, i))
            if listed or (i in self.numbers and self._unnamed(i, self.levels[earlier])):
                self.levels[i] = self.levels[earlier] if listed else self._asked(i) or self.levels[earlier]

    def _listed(self, between: range) -> bool:
        """`8 or 16`, `with 32 than with 16`."""
        keys = [self.key(j) for j in between if (self.key(j - 1), self.key(j)) != ("instead", "of")]
        return all(key in LISTING for key in keys) or (
            all(key in LISTING | _SCENES | {"after"} for key in keys) and bool(set(keys) & _OPPOSING)
        )

    def _asked(self, i: int) -> Factor | None:
        """`Which rank learns two-digit sums fastest, 4 or 8?`: what was named before and has no level yet, if it can take the number."""
        bare = [factor_of(m) for m in self.factors if m.start < i and factor_of(m) not in self.levels.values()]
        return next((factor for factor in reversed(bare) if self._fits(factor, i) and self._unnamed(i, factor)), None)

    def _begun(self, i: int, *, fitting: bool = True) -> int | None:
        """The level before `i` whose list it may go on with: over `one-digit` and the like, which cannot take the number."""
        before = [j for j in sorted(self.levels, reverse=True) if j < i]
        for j in before:
            factor = self.levels[j]
            listed = all(self.key(k) in SEPARATORS for k in range(j + 1, i))
            if fitting and not listed and not self._fits(factor, i):
                continue
            between = [m.what for k in range(j, i) if (m := self.factor_at(k)) is not None]
            passed = [self.levels[k] for k in before if k > j]
            return j if all(other == factor or other in passed for other in between) else None
        return None

    def _settle_leftovers(self) -> None:
        """`Is 4e-5 a better learning rate`: the next factor that can take it, else the last one without a level."""
        for i in [*self.numbers, *filter(self._is_opposed, self.spelled)]:
            if i in self.levels:
                continue
            later = [m for m in self.factors if m.start > i][:1]
            earlier = [m for m in self.factors if m.start < i and factor_of(m) not in self.levels.values()][-1:]
            near = later + earlier if self._leads_to(i, later) else earlier
            fitting = [factor_of(m) for m in near if self._unnamed(i, factor_of(m)) and self._fits(factor_of(m), i)]
            if fitting:
                self.levels[i] = fitting[0]
                self._settle_lists()
            elif (again := self._said_again(i)) is not None:
                self.levels[i] = again
            elif (wrong := self._out_of_range(i)) is not None:
                self.levels[i] = wrong
            else:
                self.placed.unplaced.append(self.found[i])

    def _is_opposed(self, i: int) -> bool:
        """`two or eight`, `two instead of eight`: a number word that stands against another, and so counts what is compared."""
        j = i + 1
        while self.key(j) in LISTING | ARTICLES or (self.key(j - 1), self.key(j)) == ("instead", "of"):
            j += 1
        return j > i + 1 and j < len(self.found) and self.found[j].value is not None

    def _said_again(self, i: int) -> Factor | None:
        """`group size 4 vs 8. I expect 8 to be better`: the one factor with that level before, where no other name stands there."""
        before = {f.name: f for j, f in self.levels.items() if j < i and self.found[j].value == self.found[i].value}
        return factor if len(before) == 1 and self._unnamed(i, factor := next(iter(before.values()))) else None

    def _leads_to(self, i: int, later: Sequence[Mention]) -> bool:
        """`4e-5 a better learning rate`; not `16 or 32, for each rank` or `16 or 32, and which rank`: those names have a place
        of their own."""
        j = i + 1
        compared = self.key(i - 1) in ("compare", "comparing")
        while self.key(j) in LISTING or self.number_at(j) or (compared and self._is_with_number(j)):
            j += 1
        return not any(
            self.key(k) in _SCENES | _QUESTIONS | {",", "on", "over"} for m in later for k in range(j, m.start)
        )

    def _is_with_number(self, j: int) -> bool:
        """`compare 1e-5 with 4e-5`."""
        return self.key(j) == "with" and self.number_at(j + 1)

    def _out_of_range(self, i: int) -> Factor | None:
        """The factor that the number would be a level of, if it could take it: the plan is refused with its range."""
        earlier = self._begun(i, fitting=False)
        factor = self._before(i, fitting=False) or (self.levels[earlier] if earlier is not None else None)
        return factor if factor is None or self._unnamed(i, factor) else None

    def _unnamed(self, i: int, factor: Factor) -> bool:
        """Whether no other name stands before the number: `dropout of 0.1` is no level of anything known."""
        if self.key(i - 1) in (":", "?", "."):
            return True
        own = {key for name in (factor.name, *factor.aliases) for key in phrase(name)}
        j = i - 1
        while self.key(j) in BRIDGES:
            j -= 1
        if self.key(j) in ("?", "."):
            return True
        if self.key(j) in _IS and j > 0 and j - 1 not in self.owner and self.found[j - 1].kind == "word":
            j -= 1  # `when dropout is 16` has its own name, one word further off
        if self.key(i - 1) in ("(", "[") and self._has_no_levels(j):
            return True
        return (
            j < 0
            or self.key(j) in PLAIN | _SUPPOSING | BETTER | WORSE | own | _PRONOUNS
            or self.found[j].value is not None
        )

    def _has_no_levels(self, j: int) -> bool:
        """What a number in brackets does not belong to: what is measured, chosen, done or asked about, as in `on sums (4 vs 8)`."""
        mention, key = self.owner.get(j), self.key(j)
        if mention is not None:
            return isinstance(mention.what, Metric) or mention.choice is not None
        return key in self.about | VERBS or names_training(key)

    def _fits(self, factor: Factor, i: int) -> bool:
        number = factor.type in ("int", "float")
        return number and level_problem(factor, as_level(factor, self.found[i].value)) is None
