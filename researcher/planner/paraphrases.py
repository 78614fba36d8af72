"""What people say in other words than the planner reads, and the words for it: a table, applied to a topic in lower case.

English only. Knows the planner's own words for factors and metrics, and no instrument.
"""

from __future__ import annotations

import re
from collections.abc import Callable

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+(?:\.\d+)?|\.\d+)"
LEVEL = rf"{NUMBER}(?:e[-+]?\d+)?"


def reworded(text: str) -> str:
    """The topic, in the words that are read."""
    for said, meant in (*_BOUNDED, *_SAID_OTHERWISE):
        text = re.sub(said, meant, text)
    return text


def _kl_places(match: re.Match[str]) -> str:
    """`a KL penalty in the reward or in the loss`: where the penalty stands, and no metric."""
    text = match.group()
    if all(re.search(rf"\b(?:in|inside|from) (?:the )?{place}s?\b", text) for place in ("loss", "reward")):
        text = re.sub(r"\b(?:kl )?(?:in|inside|from) (?:the )?(loss|reward)s?\b", r"kl in \1", text)
    return text


def _async(match: re.Match[str]) -> str:
    """`does asynchronous training help?`, where the topic says no more of staleness, and of nothing that goes with it."""
    text = match.group()
    if re.search(r"stale|behind|correction|importance|policy", text):
        return text
    text = re.sub(r"\b(?:fully )?async(?:hronous(?:ly)?)?\b", "max staleness 1", text)
    return re.sub(r"\bsync (?=training|updates)", "max staleness 0 ", text)


def _symmetric_clipping(match: re.Match[str]) -> str:
    """`clip-higher against symmetric clipping`: DAPO's 0.28 where no number says otherwise, against the range as ever."""
    text = match.group()
    if not re.search(r"\d*\.\d", text):
        text = re.sub(r"\bclip[ -]higher\b", "clip high 0.28", text)
    return re.sub(
        r"\b(?:symmetric(?:al)?|standard|ordinary|usual|vanilla|plain|normal) (?:ppo )?clip(?:ping)?(?: range)?\b",
        "the default clip high",
        text,
    )


_SAID_OTHERWISE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        r"\b(?:full|ordinary)[ -](?:(?:parameter|weight|model|rank)s?[ -])?(?:fine[ -]?tun(?:ing|e|es|ed)|finetuning|training|updates)\b"
        r"|\b(?:training |tuning |updating )?all (?:the |model )*(?:weights|parameters)\b",
        "parameters full",
    ),
    (rf"\bnot ({LEVEL}),? but ({LEVEL})", r"\2 rather than \1"),
    (rf"\b({LEVEL}),? (?:and )?not ({LEVEL})", r"\1 rather than \2"),
    (r"\b(\w+) steps? (?:off[ -]?policy|behind|stale)\b", r"max staleness \1"),
    (r"^.*\basync.*$", _async),
    (r"^(?=.* ).*\b(?:clip[ -]high|decoupled clip|asymmetric clip).*$", _symmetric_clipping),
    (r"\b(?:fully |strictly )?(?:on[ -]policy|synchronous)\b", "max staleness 0"),
    (r"\bclip(?:ping)? (?:the )?gradients?(?: norms?)? (?:at|to)\b", "gradient clipping of"),
    (r"\bclip(?:ping)? (?:the )?gradients?\b", "gradient clipping"),
    (r"\bsaves? (?:any |much |training |wall[ -]?(?:clock )?)*time\b", "reduce wall time"),
    (r"(?:\bsize (?:of )?)?\b(\d+) ?x ?\1\b(?! ?(?:factorial|design|experiment))", r"size \1"),
    (r"\b(token|call|timeline|episode)[ -](?:level|wise)\b", r"\1"),
    (r"\b(token|call|timeline|episode) (?:policy |pg )?loss\b(?! (?:agg|averag|mean|normali))", r"loss aggregation \1"),
    (r"\badvantages? (?:be |are )?normali[sz]ed\b", "need advantage normalization"),
    (r"\b(lora|adapters?) (r|rank|alpha) ?[= ]", r"\1 \2 "),
    (r"\b(lora)(?: with)? r (?=\d)", r"\1 rank "),
    (r"\b[tτ] ?= ?(?=\d\.\d)", "temperature "),
    (r"\b(?:preferable|superior) to\b", "better than"),
    (r"\binferior to\b", "worse than"),
    (r"\blinearly\b", "linear"),
    (r"\bbest[ -]of[ -](?:n|\d+)\b", "bestofn"),
    (r"\bwith (?:respect|regard) to\b", "in terms of"),
    (r"\b(?:sweep(?:s|ing)?|ablat(?:ions?|e)|grid search)\b", " "),
    (r"\bablating\b", "removing"),
    (rf"({LEVEL}) ?(?:\.\.+|…) ?({LEVEL})", r"\1 to \2"),
    ("∈", " in "),
    (r"^.*\bkl\b.*$", _kl_places),
    (r"\b(?:leaving out|leave out|skipping|skip|getting rid of|turning off|switching off)\b", "removing"),
    (
        r"\b(linear|cosine)(?:ly)?[ -](?:decaying|annealed|annealing|decayed) (?:of )?(?:the |a )?(?:learning[ -]?rate|lr)\b",
        r"\1 schedule",
    ),
    (r"\b(?:decaying|annealing|annealed|decayed) (?:the |a )?(?:learning[ -]?rate|lr)\b", "learning rate schedule"),
    (
        r"\b(?:decreasing|lowering|reducing) (?:the )?(?:learning[ -]?rate|lr) (?:over|during|throughout|along|in the course of)\b",
        "learning rate schedule over",
    ),
    (r"\bconstant (?:learning[ -]?rate|lr)\b(?! (?:schedule|decay|of|at)\b|\s*[=\d(])", "constant schedule"),
    (
        r"\brewards? (?:rise|grow|increase|climb|improve|go up)s? (faster|quicker|sooner|slower)\b",
        r"learn \1",
    ),
    (
        r"\b(?:decoupled clip(?:ping)?|clip[ -]higher)(?: range)? "
        r"(?:\(?(\d*\.\d+) ?/ ?(\d*\.\d+)\)?|\((\d*\.\d+), ?(\d*\.\d+)\))",
        lambda match: f"clip low {match[1] or match[3]} and clip high {match[2] or match[4]}",
    ),
    (r"\bcosts? (?:more )?(?=wall|time)", "raise "),
    (r"\bcosts? (?=(?:any )?(?:accuracy|reward|final|held|performance))", "lower "),
    (
        r"\b(?:learning[ -]?rate|lr) (?:that )?(?:start|begin)(?:s|ing)? (?:at|from|with)\b",
        "learning rate schedule from",
    ),
    (r"\bwarm(?:ing|ed)?[ -]?up (?:the )?(?:learning[ -]?rate|lr)\b", "warmup"),
    (r"\bwarm[ -]?up (?:for|over|of|during|lasting|in) (?:the first )?(\w+) steps?\b", r"warmup \1"),
    (r"\b(\w+)[ -]steps? (?:of )?(?:linear )?(?:(?:learning[ -]?rate|lr) )?warm[ -]?up\b", r"warmup \1"),
)
"""How people say a level without its factor's name, and what else a plainer word stands for."""
_LIMIT = r"(?:no more than|not more than|at most|at the most|less than|fewer than|no longer than|not longer than|under|up to|a maximum of)"
_BOUNDED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\bhalf an hour\b", "30 minutes"),
    (r"\b(?:an|one) hour and a half\b", "90 minutes"),
    (r"\ban? (hour|day)\b", r"1 \1"),
    (rf"\b(?:(?:in|within|taking|takes|using|use|spending|spend) )*{_LIMIT} (\d+(?:\.\d+)?) ?(hours?|hrs?|h|minutes?|mins?|days?)\b", r"within \1 \2"),
    (r"\b(?:at least|not less than|no less than|no fewer than|not fewer than|a minimum of) (\w+) (?:random )?seeds?\b", r"minimum \1 seeds"),
    (r"\b(\w+) or more (?:random )?seeds?\b", r"minimum \1 seeds"),
    (r"\b(\w+) or (?:fewer|less) (?:random )?seeds?\b", r"maximum \1 seeds"),
    (r"\b(?:between (\d+) and|(?:from )?(\d+) ?(?:to|-)) ?(\d+) (?:random )?seeds?\b", r"minimum \1\2 seeds maximum \3 seeds"),
    (r"\bseeds (\d+(?:, ?\d+)*,? and \d+)\b", lambda m: f"{len(re.findall(r'[0-9]+', m[1]))} seeds"),
    (r"\b(?:fewer|less) than (\d+) (?:random )?seeds?\b", lambda m: f"maximum {int(m[1]) - 1} seeds"),
    (rf"\b{_LIMIT} (\w+) (?:random )?seeds?\b", r"maximum \1 seeds"),
    (r"\bmore than (\d+) (?:random )?seeds?\b", lambda m: f"minimum {int(m[1]) + 1} seeds"),
)  # fmt: skip
"""Limits that sound like claims: `in less than half an hour`, `with no more than 6 seeds`."""
