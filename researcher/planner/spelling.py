"""Names that are nearly those of factors and metrics: misspelt, in another form of their word, or only alike.

What is misspelt is never taken for what it resembles; it is shown, so that a person can say what was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from researcher.instruments.instrument import Factor, Instrument, Metric
from researcher.planner.mentions import COMPARING, Mention, covered, in_passing, phrases_of, things_of
from researcher.planner.wording import ARTICLES, Token, names_training, phrase, words

ALIKE = 0.85
_RESEMBLES = 0.7
"""From here on a word is shown what it looks like, though it may not be meant."""
_PROBABLY = 0.75
"""From here on it is asked whether that was meant."""
_SMALL = words("the with within which when where what that than then there their these those over under from into")
"""Ordinary words, however much they look like a name: `with` is no misspelt `width`."""
_FEW = 8
"""Names that an error shows."""


def misspelt(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> list[tuple[str, str]]:
    """Phrases of the topic that are nearly the name of a factor or metric: (as written, the name it resembles).

    A metric's name in another form (`accurate`) is no misspelling; `inflected` finds those.
    """
    taken = covered(named) | in_passing(instrument, found)
    mentioned = {mention.what.name for mention in named}
    has_metric = any(isinstance(mention.what, Metric) for mention in named)
    lengths = {len(keys) for thing in things_of(instrument) for keys in phrases_of(thing)}
    windows = {length: list(_windows(found, length, taken)) for length in lengths}
    result: list[tuple[float, str, str]] = []
    for thing in things_of(instrument):
        if thing.name in mentioned or (isinstance(thing, Metric) and has_metric):
            continue
        for keys in phrases_of(thing):
            for at, written in windows[len(keys)]:
                likeness = _likeness(written, keys)
                if likeness and not (isinstance(thing, Metric) and _same_root(written, keys)):
                    # A name in full that was not taken for it: it is part of another thing, which is shown with it.
                    end = at + len(keys) + (1 if likeness == 1 else 0)
                    result.append((likeness, " ".join(token.text for token in found[at:end]), thing.name))
    result += _nearly_in_two_words(instrument, found, named)
    result += [
        hit
        for factor in instrument.factors
        if factor.name not in mentioned
        for hit in _nearly_chosen(factor, found, taken)
    ]
    result += [
        (1.0, token.text, str(choice))
        for factor in instrument.factors
        for choice in factor.choices
        if names_training(str(choice))
        for i, token in enumerate(found)
        if i not in taken and not names_training(token.key) and _slipped(token.key, str(choice))
    ]
    best: dict[str, tuple[float, str, str]] = {}
    for hit in sorted(result, reverse=True):
        best.setdefault(hit[1], hit)
    return [(text, name) for _, text, name in best.values()]


def _nearly_in_two_words(
    instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]
) -> Iterable[tuple[float, str, str]]:
    """`weigth decay`, whose second word is a name by itself."""
    for mention in named:
        at = mention.start - 1
        if mention.end - mention.start > 1 or at < 0 or found[at].kind != "word" or mention.choice is not None:
            continue
        written = (found[at].key, found[at + 1].key)
        for factor in instrument.factors:
            for keys in phrases_of(factor):
                near = len(keys) == 2 and keys[1] == written[1] and keys[0] != written[0] and len(keys[0]) > 4
                likeness = _likeness(written, keys) if near and _alike(written[0], keys[0], _RESEMBLES) else 0.0
                if likeness:
                    yield likeness, " ".join(token.text for token in found[at : mention.end]), factor.name


def _nearly_chosen(factor: Factor, found: Sequence[Token], taken: set[int]) -> Iterable[tuple[float, str, str]]:
    """Words that are nearly one of a factor's proper names: `chan_sum`, `chainsum`."""
    for choice in factor.choices if factor.proper else ():
        name = phrase(str(choice))
        for length in {1, len(name)}:
            for at, written in _windows(found, length, taken):
                likeness = _likeness(("".join(written),), ("".join(name),))
                if likeness and not set(written) <= COMPARING:
                    yield likeness, " ".join(token.text for token in found[at : at + length]), str(choice)


def inflected(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> Mention | None:
    """A metric named in another form of its word: `accurate` for accuracy."""
    of_factors = {key for factor in instrument.factors for keys in phrases_of(factor) for key in keys}
    taken = covered(named) | in_passing(instrument, found)
    taken |= {i for i, token in enumerate(found) if token.key in of_factors}  # `no correction`
    for metric in instrument.metrics:
        for keys in phrases_of(metric):
            for at, written in _windows(found, len(keys), taken):
                if not set(written) <= COMPARING and _same_root(written, keys):
                    return Mention(at, at + len(keys), metric)
    return None


def nearest_factors(instrument: Instrument, found: Sequence[Token]) -> list[str]:
    """All of them: first those that a word of the topic resembles, the most alike first, then the others as declared."""
    return _nearest(instrument.factors, found)


def nearest_metrics(instrument: Instrument, found: Sequence[Token]) -> list[str]:
    """The same of metrics."""
    return _nearest(instrument.metrics, found)


def a_few(names: Sequence[str], instrument: Instrument) -> str:
    """The first of them, and where to find the rest."""
    more = len(names) - _FEW
    rest = f" and {more} more (`researcher instruments {instrument.name}`)" if more > 0 else ""
    return ", ".join(names[:_FEW]) + rest


def resembled(instrument: Instrument, written: Sequence[str]) -> tuple[str, str] | None:
    """Of the words in question the one that is most like the name of a factor, and that name; None where none is."""
    alike = [(_closeness(factor, [word]), word, factor.name) for word in written for factor in instrument.factors]
    best = max(alike, default=(0.0, "", ""))
    return best[1:] if best[0] >= _PROBABLY else None


def _nearest(things: Sequence[Factor | Metric], found: Sequence[Token]) -> list[str]:
    written = [token.key for token in found if token.kind == "word"]
    return [thing.name for thing in sorted(things, key=lambda thing: _closeness(thing, written), reverse=True)]


def _closeness(thing: Factor | Metric, written: Sequence[str]) -> float:
    """0 where no word resembles any of its names, written apart or in one word."""
    names = {gap.join(keys) for keys in phrases_of(thing) for gap in (" ", "")}
    return max((_alike(word, name, _RESEMBLES) for word in written for name in names), default=0.0)


def _windows(found: Sequence[Token], length: int, taken: set[int]) -> Iterable[tuple[int, tuple[str, ...]]]:
    for at in range(len(found) - length + 1):
        window = found[at : at + length]
        if not taken & set(range(at, at + length)) and all(token.kind == "word" for token in window):
            yield at, tuple(token.key for token in window)


def _likeness(written: tuple[str, ...], keys: tuple[str, ...]) -> float:
    """0 where they are not alike. Short names and words of comparing resemble nothing: too much else looks like them."""
    one, other = " ".join(written), " ".join(keys)
    differing = {word for word in written if word not in keys}
    if len(other) < 5 or set(written) <= COMPARING | _SMALL or (differing and differing <= ARTICLES):
        return 0.0
    return _alike(one, other, ALIKE)


@lru_cache(maxsize=1 << 16)
def _alike(written: str, name: str, least: float) -> float:
    """How alike they are, and 0 below this least: most differ by so much that their lengths or letters alone say so."""
    if 2 * min(len(written), len(name)) / (len(written) + len(name)) < least:
        return 0.0
    matcher = SequenceMatcher(None, written, name)
    likeness = matcher.ratio() if matcher.quick_ratio() >= least else 0.0
    return likeness if likeness >= least else 0.0


def _slipped(written: str, name: str) -> bool:
    """Whether one letter is missing, too many or another, or two have changed places: `grop`. Short names are not asked."""
    if len(name) < 4 or abs(len(written) - len(name)) > 1 or written == name:
        return False
    same = next(
        (i for i, (a, b) in enumerate(zip(written, name, strict=False)) if a != b), min(len(written), len(name))
    )
    rest, wanted = written[same:], name[same:]
    swapped = rest[1::-1] + rest[2:] if len(rest) > 1 else rest
    return wanted in (swapped, rest[1:]) or rest == wanted[1:] or rest[1:] == wanted[1:]


def _same_root(written: tuple[str, ...], keys: tuple[str, ...]) -> bool:
    """Whether each word is the other's, or another form of it: `held-out accurate` for held-out accuracy."""
    return all(one == other or _same_stem(one, other) for one, other in zip(written, keys, strict=True))


def _same_stem(one: str, other: str) -> bool:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return common >= 6 and common >= 0.6 * max(len(one), len(other))
