"""Which number of a topic is a level of which factor.

In this order: the factor right behind the number (`16 steps`), the factor before it (`a learning rate of 4e-5`), the list it
stands in (`than with 1e-5`, `8 or 16 rollouts`), the only factor near it that has none. What is left is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from researcher.models import Factor, Metric, Scalar
from researcher.planner.instruments import level_problem
from researcher.planner.levels import Level, Placed, as_level, off_level
from researcher.planner.mentions import Mention
from researcher.planner.refusals import PlanningRefused
from researcher.planner.switches import settle_default, settle_switches
from researcher.planner.wording import (
    ARTICLES,
    BETTER,
    LESS,
    MORE,
    SCALES,
    SWITCHED_OFF,
    WORSE,
    Token,
    key_at,
    names_training,
    phrase,
    words,
)

SEPARATORS = words(
    ", / ; - or and vs versus v than to through against compared & nor over beat underperform dominate overtake either both only -> => > < >= <="
)
_LISTING = words(", / ; - or nor and vs versus v to & than against rather instead -> => > < >= <=")
_OPPOSING = words("than vs versus or against instead")
_SCENES = words("with at for in using by")
_QUESTIONS = words("which what find compare tune does do")
_GLUE = words(
    "of = : is are be was were at to set ( ) { } [ ] from between among in with using being value level equal like into for at by range say"
)
_LINKS = SEPARATORS | _GLUE | ARTICLES
_BRIDGES = words("of = : ( { [ a an the to")
_PLAIN = (
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
_USING = words("use using with any")
_DENYING = words("not non never don't doesn't dont")
_TURNING = words("turn turned turning switch switched switching")
_IS = words("is are was were be")
_PRONOUNS = words("it that this there one")
_SUPPOSING = words("expect expecting think believe guess suppose predict hypothesise hypothesize bet")
KNOWN_WORDS = _LINKS | _BRIDGES | _PLAIN | _SUPPOSING
_HOURS = {
    "second": 1.0,
    "sec": 1.0,
    "minute": 60.0,
    "min": 60.0,
    "hour": 3600.0,
    "hr": 3600.0,
    "h": 3600.0,
    "day": 86_400.0,
}
_BOUNDS = {"minimum": "min_seeds", "maximum": "max_seeds"}
SHORT_TIME = re.compile(r"(?:\d+(?:h|min|m|s|d))+$")
_GLUED = re.compile(r"\d+(?!(?:st|nd|rd|th)$)[^\W\d_]+$")
"""A number with a unit that is not known: `40u`; not `2nd`, `4x4`."""
_SHORT_UNITS = {"h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "d": 86_400.0}
_WITHIN = words("in within under budget for spend spending")
_SIZES = words("at least most about around roughly more less than over up to another")
"""Between `by` and the size of a change."""
_REPLACED = words("replace replaced replacing beaten outperformed surpassed exceeded followed")
_POINTS = words("point percentage pp")
_REACHED = words("reach reaching reached hit hitting attain attaining threshold exceed surpass")
_SURPASSING = words("exceed surpass")
_VERBS = words(
    "give beat need doe learn get help hurt yield take lead make reach train work win improve increase raise reduce lower "
    "perform score end matter result outperform cost use require speed slow accelerate boost harm degrade impair produce provide cause bring leave keep change affect alter move this"
)
"""What may follow a level and ends in s."""
_COUNTED = words("number digit")
"""Of what an instrument is about these are counted: `3 numbers`, and not `4 vs 8 sums`."""


def place(found: Sequence[Token], named: Sequence[Mention], about: frozenset[str] = frozenset()) -> Placed:
    """Levels by number, by choice and by switch (`with and without`), seeds, and a time budget.

    about: keys of the words for what the instrument is about, which name no number.
    """
    return _Placing(found, named, about).run()


class _Placing:
    """One topic's numbers, on their way to factors."""

    def __init__(self, found: Sequence[Token], named: Sequence[Mention], about: frozenset[str]) -> None:
        self.found = found
        self.about = about
        self.factors = [m for m in named if isinstance(m.what, Factor) and m.choice is None]
        self.owner = {i: m for m in named for i in range(m.start, m.end)}
        self.placed = Placed()
        self.levels: dict[int, Factor] = {}
        self.named = named
        inside = set(self.owner)
        self.numbers = [i for i, t in enumerate(found) if t.kind == "number" and i not in inside]
        self.spelled = [
            i
            for i, t in enumerate(found)
            if t.kind == "word" and t.value is not None and i not in inside and not self._is_word_only(i)
        ]

    def run(self) -> Placed:
        self._settle_seeds_and_time()
        self._settle_sizes()
        for i in self.numbers + self.spelled:
            named = self._factor_at(i - 2) if self._key(i - 1) in ("of", "=") else None
            tied = named is not None and not (self._number_at(named.start - 1) and self._factor_at(i + 1) is not None)
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
        factor, j, end = _factor(mention), mention.start - 1, mention.end
        while self._key(j) in ARTICLES | _USING:
            j -= 1
        denied = self._key(j) in SWITCHED_OFF | _DENYING or (self._key(j) == "off" and self._key(j - 1) in _TURNING)
        after = self._key(end + 1) if self._key(end) in _TURNING else self._key(end)
        if not denied and after not in ("off", "removed", "disabled"):
            return choice
        off = off_level(factor)
        if off is None or off == choice:
            raise PlanningRefused(
                f"the topic says what {factor.name} is not ({choice}); name the level that it is", [factor.name]
            )
        return off

    def _settle_seeds_and_time(self) -> None:
        for i in [*self.numbers, *self.spelled]:
            value, following = self.found[i].value or 0.0, self._key(i + 1)
            if following == "random" and self._key(i + 2) == "seed":
                following = "seed"
            limits = (
                self._is_last(i)
                or self._key(i + 2) == "budget"
                or any(self._key(j) in _WITHIN for j in (i - 1, i - 2, i - 3))
            )
            behind = self._key(i - 2) if self._key(i - 1) in ("=", ":") else self._key(i - 1)
            if following == "seed" or (behind == "seed" and i in self.numbers and not self._is_per(i)):
                bound = _BOUNDS.get(self._key(i - 1), "seeds")
                setattr(self.placed, bound, int(value))
            elif following in _HOURS and limits and i + 1 not in self.owner:
                self.placed.budget_s = value * _HOURS[following]
            else:
                continue
            (self.numbers if i in self.numbers else self.spelled).remove(i)
        for i, token in enumerate(self.found):
            short = SHORT_TIME.match(token.text)
            if short and (self._key(i + 1) == "budget" or any(self._key(j) in _WITHIN for j in (i - 1, i - 2, i - 3))):
                parts = re.findall(r"(\d+)([a-z]+)", token.text)
                self.placed.budget_s = sum(float(many) * _SHORT_UNITS[unit] for many, unit in parts)
            elif token.kind == "word" and _GLUED.match(token.text) and i not in self.owner:
                self.placed.unplaced.append(token)

    def _is_last(self, i: int) -> bool:
        """`RLOO v GRPO, 4 seeds, 1 hour`: a time that stands by itself."""
        alone = self._key(i - 1) in (",", ";") and self._key(i + 2) in ("", ".", ",", ";")
        return alone and self._key(i + 1) in ("hour", "hr", "minute", "min", "day")

    def _is_per(self, i: int) -> bool:
        """`per seed 4 trials`."""
        j = self._back(i, frozenset({"seed", "random", "=", ":"}))
        return self._key(j) in ("per", "each", "every")

    def _is_word_only(self, i: int) -> bool:
        """`a group size of 16 beats one of 4`, `does it double the reward`, `two group sizes, 4 and 8`: they are no levels."""
        if self.found[i].key in SCALES:
            return self._factor_at(i + 1) is None
        if (mention := self._factor_at(i + 1)) is not None and self._counts_levels(i, mention):
            return True
        return self.found[i].key == "one" and self._key(i + 1) in ("of", "with", "without", "at", "?", "that", "where")

    def _counts_levels(self, i: int, mention: Mention) -> bool:
        """`two algorithms`, `two group sizes, 4 and 8`."""
        j, many = mention.end, 0
        while self._number_at(j) or self._key(j) in _LISTING | {":", "(", "of"}:
            many += self._number_at(j)
            j += 1
        return _factor(mention).type == "choice" or many == self.found[i].value

    def _settle_sizes(self) -> None:
        """Numbers that are no levels: thresholds, sizes of effects, changes of a factor."""
        for i in list(self.numbers):
            if self._is_threshold(i):
                self.placed.threshold = self.found[i].value
            elif (factor := self._shifted(i)) is not None:
                self.placed.shifts.append((self.found[i], factor))
            elif self._is_effect(i):
                self.placed.effects.append(self.found[i])
            elif self._counts_unknown(i):
                self.placed.unplaced.append(self.found[i])
            else:
                continue
            self.numbers.remove(i)

    def _is_threshold(self, i: int) -> bool:
        j = self._back(i, _BRIDGES - {":"})
        metric = isinstance(mention.what, Metric) if (mention := self.owner.get(j)) else self._key(j) in _REACHED
        if self._key(j) in _SURPASSING and self._number_at(j - 1):
            return False  # `does a group size of 8 surpass 4?`
        return metric and any(self._key(k) in _REACHED for k in range(max(0, i - 7), i))

    def _shifted(self, i: int) -> Factor | None:
        """The factor that is moved `by` this number."""
        j = self._back(i, _SIZES)
        if self._key(j) != "by" or self._key(i + 1) in _POINTS:
            return None
        named = [k for k in range(max(0, j - 6), j) if k in self.owner]
        mention = self._factor_at(named[-1]) if named else None
        if mention is None or any(self._key(k) in _REPLACED for k in range(j)):
            return None
        moved = {self._key(k) for k in range(max(0, mention.start - 3), j)} & (MORE | LESS | {"change", "changing"})
        return _factor(mention) if moved else None

    def _is_effect(self, i: int) -> bool:
        if self._key(i + 1) in _POINTS:
            return True
        j = self._back(i, _SIZES)
        return (
            self._key(j) == "by" and not any(self._key(k) in _REPLACED for k in range(j)) and self._shifted(i) is None
        )

    def _counts_unknown(self, i: int) -> bool:
        """`2 layers`, `32 heads`: the level of something that is no factor here."""
        following = self.found[i + 1] if i + 1 < len(self.found) else None
        if (
            following is None
            or following.kind != "word"
            or i + 1 in self.owner
            or following.key in _VERBS | _PLAIN | {"step"}
        ):
            return False
        if following.key in self.about - _COUNTED and self._key(i + 2) not in ("per", "each", "in", "a"):
            j = self._back(i, _BRIDGES | _LISTING, numbers=True)
            return self._factor_at(j) is None  # `lr 4e-5 vs 1e-5 sums`
        plural = following.key != following.text.removesuffix("'s") and following.key not in ("time", "fold", *_HOURS)
        return plural and following.key != "seed" and self._factor_at(self._back(i, _BRIDGES)) is None

    def _back(self, i: int, over: frozenset[str], *, numbers: bool = False) -> int:
        """The token before `i` that is none of `over`, and with `numbers` no number."""
        j = i - 1
        while j >= 0 and j not in self.owner and (self._key(j) in over or (numbers and self._number_at(j))):
            j -= 1
        return j

    def _key(self, i: int) -> str:
        return key_at(self.found, i)

    def _behind(self, i: int) -> Factor | None:
        """`16 steps`, `two-digit`, `16 samples of 4 prompts`; not `4e-5 group size 8`, where the name has a number of its own."""
        mention = self._factor_at(i + 1)
        if mention is None:
            return None
        scale = self.found[i].key in SCALES and mention.end - mention.start > 1
        own_number = self.found[mention.end].kind == "number" if mention.end < len(self.found) else False
        valued = self._key(mention.end) in ("of", "=", ":") and self._number_at(mention.end + 1)
        if scale or (valued and self._factor_at(mention.end + 2) is None):
            return None
        return None if own_number and self._before(i) else _factor(mention)

    def _before(self, i: int, *, fitting: bool = True) -> Factor | None:
        """The factor that a chain of small words and other numbers leads back to, over more than bridges if it can take it."""
        bridged = True
        for j in range(i - 1, -1, -1):
            mention = self.owner.get(j)
            if mention is not None:
                fits = mention in self.factors and (bridged or not fitting or self._fits(_factor(mention), i))
                return _factor(mention) if fits else None
            token = self.found[j]
            bridged = bridged and token.key in _BRIDGES
            if token.value is None and token.key not in _LINKS:
                return None
            if token.key in _SCENES and j > 0 and self.found[j - 1].kind == "number":
                return None  # `temperature 0.7 with 8 ...`: something else begins
        return None

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
            listed = all(self._key(j) in SEPARATORS for j in range(earlier + 1, i))
            if listed or (i in self.numbers and self._unnamed(i, self.levels[earlier])):
                self.levels[i] = self.levels[earlier] if listed else self._asked(i) or self.levels[earlier]

    def _listed(self, between: range) -> bool:
        """`8 or 16`, `with 32 than with 16`."""
        keys = [self._key(j) for j in between if (self._key(j - 1), self._key(j)) != ("instead", "of")]
        return all(key in _LISTING for key in keys) or (
            all(key in _LISTING | _SCENES | {"after"} for key in keys) and bool(set(keys) & _OPPOSING)
        )

    def _asked(self, i: int) -> Factor | None:
        """`Which rank learns two-digit sums fastest, 4 or 8?`: what was named before and has no level yet, if it can take the number."""
        bare = [_factor(m) for m in self.factors if m.start < i and _factor(m) not in self.levels.values()]
        return next((factor for factor in reversed(bare) if self._fits(factor, i) and self._unnamed(i, factor)), None)

    def _begun(self, i: int, *, fitting: bool = True) -> int | None:
        """The level before `i` whose list it may go on with: over `one-digit` and the like, which cannot take the number."""
        before = [j for j in sorted(self.levels, reverse=True) if j < i]
        for j in before:
            factor = self.levels[j]
            listed = all(self._key(k) in SEPARATORS for k in range(j + 1, i))
            if fitting and not listed and not self._fits(factor, i):
                continue
            between = [m.what for k in range(j, i) if (m := self._factor_at(k)) is not None]
            passed = [self.levels[k] for k in before if k > j]
            return j if all(other == factor or other in passed for other in between) else None
        return None

    def _settle_leftovers(self) -> None:
        """`Is 4e-5 a better learning rate`: the next factor that can take it, else the last one without a level."""
        for i in [*self.numbers, *filter(self._is_opposed, self.spelled)]:
            if i in self.levels:
                continue
            later = [m for m in self.factors if m.start > i][:1]
            earlier = [m for m in self.factors if m.start < i and _factor(m) not in self.levels.values()][-1:]
            near = later + earlier if self._leads_to(i, later) else earlier
            fitting = [_factor(m) for m in near if self._unnamed(i, _factor(m)) and self._fits(_factor(m), i)]
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
        while self._key(j) in _LISTING | ARTICLES or (self._key(j - 1), self._key(j)) == ("instead", "of"):
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
        compared = self._key(i - 1) in ("compare", "comparing")
        while self._key(j) in _LISTING or self._number_at(j) or (compared and self._is_with_number(j)):
            j += 1
        return not any(
            self._key(k) in _SCENES | _QUESTIONS | {",", "on", "over"} for m in later for k in range(j, m.start)
        )

    def _is_with_number(self, j: int) -> bool:
        """`compare 1e-5 with 4e-5`."""
        return self._key(j) == "with" and self._number_at(j + 1)

    def _out_of_range(self, i: int) -> Factor | None:
        """The factor that the number would be a level of, if it could take it: the plan is refused with its range."""
        earlier = self._begun(i, fitting=False)
        factor = self._before(i, fitting=False) or (self.levels[earlier] if earlier is not None else None)
        return factor if factor is None or self._unnamed(i, factor) else None

    def _unnamed(self, i: int, factor: Factor) -> bool:
        """Whether no other name stands before the number: `dropout of 0.1` is no level of anything known."""
        if self._key(i - 1) in (":", "?", "."):
            return True
        own = {key for name in (factor.name, *factor.aliases) for key in phrase(name)}
        j = i - 1
        while self._key(j) in _BRIDGES:
            j -= 1
        if self._key(j) in ("?", "."):
            return True
        if self._key(j) in _IS and j > 0 and j - 1 not in self.owner and self.found[j - 1].kind == "word":
            j -= 1  # `when dropout is 16` has its own name, one word further off
        if self._key(i - 1) in ("(", "[") and self._has_no_levels(j):
            return True
        return (
            j < 0
            or self._key(j) in _PLAIN | _SUPPOSING | BETTER | WORSE | own | _PRONOUNS
            or self.found[j].value is not None
        )

    def _has_no_levels(self, j: int) -> bool:
        """What a number in brackets does not belong to: what is measured, chosen, done or asked about, as in `on sums (4 vs 8)`."""
        mention, key = self.owner.get(j), self._key(j)
        if mention is not None:
            return isinstance(mention.what, Metric) or mention.choice is not None
        return key in self.about | _VERBS or names_training(key)

    def _fits(self, factor: Factor, i: int) -> bool:
        number = factor.type in ("int", "float")
        return number and level_problem(factor, as_level(factor, self.found[i].value)) is None

    def _factor_at(self, i: int) -> Mention | None:
        mention = self.owner.get(i)
        return mention if mention in self.factors else None

    def _number_at(self, i: int) -> bool:
        return 0 <= i < len(self.found) and self.found[i].kind == "number"


def _factor(mention: Mention) -> Factor:
    if not isinstance(mention.what, Factor):
        raise TypeError(f"{mention.what.name} is no factor")
    return mention.what
