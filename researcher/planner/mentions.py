"""What a topic mentions: factors, choices of factors, metrics and models, found by their names and aliases.

The longest phrase wins. Misspelt names are found too, and never taken for what they resemble: see `misspelt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from researcher.models import Factor, Instrument, Metric, Scalar
from researcher.planner.wording import (
    BENCHMARKS,
    BETTER,
    LESS,
    MORE,
    QUALITIES,
    WORSE,
    Token,
    is_method,
    names_training,
    phrase,
    words,
)

ALIKE = 0.85
_RESEMBLES = 0.7
"""From here on a word is shown what it looks like, though it may not be meant."""
_PROBABLY = 0.75
"""From here on it is asked whether that was meant."""
_VOID = words("schedule scheduler decay warmup warm annealing estimator normalisation normalization distribution")
"""After a factor's name these make another thing of it: a learning rate schedule is no learning rate."""
_SMALL = words("the with within which when where what that than then there their these those over under from into")
"""Ordinary words, however much they look like a name: `with` is no misspelt `width`."""
COMPARING = BETTER | WORSE | MORE | LESS | QUALITIES | words("how learn learning train training")
_MODEL_NAME = re.compile(r"\b(?=[\w.\-]*\d)[A-Za-z]{3,}[\w.]*(?:-[\w.]+)*")
_MADE = words("rollout sample completion generation episode")
SAID = words("answer response reply output completion generation rollout sample")
LENGTHS = words("longer shorter longest shortest long short lengthy brief")
_OCCASIONS = words("during in while within throughout")
_FEW = 8
"""Names that an error shows."""


@dataclass(frozen=True, slots=True)
class Mention:
    """Tokens [start, end) name `what`. choice: a level that was named together with its factor."""

    start: int
    end: int
    what: Factor | Metric
    choice: Scalar | None = None
    weak: bool = False
    """A metric recognised only by a word of comparing, such as `faster`."""


def mentions(
    instrument: Instrument, found: Sequence[Token], written: Mapping[str, tuple[Factor, str]] | None = None
) -> list[Mention]:
    """Everything that the topic names, in its order, without overlaps. written: levels by the words that stand for them."""
    written = written or {}
    dictionary = _dictionary(instrument) | {(word,): level for word, level in written.items()}
    longest = max(len(keys) for keys in dictionary)
    result: list[Mention] = []
    at = 0
    own_name = _own_name(instrument, found)
    while at < len(found):
        if at in own_name:
            at += 1
            continue
        for length in range(min(longest, len(found) - at), 0, -1):
            keys = tuple(token.key for token in found[at : at + length])
            if length == 1 and _has_length(found, at):
                keys = (*keys, "length")
            passing = _is_unit(found, at) or _is_total(found, at + length) or _is_occasion(found, at, at + length)
            passing = passing or (length == 1 and (_is_a_thing(found, at) or _is_a_letter(found, at)))
            if keys in dictionary and not passing and not _voided(found, at + length, dictionary):
                what, choice = dictionary[keys]
                if isinstance(what, Factor) and choice is None and _is_moved(found, at + length):
                    what = _metric_called(instrument, keys) or what
                weak = isinstance(what, Metric) and all(key in COMPARING for key in keys)
                result.append(Mention(at, at + length, what, choice, weak))
                at += length
                break
        else:
            at += 1
    named = {m.what.name for m in result if isinstance(m.what, Factor) and m.choice is None}
    chosen = {
        phrase(str(choice)): (factor, choice)
        for factor in instrument.factors
        if factor.type == "choice" and factor.name in named
        for choice in factor.choices
    }
    result = [_as_choice(found, m, chosen) for m in result]
    return [
        m
        for m in result
        if m.choice is None
        or m.what.name in named
        or _speaks_for_itself(m)
        or m.end - m.start > len(phrase(str(m.choice)))  # `token loss`: with its factor's name
        or found[m.start].key in written
        or _several_choices(result, m)
        or _is_method(found, m)
    ]


def _is_moved(found: Sequence[Token], end: int) -> bool:
    """`is the reward higher with …`, `does the reward rise`: what is measured, where a factor is called so too."""
    return end < len(found) and found[end].key in MORE | LESS and found[end].kind == "word"


def _metric_called(instrument: Instrument, keys: tuple[str, ...]) -> Metric | None:
    return next((metric for metric in instrument.metrics if keys in _phrases(metric)), None)


def _own_name(instrument: Instrument, found: Sequence[Token]) -> set[int]:
    """Tokens of the instrument's name, where it has several words: `guess_number` speaks of no number of guesses."""
    name = phrase(instrument.name)
    starts = [at for at in range(len(found)) if tuple(token.key for token in found[at : at + len(name)]) == name]
    return {at + i for at in starts for i in range(len(name))} if len(name) > 1 else set()


def _as_choice(
    found: Sequence[Token], mention: Mention, chosen: Mapping[tuple[str, ...], tuple[Factor, Scalar]]
) -> Mention:
    """`Which loss aggregation, token or episode?` speaks of no number of tokens. chosen: of factors that the topic names."""
    choice = chosen.get(tuple(token.key for token in found[mention.start : mention.end]))
    if choice is None or any(t.kind == "number" for t in found[max(0, mention.start - 1) : mention.end + 1]):
        return mention
    return Mention(mention.start, mention.end, *choice)


def _is_unit(found: Sequence[Token], at: int) -> bool:
    """`16 generations per prompt` counts generations, and speaks of no number of prompts."""
    return at > 0 and found[at - 1].key == "per"


def _is_total(found: Sequence[Token], end: int) -> bool:
    """`64 rollouts per step` counts all of a step's, whatever the groups they are in."""
    made = found[end - 1].key in _MADE
    return made and [token.key for token in found[end : end + 2]] in (
        ["per", "step"],
        ["per", "batch"],
        ["in", "total"],
    )


def _is_a_thing(found: Sequence[Token], at: int) -> bool:
    """`the system prompt`: one of them, of which nothing is counted."""
    counted = at > 0 and (found[at - 1].value is not None or found[at - 1].kind == "times")
    return found[at].text == "prompt" and not counted


def _is_a_letter(found: Sequence[Token], at: int) -> bool:
    """`un r plus grand`: one letter names something only with a number behind it, or beside what has one of that name."""
    if len(found[at].text) > 1 or found[at].kind != "word":
        return False
    return "lora" not in {token.key for token in found} and not any(t.kind == "number" for t in found[at + 1 : at + 4])


def _has_length(found: Sequence[Token], at: int) -> bool:
    """`longer completions`, `completions of 32 tokens`: how long each is, and not how many there are."""
    if found[at].key not in SAID:
        return False
    behind = [token.key for token in found[at + 1 : at + 4 : 2]]
    return (at > 0 and found[at - 1].key in LENGTHS | {"token"}) or behind == ["of", "token"]


def _is_occasion(found: Sequence[Token], start: int, end: int) -> bool:
    """`a temperature of 0.7 during rollouts` says when, and speaks of no number of rollouts."""
    return start > 0 and end == start + 1 and found[start].key in _MADE and found[start - 1].key in _OCCASIONS


def covered(named: Iterable[Mention]) -> set[int]:
    """The tokens that they name something with."""
    return {i for mention in named for i in range(mention.start, mention.end)}


def words_before(found: Sequence[Token], mention: Mention) -> frozenset[str]:
    """The three before a name, which say whether it is added, taken away or set."""
    return frozenset(token.key for token in found[max(0, mention.start - 3) : mention.start])


def words_over(found: Sequence[Token], at: int) -> frozenset[str]:
    """The three before a token, or nine where `and` chains it to what stands before: `with A and B` is said of both."""
    keys = [token.key for token in found[max(0, at - 9) : at]]
    return frozenset(keys if "and" in keys[-2:] else keys[-3:])


def is_given(factor: Factor) -> bool:
    """Whether one level of it says what is worked on, and not what is asked: a family of tasks, a file."""
    return factor.proper or factor.type in ("text", "data")


def misspelt(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> list[tuple[str, str]]:
    """Phrases of the topic that are nearly the name of a factor or metric: (as written, the name it resembles).

    A metric's name in another form (`accurate`) is no misspelling; `inflected` finds those.
    """
    taken = covered(named) | _own_name(instrument, found)
    taken |= {
        i for i in range(len(found)) if _is_unit(found, i) or _is_occasion(found, i, i + 1) or _is_a_thing(found, i)
    }
    mentioned = {mention.what.name for mention in named}
    has_metric = any(isinstance(mention.what, Metric) for mention in named)
    result: list[tuple[float, str, str]] = []
    for thing in _things(instrument):
        if thing.name in mentioned or (isinstance(thing, Metric) and has_metric):
            continue
        for keys in _phrases(thing):
            for at, written in _windows(found, len(keys), taken):
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
            for keys in _phrases(factor):
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
    taken = covered(named)
    for metric in instrument.metrics:
        for keys in _phrases(metric):
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
    names = {gap.join(keys) for keys in _phrases(thing) for gap in (" ", "")}
    return max((_alike(word, name, _RESEMBLES) for word in written for name in names), default=0.0)


def keyword_hits(instrument: Instrument, found: Sequence[Token]) -> int:
    """How many of the instrument's keywords the topic contains; its own name counts twice, a proper name each of its words."""
    keys = [token.key for token in found]
    wanted = {phrase(word) for word in (instrument.name, *instrument.keywords)}
    proper = {phrase(str(choice)) for factor in instrument.factors if factor.proper for choice in factor.choices}
    named = _contains(keys, phrase(instrument.name))
    return (
        named
        + sum(_contains(keys, each) for each in wanted if each)
        + sum(len(each) for each in proper if _contains(keys, each))
    )


def split_models(
    topic: str, models: Iterable[str], word: Callable[[str], str] = lambda _: " model "
) -> tuple[str, list[str], list[str]]:
    """The topic with a word in place of each model's name, the available models that it names, and names of models that
    are not available."""
    known, unknown = [], []
    by_length = sorted(models, key=len, reverse=True)

    def take(match: re.Match[str]) -> str:
        text = match.group().rstrip(".-")
        fits = [model for model in by_length if _plain(text) and _plain(model).startswith(_plain(text))]
        if fits:
            known.append(fits[0])
        elif _plain(text) not in BENCHMARKS and _looks_like_a_model(text):
            unknown.append(text)
        else:
            return match.group()
        return word(fits[0] if fits else text)

    return _MODEL_NAME.sub(take, topic), known, unknown


def _dictionary(instrument: Instrument) -> dict[tuple[str, ...], tuple[Factor | Metric, Scalar | None]]:
    dictionary: dict[tuple[str, ...], tuple[Factor | Metric, Scalar | None]] = {}
    for thing in _things(instrument):
        for keys in _phrases(thing):
            dictionary.setdefault(keys, (thing, None))
    for factor in instrument.factors:
        for choice in factor.choices:
            if factor.type == "choice" and (keys := phrase(str(choice))):
                taken = dictionary.setdefault(keys, (factor, choice)) != (factor, choice)
                for name in _phrases(factor) if taken else ():  # `token loss`, where tokens are counted too
                    dictionary.setdefault(keys + name, (factor, choice))
                    dictionary.setdefault(name + keys, (factor, choice))
    return dictionary


def _things(instrument: Instrument) -> list[Factor | Metric]:
    return [*instrument.factors, *instrument.metrics]


def _phrases(thing: Factor | Metric) -> list[tuple[str, ...]]:
    return [keys for keys in dict.fromkeys(phrase(name) for name in (thing.name, *thing.aliases)) if keys]


def _voided(found: Sequence[Token], end: int, dictionary: Container[tuple[str, ...]]) -> bool:
    return end < len(found) and found[end].key in _VOID and (found[end].key,) not in dictionary


def _speaks_for_itself(mention: Mention) -> bool:
    return isinstance(mention.what, Factor) and is_given(mention.what)


def _several_choices(result: Sequence[Mention], mention: Mention) -> bool:
    own = {other.choice for other in result if other.what == mention.what and other.choice is not None}
    return len(own) >= 2


def _is_method(found: Sequence[Token], mention: Mention) -> bool:
    """`Does DAPO help?` says enough by itself; an ordinary word needs its factor or another choice beside it."""
    return any(is_method(token.key) for token in found[mention.start : mention.end])


def _windows(found: Sequence[Token], length: int, taken: set[int]) -> Iterable[tuple[int, tuple[str, ...]]]:
    for at in range(len(found) - length + 1):
        window = found[at : at + length]
        if not taken & set(range(at, at + length)) and all(token.kind == "word" for token in window):
            yield at, tuple(token.key for token in window)


def _likeness(written: tuple[str, ...], keys: tuple[str, ...]) -> float:
    """0 where they are not alike. Short names and words of comparing resemble nothing: too much else looks like them."""
    one, other = " ".join(written), " ".join(keys)
    if len(other) < 5 or set(written) <= COMPARING | _SMALL:
        return 0.0
    return _alike(one, other, ALIKE)


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


def _contains(keys: Sequence[str], wanted: tuple[str, ...]) -> bool:
    return any(tuple(keys[at : at + len(wanted)]) == wanted for at in range(len(keys) - len(wanted) + 1))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _looks_like_a_model(text: str) -> bool:
    """Letters with a size or version, such as Qwen2.5-0.5B or llama-3; not `step5` or `top-5`."""
    return bool(
        re.match(r"(?i)(?:[a-z]{3,}-?\d+(?:\.\d+)?(?:-\w[\w.]*)+|[a-z]{4,}-?\d+(?:\.\d+)?-?\d*[bm]?)$", text)
    ) and (
        not re.match(
            r"(?i)(?:steps?|seeds?|lr|top|size|group|batch|digits?|temp\w*|rate|tokens?|written|rank|alpha|adapter)-?\d",
            text,
        )
    )
