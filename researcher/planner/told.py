"""Sentences that tell what was seen before one that asks: `the reward was noisy with a group size of 4. Does 16 learn faster?`

What they name has been in use so far; what they measure and claim is no part of the question. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from researcher.instruments.instrument import STUDY_STEPS, Factor, Metric
from researcher.planner.levels import Level, Placed, level_text
from researcher.planner.mentions import Mention
from researcher.planner.placing import place
from researcher.planner.weighing import is_ordered
from researcher.planner.wording import (
    ASKING,
    BETTER,
    BUT,
    SENTENCE_ENDS,
    SO_FAR,
    SWITCHED_OFF,
    WORSE,
    Token,
    key_at,
    key_behind_comma,
    sentences,
    words,
)

_SEEN = words(
    "was were had got looked look looking seemed seem saw noticed observed dropped fell collapse collapsed plateau plateaued stall "
    "stalled plateaus stuck gave diverge diverged unstable noisy flat exploded explode crashed crash suffered happened oscillated overfit"
)
_MEANT = words(
    "measure measured metric care interested matter goal hypothesis hypothesise claim claimed want wanted aim decide baseline control "
    "reference asked"
)
"""Where these stand a sentence says what is asked, too."""
_ASKING = ASKING | words("which what how compare test find whether")
_CONCEDING = words("although though")
"""These begin what is told, up to a comma: `although LoRA is cheaper, it is less accurate`."""
_REASONING = _CONCEDING | words("since because")
"""So do these before a question: `because LoRA is cheaper, is it less accurate?`"""
_SUPPOSED = words("was were had got")
"""Of a clause before a comma these tell nothing by themselves: `if the rate was 1e-4, would accuracy rise?`"""
_SO_FAR_SAID = words("used tried trained ran now currently today far")
_SUPPOSING = words("if suppose supposing assume imagine")
_GETTING = words("get see observe find obtain reach")
_SPEAKERS = words("i we")
_BEATING = words("beat beats outperform outperforms outperformed than")
_AGAINST = words("than against versus vs compared instead rather")
_VAGUE = words("better worse")
"""Of what, the sentence before says: `the reward was noisy. Is 16 better?`"""
_KEPT = words("with using under adding") | SWITCHED_OFF
_USUAL = words("default usual standard")
_WHEN = words("after around at by from until")
_ABOUT = words("about roughly approximately some")
_INCLUDING = words("compare include including also add test try find which")
"""In a statement these bring a level into the comparison: `Try 16, too.`"""


@dataclass(frozen=True, slots=True)
class Told:
    """A topic's tokens and mentions without what is told, where that stands, and what was left out, in words."""

    found: list[Token]
    named: list[Mention]
    at: frozenset[int]
    notes: tuple[str, ...]


def set_apart(found: Sequence[Token], named: Sequence[Mention]) -> Told:
    """Of what is told the factors and their levels are kept, and its metric where the question names none."""
    scenes = _scenes(found, named)
    if not _names_something(found, named, scenes):
        scenes = []
    every = told = frozenset(i for scene in scenes for i in scene)
    asked = [m for m in named if isinstance(m.what, Metric) and m.start not in told and not _is_vague(found, m)]
    scenes = [scene for scene in scenes if asked or _measures(scene, named) or found[scene[-1]].key == ","]
    told = frozenset(i for scene in scenes for i in scene)
    dropped = [m for m in named if asked and isinstance(m.what, Metric) and m.start in told]
    kept: set[int] = set()
    asked_of = {m.what.name for m in named if isinstance(m.what, Factor) and m.start not in told}
    for scene in scenes:
        factors, own = _kept(found, scene, named, asked_of)
        aside = [m for m in named if isinstance(m.what, Factor) and m.start in scene and m not in factors]
        dropped += aside if factors or asked_of else []
        kept |= own
    left = [m for m in named if m not in dropped]
    kept |= {i for m in left if m.start in told for i in range(m.start, m.end)}
    result = [SO_FAR if i in told - kept and token.kind != "mark" else token for i, token in enumerate(found)]
    written = [" ".join(found[i].text for i in scene[:-1]) for scene in scenes]
    return Told(result, left, every, tuple(f"{each!r} tells why it is asked, and claims nothing." for each in written))


def without_told(placed: Placed, told: frozenset[int]) -> tuple[Placed, list[str]]:
    """The levels without those that are only told: of a factor that the question itself has levels of, where it has
    enough to compare; and what was left out, in words."""
    asked = [level for level in placed.levels if level.at not in told]
    compared = {level.factor.name for level in asked if len(_values(asked, level.factor)) > 1}
    named = {level.factor.name for level in asked}
    levels = [each for each in placed.levels if each.at not in told or not (compared and each.factor.name in named)]
    values = [(each.factor.name, each.value) for each in asked]
    left = [each for each in placed.levels if each not in levels and (each.factor.name, each.value) not in values]
    notes = [
        f"{each.factor.name}={level_text(each.value)} is named before the question, and not compared." for each in left
    ]
    return replace(placed, levels=levels), notes


def without_beside(found: Sequence[Token], placed: Placed) -> tuple[Placed, list[str]]:
    """The levels without those of a statement beside a question that has two of its own: `4e-5 or 1e-5? A rate of 1e-4
    collapses.`; and what was left out, in words."""
    every = list(sentences(found, SENTENCE_ENDS))
    asking = [each for each in every if found[each[-1]].key == "?"]
    telling = [each for each in every if each not in asking and not {found[i].key for i in each} & _INCLUDING]
    left: list[Level] = []
    for name in {level.factor.name for level in placed.levels}:
        own = [level for level in placed.levels if level.factor.name == name]
        asked = {level.value for level in own if any(level.at in each for each in asking)}
        if len(asked) > 1:
            left += [each for each in own if each.value not in asked and any(each.at in part for part in telling)]
    notes = [
        f"{each.factor.name}={level_text(each.value)} stands beside the question, and is not compared." for each in left
    ]
    return replace(placed, levels=[each for each in placed.levels if each not in left]), notes


def _scenes(found: Sequence[Token], named: Sequence[Mention]) -> list[range]:
    """Sentences and clauses in which something was seen, with one behind them that asks."""
    every = list(sentences(found, SENTENCE_ENDS))
    asking = [i for i, each in enumerate(every) if found[each[-1]].key == "?" or found[each[0]].key in _ASKING]

    def set_against(question: int) -> bool:
        """`PPO beat GRPO. Does RLOO beat PPO?`, with sides of its own"""
        return any(found[i].key in _BEATING for i in every[question])

    result = []
    ordered = {m.start for m in named if isinstance(m.what, Metric) and is_ordered(found, m)}
    for sentence in every[: asking[-1]] if asking else []:
        keys = {found[i].key for i in sentence}
        tells = bool(keys & _SEEN or (keys & _BEATING and set_against(asking[-1]))) and not keys & _MEANT
        tells = tells and ordered.isdisjoint(sentence)
        if tells and "?" not in keys and found[sentence[0]].key not in _ASKING:
            result.append(sentence)
    for sentence in every:
        comma = next((i for i in sentence[:-1] if _asks_behind(found, i)), None)
        opening = [found[i].key for i in sentence[:2]]
        concedes = opening[0] in _CONCEDING or opening == ["even", "though"]
        if concedes and comma is None:
            comma = next((i for i in sentence[:-1] if _claims_behind(found, named, sentence, i)), None)
        concedes = concedes or opening[0] in _REASONING or opening in (["given", "that"], ["knowing", "that"])
        concedes = concedes or (comma is not None and found[comma + 1].key in BUT)
        if comma is not None and (concedes or _is_seen(found, named, sentence, comma)):
            result.append(range(sentence[0], comma + 1))
    return result


def _asks_behind(found: Sequence[Token], i: int) -> bool:
    """A comma before a question: `16 is slow, but is it more accurate?`"""
    return found[i].key == "," and key_behind_comma(found, i) in _ASKING


def _claims_behind(found: Sequence[Token], named: Sequence[Mention], sentence: range, i: int) -> bool:
    """A comma before a clause with a level of its own, or that takes one up: `although 4 is cheap, 16 learns faster`, `it …`."""
    behind = range(i + 1, sentence.stop)
    return found[i].key == "," and (key_at(found, i + 1) == "it" or _names_level(found, named, behind))


def _names_level(found: Sequence[Token], named: Sequence[Mention], within: range) -> bool:
    return any(found[i].kind == "number" for i in within) or any(
        m.start in within and m.choice is not None for m in named
    )


def _is_seen(found: Sequence[Token], named: Sequence[Mention], sentence: range, comma: int) -> bool:
    """`if accuracy was flat with 1e-5, would it rise with 1e-4?`, where the question has a level of its own; not `if the
    rate was 1e-4, would accuracy rise?`"""
    keys = {found[i].key for i in range(sentence[0], comma)}
    behind = range(comma + 1, sentence.stop)
    levels = _names_level(found, named, behind)
    supposed = found[sentence[0]].key in _SUPPOSING
    seen = bool(keys & ((_SEEN - _SUPPOSED) if supposed else (_SEEN | _SO_FAR_SAID))) or bool(
        keys & _GETTING and keys & _SPEAKERS
    )
    return levels and seen and found[sentence[0]].key not in _ASKING and not keys & (_MEANT | _AGAINST)


def _names_something(found: Sequence[Token], named: Sequence[Mention], scenes: Sequence[range]) -> bool:
    """Whether the rest does; not `16 was faster than 4. Is that real?`, where what was seen is the claim."""
    told = {i for scene in scenes for i in scene}
    numbers = any(token.kind == "number" and i not in told for i, token in enumerate(found))
    return numbers or any(m.start not in told and not _is_vague(found, m) for m in named)


def _is_vague(found: Sequence[Token], mention: Mention) -> bool:
    return all(found[i].key in _VAGUE for i in range(mention.start, mention.end))


def _measures(scene: range, named: Sequence[Mention]) -> bool:
    return any(isinstance(m.what, Metric) and not m.weak and m.start in scene for m in named)


def _kept(
    found: Sequence[Token], scene: range, named: Sequence[Mention], asked_of: Set[str]
) -> tuple[list[Mention], set[int]]:
    """Factors with levels, or said to be there, and the tokens that say so; not `collapsed after 10 steps`. asked_of: the
    names of those in the question, beside which another that is said not to be there is no part of it."""
    own = [m for m in named if isinstance(m.what, Factor) and m.start in scene]
    moved = [replace(m, start=m.start - scene.start, end=m.end - scene.start) for m in own]
    levels = [replace(each, at=each.at + scene.start) for each in place(found[scene.start : scene.stop], moved).levels]
    factors: list[Mention] = []
    kept: set[int] = set()
    for mention in own:
        before = {i for i in range(mention.start - 3, mention.start) if key_at(found, i) in _KEPT}
        at = [each.at for each in levels if each.factor == mention.what and not _is_when(found, each)]
        at = [i for i in at if found[i].key not in _USUAL]
        is_off = any(found[i].key in SWITCHED_OFF for i in before)
        if at or (before and not (is_off and asked_of and mention.what.name not in asked_of)):
            factors.append(mention)
            between = range(min([mention.start, *at]), max([mention.end - 1, *at]) + 1)
            kept |= before | {i for i in between if found[i].key not in BETTER | WORSE}
    return factors, kept


def _is_when(found: Sequence[Token], level: Level) -> bool:
    before = level.at - 1
    while key_at(found, before) in _ABOUT:
        before -= 1
    return level.factor.target == STUDY_STEPS and key_at(found, before) in _WHEN


def _values(levels: Sequence[Level], factor: Factor) -> set[object]:
    return {level.value for level in levels if level.factor == factor}
