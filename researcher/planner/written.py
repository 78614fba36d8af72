"""What a topic writes out rather than names: texts in quotes, files, data sets, models. Taken out before its words are read.

Each leaves a word in its place that nothing else is called, so that the rest is read as any other topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.planner.sizes import levels_out, model_factor

HUB = "hf:"
_PLACE = "written{}"
_QUOTED = r"[\"'`“‘](?P<quoted>[^\"`“”]+?)[\"'`”’](?!\w)"
_OWNER = r"[\w\-]+(?:\.[\w\-]+)*/[\w\-]+(?:\.[\w\-]+)*(?:@[\w.\-]*\w)?"
_DATA = re.compile(
    rf"""
      ["'`“](?P<spaced>[^"'`“”]+\.jsonl)["'`”]
    | (?P<file>[^\s"'`“”,;?()<>]+\.jsonl)\b
    | \bhf:["'`]?(?P<hub>{_OWNER}|[\w\-]+)["'`]?
    | https?://huggingface\.co/datasets/(?P<page>{_OWNER}|[\w\-]+)
    | \bdata\s?sets?\s+(?:called\s+|named\s+)?["'`]?(?!\S+\.jsonl\b)(?P<named>{_OWNER})["'`]?
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Written:
    """The topic without what it writes out, and what that is: the factor and level, by the word that stands for it.

    notes: how what it writes was read.
    """

    topic: str
    levels: Mapping[str, tuple[Factor, str]]
    notes: tuple[str, ...] = ()


def taken_out(topic: str, instrument: Instrument) -> Written:
    """Levels of the instrument's text and data factors, and models that are compared. Raises: PlanningRefused."""
    levels: dict[str, tuple[Factor, str]] = {}

    def place(factor: Factor, level: str) -> str:
        word = _PLACE.format(len(levels) + 1)
        levels[word] = factor, level
        return f" {word} "

    def texts(factor: Factor, rest: str) -> str:
        return _text_pattern(factor).sub(lambda match: place(factor, match["quoted"] or match["bare"]), rest)

    for factor in instrument.factors:
        if factor.type == "text":
            topic = texts(factor, topic)
    data = next((factor for factor in instrument.factors if factor.type == "data"), None)
    if data is not None:
        topic = _DATA.sub(lambda m: place(data, _source(m)), topic)
    models, notes = model_factor(instrument), list[str]()
    if models is not None:
        topic, notes = levels_out(topic, models, place)
    return Written(topic, levels, tuple(notes))


def without_data(topic: str, word: str = "dataset") -> tuple[str, bool]:
    """The topic with a word in place of files and data sets, and whether there were any."""
    rest, count = _DATA.subn(f" {word} ", topic)
    return rest, count > 0


def pieces(topic: str) -> list[tuple[str, bool]]:
    """The topic cut at its files and data sets, in order; of each piece whether it is one."""
    found: list[tuple[str, bool]] = []
    at = 0
    for match in _DATA.finditer(topic):
        found += [(topic[at : match.start()], False), (match.group(), True)]
        at = match.end()
    return [*found, (topic[at:], False)]


def not_in_topic(topic: str, instrument: Instrument, levels: Sequence[tuple[Factor, Scalar]]) -> list[str]:
    """Texts and data among these levels that the topic does not name: nobody but its author may.

    Data have to be named as a whole; a text has to stand somewhere in the topic.
    """
    named = {level for _, level in taken_out(topic, instrument).levels.values()}
    return [
        str(level)
        for factor, level in levels
        if level != factor.default
        and (
            (factor.type == "data" and level not in named)
            or (factor.type == "text" and not (level and str(level) in topic))
        )
    ]


def _text_pattern(factor: Factor) -> re.Pattern[str]:
    """`answer column 'target'`, `answer column is "target"`, `answer_column=target`."""
    names = sorted({factor.name, *factor.aliases}, key=len, reverse=True)
    spelled = "|".join(
        re.sub(r"[\s_\-]+", r"[\\s_\\-]+", re.escape(name).replace(r"\ ", " ").replace(r"\-", "-")) for name in names
    )
    return re.compile(
        rf"\b(?:{spelled})(?:\s*[=:]\s*|\s+(?:(?:is|of|called|named|being)\s+)?)(?:{_QUOTED}|(?<=[=:])\s*(?P<bare>[\w.\-]*\w))",
        re.IGNORECASE,
    )


def _source(match: re.Match[str]) -> str:
    if match["spaced"] or match["file"]:
        return str(match["spaced"] or match["file"])
    return HUB + str(match["hub"] or match["page"] or match["named"])
