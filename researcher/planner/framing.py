"""What frames a topic's question: numbering, others' work, what is to come; and frames that no plan can keep, which are refused.

Works on text, sentence by sentence, before any name or number is read. Knows no instrument.
"""

from __future__ import annotations

import re

from researcher.refusals import PlanningRefused

_NUMBERING = re.compile(
    r"(?:(?:^\s*|(?<=[.?!;])\s+)(?:\d{1,2}[.)]|step\s+\d{1,2}\s*:)\s+(?=[a-z])"
    r"|\b(?:issue|section|figure|appendix)\s*(?:#|no\.?)?\s*\d+(?:\.\d+)*\b|\b(?:experiment|study|question)\s*(?:#|no\.?)?\s*\d+\s*(?:[:;.)](?!\d)|$)"
    r"|\((?:see\s+)?[a-z][\w\-]+(?:\s+et al\.?,?|\s+and\s+[\w\-]+,?|,)\s+(?:19\d|20[0-2])\d[a-z]?\))",
    re.IGNORECASE | re.MULTILINE,
)
_WALL_TIME = re.compile(
    r"(\b(?:hours?|hrs?|h|minutes?|min|days?))\s+of\s+(?:wall(?:[\s-]?clock)?(?:[\s-]?time)?|gpu\s+time|compute)\b",
    re.IGNORECASE,
)
_MOST_SEEDS = re.compile(
    r"(\bat least \w+ (?:random )?seeds?,?\s+(?:and |but )?at most \w+)(?!\s*\w*\s*seeds?)", re.IGNORECASE
)
_SENTENCE = re.compile(r"[^.?!;]+(?:[.](?=\w)[^.?!;]*)*[.?!;]*\s*")
_ELSEWHERE = re.compile(
    r"\s*(?:in (?:the|recent|earlier|previous|related) (?:literature|work|papers)\b|(?:other|most|many|some) (?:groups?|people|papers?|labs?|teams?|authors?|"
    r"researchers?)\b|others\b|[\w\-]+ et al\b|later\b|in (?:the )?future\b|previously\b|last (?:week|month|year)\b|"
    r"(?:our|my|a|the) (?:previous|last|earlier) (?:run|runs|study|studies|experiment|experiments)\b|(?!(?:i|we)\b)[a-z][\w\-]* used\b)",
    re.IGNORECASE,
)
_POINTING_BACK = re.compile(r"\b(?:that|this|these|those|it|they|them|so|true|real|claim|same)\b", re.IGNORECASE)
_DOING = r"(?:compare|test|find|try|search|tune|look|check|which|what)\b"
_INSIDE = r"(?:[^.?;]|\.(?=\d))*"
"""More of the same sentence."""
_WINNING = r"(?:beats?|wins?|helps?|hurts?|improves?|outperforms?|works?|better|faster|worse|slower|higher|lower)\b"
_TRIED = r"(?:test|try|compare|include|consider)"
_AT_EVALUATION = r"(?:during|at|in|for)\s+(?:the\s+)?(?:evaluation|eval|validation|test(?:\s+time)?)\b"
_GREEDY = re.compile(
    r",?\s*(?:with\s+|and\s+)?(?:evaluation|evaluated)\s+(?:is\s+)?at\s+(?:a\s+)?temperature\s+(?:of\s+)?0(?:\.0+)?(?![\w.]*\d)",
    re.IGNORECASE,
)
_REFUSED = [
    (
        rf"\bif\b{_INSIDE}\b{_WINNING}{_INSIDE}\bthen\s+{_DOING}|\bif (?:so|not|yes|it does),?\s+(?:then\s+)?{_DOING}",
        "asks for a comparison on a condition, and a plan is fixed before its first trial. Ask for two comparisons in "
        "sequence (which learning rate is best, 1e-5 or 4e-5, and then which group size, 4 or 8?), or for one study after the other",
    ),
    (
        rf"\b(?:all|any|every|everything|each)\b(?:{_INSIDE}\b(?:except|excluding|other than|apart from)|\s+(?:\w+\s+)?but(?!\s+(?:also|not|is|are|does|do|with|at|it)\b))\s+[\w\-]+",
        "leaves something out, and levels are compared only by name: name those that are to be compared",
    ),
    (
        rf"\b(?:do not|don't|never|without)\s+{_TRIED}(?:ing)?\b[^.?;,]*\d[\w.\-]*",
        "says what is not to be compared: leave it out, and name only the levels that are",
    ),
    (
        rf"\b(?:evaluation|eval|test[\s-]time)\s+(?:sampling\s+)?temperature|\btemperature(?:\s+(?:of|at|and|or|vs|=|[\d.]+))*\s+{_AT_EVALUATION}|"
        r"\bevaluat\w+\s+(?:at|with)\s+(?:a\s+)?temperature",
        "speaks of the temperature of evaluation, which no study varies (it is fixed by the instrument, 0 where it says nothing); "
        "ask about the temperature of training, or leave it out",
    ),
    (
        r"(?<!lora )\balpha\s*(?:of|=|is)?\s*0?\.(?:0\d+|1)\b|(?<!top[\s-])(?<!min[\s-])\bp\s*[<=]\s*0?\.0\d+|\b\d+(?:\.\d+)?\s?%\s+confidence|\bconfidence (?:level )?(?:of )?\d[\d.]*\s?%?|"
        r"\bsignificance (?:level )?(?:of |at )?0?\.\d+",
        "sets a level of significance, and the one by which verdicts are given is fixed. Ask the same question without it",
    ),
    (
        r"\bmargin\s*(?:of|=|:)?\s*\d[\d.]*|\bwithin\s+0?\.\d+\s+of\b",
        "reads as the size of an effect, and the smallest effect of interest is fixed for each metric. Ask the same question without it",
    ),
    (
        r"\b\d{1,2}:\d\d\s*(?:to|-|–|and|until)\s*\d{1,2}:\d\d\b|\b(?:from|until|after|before)\s+\d{1,2}:\d\d\b",
        "is a time of day, which a topic cannot set: give --window 22:00-07:00 with --detach",
    ),
    (
        r"\b(?:evaluate|evaluating|checkpoint|checkpointing|save|saving|log|logging|validate|report)\w*\b[^.?;]*\bevery\s+\w+\s+(?:steps?|updates?|epochs?)\b",
        "says how often something is done, and is no level of a factor: leave it out (how often is fixed by the instrument)",
    ),
    (
        r"\b\d+\s+(?:held[\s-]?out|evaluation|validation|test)\s+(?:tasks?|episodes?|problems?|questions?|prompts?|examples?)\b",
        "sets what is evaluated on, which the instrument fixes: leave it out",
    ),
    (
        r"\b(?:number of\s+)?(?:episodes|rollouts|samples|completions)\s+per\s+(?:step|batch)\s+(?:(?:is|are|stays?)\s+)?(?:fixed|held|kept|constant)\s+(?:at|to)\s+\d+\b|"
        r"\b(?:tasks?|prompts?)(?:\s+per\s+step)?\s+(?:x|×|\*|times)\s+[\w ]+?\s(?:at|to|=)\s*\d+",
        "fixes a product of two factors, and each arm sets its factors one by one: name the levels of each, or leave it out",
    ),
    (
        r"\btargets?\s+(?:up\s+to|below|under|at most)\s+\d+",
        "says how hard the tasks are by a number that no factor takes: leave it out",
    ),
    (
        r"\bfrom\s+\d[\w.\-]*\s+to\s+\d[\w.\-]*\s+in\s+\w+\s+steps?\b",
        "asks for a number of levels between two, which are named one by one: name the levels that are to be compared",
    ),
]  # fmt: skip


def framed(topic: str) -> tuple[str, list[str]]:
    """The topic without its frame, and what was left out, in words. Raises: PlanningRefused for a frame that no plan keeps."""
    topic = _NUMBERING.sub(" ", topic)
    topic = _MOST_SEEDS.sub(r"\1 seeds", _WALL_TIME.sub(r"\1", topic))
    topic, notes = _without_elsewhere(_GREEDY.sub("", topic))
    for pattern, why in _REFUSED:
        match = re.search(pattern, topic, re.IGNORECASE)
        if match is not None:
            raise PlanningRefused(f"{match.group().strip()!r} {why}", [match.group().strip()])
    return topic, notes


def _without_elsewhere(topic: str) -> tuple[str, list[str]]:
    """`Other groups use PPO.`, `Later we want group size 16.`: sets nothing, where another sentence asks by itself."""
    sentences = _SENTENCE.findall(topic)
    asks = [each for each in sentences if each.rstrip().endswith("?")]
    if not asks or any(_POINTING_BACK.search(each) for each in asks):
        return topic, []
    left = [each for each in sentences if _ELSEWHERE.match(each) and each not in asks]
    notes = [f"{each.strip()!r} speaks of other work, and sets nothing here." for each in left]
    return "".join(each for each in sentences if each not in left), notes
