"""What a topic mentions: factors, choices of factors, metrics and models, found by their names and aliases.

The longest phrase wins. Misspelt names are none of them: see `spelling`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from researcher.instruments.instrument import Factor, Instrument, Metric, Scalar
from researcher.planner.wording import (
    BENCHMARKS,
    BETTER,
    LESS,
    MORE,
    QUALITIES,
    WORSE,
    Token,
    is_method,
    key_at,
    phrase,
    words,
)

_VOID = words("schedule scheduler decay warmup warm annealing estimator normalisation normalization distribution")
"""After a factor's name these make another thing of it: a learning rate schedule is no learning rate."""
COMPARING = BETTER | WORSE | MORE | LESS | QUALITIES | words("how learn learning train training")
_MODEL_NAME = re.compile(r"\b(?=[\w.\-]*\d)[A-Za-z]{3,}[\w.]*(?:-[\w.]+)*")
_MADE = words("rollout sample completion generation episode")
SAID = words("answer response reply output completion generation rollout sample")
LENGTHS = words("longer shorter longest shortest long short lengthy brief")
_COUNTED_IN_STEPS = ("run.optimizer.warmup", "run.max_staleness")
_TO_STEPS = words("of = : is be for last at or vs versus than to against help matter ? ( step steps")
"""Between such a factor and its steps."""
_OF_A_GROUP = words("std standard mean baseline average normalisation normalization")
"""Behind `group` these are computed over it: `the group mean` is no group size."""
_OCCASIONS = words("during in while within throughout")


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
            passing = passing or (keys == ("group",) and key_at(found, at + 1) in _OF_A_GROUP)
            passing = passing or (length == 1 and (_is_a_thing(found, at) or _is_a_letter(found, at)))
            passing = passing or (keys == ("step",) and bool(result) and _are_its_steps(found, result[-1], at))
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
    """`reward`, which is the final reward where nothing says which."""
    return next((metric for metric in instrument.metrics if ("final", *keys) in phrases_of(metric)), None)


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


def _are_its_steps(found: Sequence[Token], before: Mention, at: int) -> bool:
    """`a warmup of 2 or 5 steps`, `staleness 0, 1, 4 steps`, and not `warmup 2, 20 steps`: the unit of what is counted in steps, and not how long is trained."""
    between = found[before.end : at]
    counted = isinstance(before.what, Factor) and before.what.target in _COUNTED_IN_STEPS
    numbers = bool(between) and between[-1].value is not None
    small = {token.key for token in between if token.value is None}
    listed = "or" in small or len([token for token in between if token.value is not None]) > 2
    return counted and numbers and small <= (_TO_STEPS | {","} if listed and "step" not in small else _TO_STEPS)


def _is_a_thing(found: Sequence[Token], at: int) -> bool:
    """`the system prompt`, `a second epoch`: one of them, of which nothing is counted."""
    counted = at > 0 and (found[at - 1].value is not None or found[at - 1].kind == "times")
    return found[at].text in ("prompt", "second") and not counted


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


def in_passing(instrument: Instrument, found: Sequence[Token]) -> set[int]:
    """Tokens that name nothing, though they may look like names: `per prompt`, `during rollouts`, the instrument's own name."""
    passing = {
        i for i in range(len(found)) if _is_unit(found, i) or _is_occasion(found, i, i + 1) or _is_a_thing(found, i)
    }
    return passing | _own_name(instrument, found)


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


def subjects(instrument: Instrument) -> frozenset[str]:
    """The keys of all words for what an instrument is about."""
    return frozenset(key for word in (instrument.name, *instrument.keywords) for key in phrase(word))


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
    for thing in things_of(instrument):
        for keys in phrases_of(thing):
            dictionary.setdefault(keys, (thing, None))
    for factor in instrument.factors:
        for choice in factor.choices:
            if factor.type == "choice" and (keys := phrase(str(choice))):
                taken = dictionary.setdefault(keys, (factor, choice)) != (factor, choice)
                for name in phrases_of(factor) if taken else ():  # `token loss`, where tokens are counted too
                    dictionary.setdefault(keys + name, (factor, choice))
                    dictionary.setdefault(name + keys, (factor, choice))
    return dictionary


def things_of(instrument: Instrument) -> list[Factor | Metric]:
    return [*instrument.factors, *instrument.metrics]


def phrases_of(thing: Factor | Metric) -> list[tuple[str, ...]]:
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
