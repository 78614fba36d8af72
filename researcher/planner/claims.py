"""What a topic claims: on which metric, and in which direction.

Works on tokens, mentions and levels that are already known; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.instruments.instrument import Direction, Factor, Metric
from researcher.planner.mentions import Mention
from researcher.planner.modifiers import TASKS, goes, led_by, modifiers, moved_unnamed
from researcher.planner.wording import (
    ARTICLES,
    BETTER,
    COPULAS,
    LESS,
    MORE,
    QUALITIES,
    SCALES,
    SENTENCE_ENDS,
    SWITCHED_ON,
    WORSE,
    Token,
    before_articles,
    is_question,
    key_at,
    sentences,
    words,
)

_BEATEN = words("beaten outperformed surpassed exceeded")
_AVERTED = words("prevent prevents avoid avoids avert averts stop stops delay delays against")
"""Before what is worse these claim the better: `prevent collapse`."""
_BADLY = words("slowly poorly badly")
_BEHIND_LESS = words("than on in with at for from by when if often ? . ! ; ,")
"""What follows a `less` that describes a verb: `hurts accuracy less than`; not `less KL`, `less accurate`."""
_AHEAD_OF_BOUNDS = words(
    "in with at by for of under within to using no or is are was be cost take need use require vary"
)
"""What stands before a `less than` that bounds a number, or says something else: `in less than 8 steps`."""
_CLAUSE_ENDS = SENTENCE_ENDS | words(", and or but while when if because")
_LESSENING = words("reduce reduced reducing lower lowering decrease decreasing less fewer lessen limit")
_HARMS = words("collapse collapses degradation harm damage")
"""What is better where there is less of it."""
_SPEAKERS = words("i we you to when by and if")
"""Who goes up or down to a level, and when."""
_DIFFICULTY = words("harder easier")
_NOUNS = words("gain improvement")
"""Names of metrics as often as claims; they are what is measured in `gain in reward with A`, and claimed in `a gain in reward`."""
_DENIALS = words("no not never cannot hardly nothing")
_EQUAL = words(
    "same equal equally equivalent identical alike match interchangeable indistinguishable unchanged unaffected untouched identically irrelevant insensitive independent"
)
_NEGLIGIBLE = words("negligible nil")
_MATCHING = words("match equal")
_SAME = words("same equal identical equivalent")
_NEEDING = words("need take require")
_AMOUNT_OF = words("number amount total of a random training other")
_CONDITIONS = words("seed setting setup step budget condition data hyperparameter task question prompt model compute")
"""What arms have in common where it is said to be the same."""
_FARING = words("do doe perform work learn train fare")
_COSTS = words("long much many expensive slow costly")
"""`takes twice as long as` says what it costs."""
_NO_QUALITY = words("soon long many much well")
_AMOUNTS = words("twice half")
_MATTERS = words("difference differ effect change affect alter move matter impact influence depend")
"""Where these are denied nothing differs."""
_OPEN = words("which what find choose pick select tune optimise optimize")
_SUPERLATIVES = words(
    "best fastest quickest easiest highest greatest largest worst slowest hardest lowest smallest fewest least"
)
"""`which rate learns fastest?` claims nothing of any of them."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What is claimed of the treatment. direction None: nothing. note: how a claim was read that is not made plainly."""

    direction: Direction | None
    note: str | None = None


def claimed(
    found: Sequence[Token],
    named: Sequence[Mention],
    metric: Metric,
    opposition_at: Sequence[int],
    asked_at: Sequence[int] = (),
) -> Stated:
    """The direction in which the treatment is said to move the metric.

    opposition_at: tokens that are levels, never claims. asked_at: those of the levels that are compared; what is claimed in
    their sentence comes first, and before that what a question asks.
    """
    taken = {*opposition_at, *moved_unnamed(found), *led_by(found, named, asked_at)}
    taken |= {i for i in range(1, len(found)) if found[i - 1].key in _NEGLIGIBLE}  # `a negligible gain`
    for mention in named:
        if isinstance(mention.what, Factor):
            taken |= {*range(mention.start, mention.end), *_own_modifiers(found, named, mention)}
        elif not mention.weak:
            taken |= {i for i in range(mention.start, mention.end) if found[i].key in _NOUNS}
            of = before_articles(found, mention.start)
            if (
                key_at(found, of) in ("in", "of")
                and key_at(found, of - 1) in _NOUNS
                and key_at(found, of - 2) in ("", "the", ":", ",")
            ):
                taken.add(of - 1)
    if any(token.key == "neither" for token in found) or _with_or_without(found):
        return Stated(None)
    if (at_least := _at_least(found, metric.direction)) is not None:
        return at_least
    own = _own_sentences(found, asked_at)
    asked = {i for each in sentences(found, SENTENCE_ENDS) if is_question(found, each) for i in each}
    order = sorted(range(len(found)), key=lambda i: (i not in asked, i not in own))
    open_question = bool(_OPEN & {token.key for token in found}) or len(opposition_at) > 2
    for i in order:
        superlative = open_question and found[i].key in _SUPERLATIVES
        said = None if i in taken or superlative else _direction_at(found, i, metric.direction)
        if said is not None and _is_lessened(found, i, named):
            said = opposite(said)
        if said is not None and _either_way(found, i):
            return Stated(None)
        if said is not None:
            of_level = any(isinstance(m.what, Factor) and m.start == i + 2 for m in named)  # `trails no KL penalty`
            return _denied(found, i, said, metric.direction, of_none=not of_level)
    if (scaled := _scales_metric(found, named)) is not None:
        return scaled
    if (scaled := _times_as(found, metric.direction)) is not None:
        return scaled
    if (worse := _not_as(found, metric.direction)) is not None:
        return worse
    if (unmatched := _unmatched(found)) is not None and _says_equal(found, named):
        return Stated(opposite(metric.direction), f"{unmatched!r} is tested as worse: supported bears it out.")
    return equality(found, named) or Stated(None)


def equality(found: Sequence[Token], named: Sequence[Mention]) -> Stated | None:
    """The claim that nothing differs, where the topic makes it."""
    if not _says_equal(found, named):
        return None
    return Stated(
        None, "The topic claims that nothing differs: equivalent bears it out, supported and refuted deny it."
    )


def _own_sentences(found: Sequence[Token], at: Sequence[int]) -> set[int]:
    """The tokens of the sentences in which these stand."""
    return {i for sentence in sentences(found, SENTENCE_ENDS) if any(each in sentence for each in at) for i in sentence}


def _either_way(found: Sequence[Token], i: int) -> bool:
    """`help or hurt`, `up or down`: a question of which."""
    one, other = key_at(found, i), key_at(found, i + 2)
    up, down = BETTER | MORE, WORSE | LESS
    return key_at(found, i + 1) == "or" and ((one in up and other in down) or (one in down and other in up))


def _with_or_without(found: Sequence[Token]) -> bool:
    keys = [token.key for token in found]
    return any(keys[i : i + 3] in (["with", "or", "without"], ["without", "or", "with"]) for i in range(len(keys)))


def _at_least(found: Sequence[Token], better: Direction) -> Stated | None:
    """`at least as high as`."""
    keys = [token.key for token in found]
    for i in range(len(keys) - 3):
        if keys[i : i + 3] == ["at", "least", "as"]:
            said = "increase" if keys[i + 3] in MORE else "decrease" if keys[i + 3] in LESS else better
            return Stated(
                said, "'At least as' is tested as more: supported and equivalent both bear it out, refuted does not."
            )
    return None


def _scales_metric(found: Sequence[Token], named: Sequence[Mention]) -> Stated | None:
    """`LoRA doubles the wall time`, `halve the reward`: more, or less, and not how much."""
    for mention in named:
        i = before_articles(found, mention.start)
        if (
            isinstance(mention.what, Metric)
            and not mention.weak
            and i > 0
            and found[i].key in SCALES
            and found[i].key not in _AMOUNTS
        ):
            return Stated(
                "increase" if SCALES[found[i].key] > 1 else "decrease",
                f"{found[i].text!r} is tested as a difference, whatever its size.",
            )
    return None


def _scales(found: Sequence[Token], i: int) -> bool:
    """`four times`, `twice`, before `as fast as`."""
    return i >= 0 and (found[i].kind == "times" or found[i].key in SCALES or found[i].key == "time")


def _times_as(found: Sequence[Token], better: Direction) -> Stated | None:
    """`four times as fast as`, `twice as high as`, `half as many as`: more, or less, and not how much."""
    for i in range(len(found) - 3):
        if not (_scales(found, i) and found[i + 1].key == "as" and found[i + 3].key == "as"):
            continue
        first = i - 1 if i and found[i].key == "time" else i
        if found[i + 2].key in _COSTS:
            return None
        key, more = found[i + 2].key, SCALES.get(found[first].key, found[first].value or 2.0) > 1
        up: Direction = (
            "decrease" if key in LESS else "increase" if key in MORE else opposite(better) if key in WORSE else better
        )
        if any(_denies(found, j) for j in range(first)):
            return _denied(found, first, up if more else opposite(up), better)
        written = " ".join(token.text for token in found[first : i + 4])
        return Stated(up if more else opposite(up), f"{written!r} is tested as a difference, whatever its size.")
    return None


def _not_as(found: Sequence[Token], better: Direction) -> Stated | None:
    """`not as good as`, `isn't as accurate as`: below the other; `not as high as`: less."""
    for i in range(len(found) - 2):
        if found[i].key != "as" or found[i + 2].key != "as" or _scales(found, i - 1) or found[i + 1].key in _NO_QUALITY:
            continue
        key = found[i + 1].key
        if key not in _COSTS and _denied_ahead(found, i):
            low = key in WORSE | LESS | _BADLY
            said = "decrease" if key in MORE else "increase" if key in LESS else better if low else opposite(better)
            return Stated(said, f"'Not as {found[i + 1].text} as' is tested as a difference.")
    return None


def _unmatched(found: Sequence[Token]) -> str | None:
    """`fails to match`, `cannot match`, `doesn't equal`, as the topic writes it; not `doesn't 4 match 16?`, which expects a yes."""
    for i, token in enumerate(found):
        if token.key in ("fail", "failed") and _denies(found, i):
            return "fails to match"
        if token.key in _MATCHING and _denies(found, i - 1):
            return " ".join(each.text for each in found[i - 1 : i + 1])
    return None


def _says_equal(found: Sequence[Token], named: Sequence[Mention]) -> bool:
    """`no difference between`, `the same reward`, `as fast as`."""
    keys = [token.key for token in found]
    measured = {i for m in named if isinstance(m.what, Metric) for i in range(m.start, m.end)}
    no_difference = any(
        key in _MATTERS and any(each in _DENIALS or each.endswith("n't") for each in keys[max(0, i - 3) : i])
        for i, key in enumerate(keys)
    )
    as_as = any(
        key == "as"
        and keys[i + 2 : i + 3] == ["as"]
        and (keys[i + 1] not in ("well", "soon", "long") or (keys[i + 1] == "well" and set(keys[:i][-1:]) & _FARING))
        and not _scales(found, i - 1)
        for i, key in enumerate(keys)
    )
    equal = any(
        key in _EQUAL
        and not {"other", "else"} & set(keys[max(0, i - 4) : i])
        and i not in measured  # `exact match`
        and not _is_condition(found, named, i)
        for i, key in enumerate(keys)
    )
    negligible = any(key in _NEGLIGIBLE and not _DENIALS & set(keys[max(0, i - 2) : i]) for i, key in enumerate(keys))
    return no_difference or as_as or equal or negligible


def _is_condition(found: Sequence[Token], named: Sequence[Mention], i: int) -> bool:
    """`with the same number of steps`, `same seeds`: what is set alike, and no claim; not `needs the same number of steps`."""
    j = i + 1
    while key_at(found, j) in _AMOUNT_OF:
        j += 1
    of_factor = any(isinstance(m.what, Factor) and m.start == j for m in named)
    needed = key_at(found, before_articles(found, i)) in _NEEDING
    return found[i].key in _SAME and not needed and (of_factor or key_at(found, j) in _CONDITIONS)


def _direction_at(found: Sequence[Token], i: int, better: Direction) -> Direction | None:
    """What one token claims."""
    key = found[i].key
    if key in WORSE and any(key_at(found, j) in _AVERTED for j in (i - 1, i - 2, i - 3)):
        return better
    if key in _DIFFICULTY and key_at(found, i + 1) in TASKS:
        return None  # `training on harder sums`: which they are, and not how they fare
    bad = _BADLY | WORSE if key in ("more", "less") else _BADLY
    if key in MORE | LESS and key_at(found, i + 1) in bad:
        return opposite(better) if key in MORE else better
    if key in _LESSENING and any(key_at(found, j) in _HARMS for j in (i + 1, i + 2, i + 3)):
        return better
    if key in ("lose", "lost"):
        return opposite(better)
    if key in _BEATEN or key in WORSE or (key == "take" and key_at(found, i + 1) == "longer"):
        return opposite(better)
    if key in BETTER and not _is_quality_object(found, i):
        return better
    if key not in MORE | LESS or _idle(found, i):
        return None
    if key_at(found, i - 1) == "too":
        return opposite(better)
    rises = key in MORE
    if _quality_follows(found, i):
        return better if rises else opposite(better)
    return "increase" if rises else "decrease"


def _is_lessened(found: Sequence[Token], i: int, named: Sequence[Mention]) -> bool:
    """`hurts accuracy less than`, `loses less accuracy than`: what one token claims is claimed of the other level."""
    if found[i].key in ("lose", "lost", "gain", "gained") and key_at(found, i + 1) == "less":
        return True
    names = {m.end for m in named if isinstance(m.what, Factor)}
    for j in range(i + 1, len(found)):
        if found[j].key in _CLAUSE_ENDS:
            return False
        if found[j].key == "less" and j not in names and found[j - 1].key not in _AHEAD_OF_BOUNDS:
            following = key_at(found, j + 1)
            adverb = following.endswith("ly") and following not in _BADLY - {"badly"}
            return adverb or following in _BEHIND_LESS | {""} or found[j + 1].kind == "number"
    return False


def _denied(found: Sequence[Token], i: int, said: Direction, better: Direction, *, of_none: bool = True) -> Stated:
    """`no worse than` claims the good direction; `not better` is tested as the claim that it denies."""
    ahead = [j for j in range(max(0, i - 5), i) if found[j].key not in ARTICLES | COPULAS | {"have"}][:-3:-1] or [-1]
    near = ["not" if key_at(found, j).endswith("n't") and _denies(found, j) else key_at(found, j) for j in ahead]
    of_none = of_none and key_at(found, i + 1) in ("no", "nothing")  # `loses nothing`
    if said != better and (of_none or any(key in _DENIALS for key in near) or near[0] == "without"):
        return Stated(
            better, "'No worse' is tested as better: supported and equivalent both bear it out, refuted does not."
        )
    if any(key in _DENIALS for key in near) or _denied_ahead(found, i):
        return Stated(said, "The topic has a 'not': the claim without it is tested, so refuted bears the topic out.")
    return Stated(said)


def _denied_ahead(found: Sequence[Token], i: int) -> bool:
    """Whether anything before it denies in its sentence."""
    begins = max((j + 1 for j in range(i) if found[j].key in SENTENCE_ENDS), default=0)
    return any(_denies(found, j) for j in range(begins, i))


def _denies(found: Sequence[Token], j: int) -> bool:
    """`does not`, `never`, `fails to`; but for `isn't 16 better?`, which expects a yes, and `not using LoRA`, a level."""
    key, following = found[j].key, key_at(found, j + 1)
    if key.endswith("n't"):
        return j > 0 and found[j - 1].key not in SENTENCE_ENDS and following not in SWITCHED_ON
    fails = key in ("fail", "failed") and following == "to"
    return fails or (key in ("not", "never", "cannot") and following not in SWITCHED_ON)


def _own_modifiers(found: Sequence[Token], named: Sequence[Mention], mention: Mention) -> list[int]:
    """The factor's modifiers, without those that a metric has the better right to."""
    metrics = {i for m in named if isinstance(m.what, Metric) for i in modifiers(found, m) if i < m.start}
    own = {mention.end} if goes(found, mention) else set()
    return [i for i in modifiers(found, mention) if i in own or i not in metrics]


def _idle(found: Sequence[Token], i: int) -> bool:
    """`most`, `large` and the like in passing: "at most", "up to", "more than 3", "low variance"."""
    before, after = key_at(found, i - 1), key_at(found, i + 1)
    if found[i].key in ("up", "down"):
        goes = before in ("go", "goe", "going", "come", "move")
        levels = after in ("to", "from") and (before == "going" or key_at(found, i - 2) in _SPEAKERS)
        return not goes or levels  # `going down to 0.7 from 1.0`: where the factor goes
    if found[i].key in ("high", "low", "large", "small", "big"):
        return before != "too"
    return before == "at" and found[i].key in ("most", "least") and after != "?"


def _quality_follows(found: Sequence[Token], i: int) -> bool:
    return any(key_at(found, j) in QUALITIES for j in (i + 1, i + 2))


def _is_quality_object(found: Sequence[Token], i: int) -> bool:
    """`speed` as a thing ("higher learning speed", "effect on speed") claims nothing by itself; "speeds learning up" does."""
    moves = {key_at(found, j) for j in range(i + 1, i + 4)} & {"up", "upward"}
    return found[i].key in ("speed", "good", "well") and not moves


def opposite(direction: Direction) -> Direction:
    return "decrease" if direction == "increase" else "increase"
