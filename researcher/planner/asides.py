"""What a topic says beside its question, and what it says in a roundabout way, put so that the rest is read as usual."""

from __future__ import annotations

import re
from collections.abc import Iterable

from researcher.instruments.instrument import Instrument, Metric
from researcher.planner.mentions import mentions, phrases_of
from researcher.planner.paraphrases import ORDERS
from researcher.planner.wording import phrase, tokens
from researcher.refusals import PlanningRefused
from swarm.protocol.runspec import UNCUT

_LOSING = (
    r"(?:hurting|harming|losing|reducing|lowering|degrading|sacrificing|worsening|damaging|decreasing|compromising|giving up|"
    r"costing|(?:an? |any )?(?:(?:adverse|harmful|negative|detrimental) (?:effects?|impact|influence) (?:on|to)|"
    r"(?:loss|drop|decrease|reduction|cost) (?:of|in|to)))"
)
_UNHARMED = rf"(?:,\s*)?\b(?:without|while not|but not|with no|at no)\s+{_LOSING}\s+(?:(?:the|its|any|much)\s+)*"
_FREEZING = (
    r"\b(?:with\s+)?(?:(?:freez(?:e|es|ing)|(?:not|without) training)\s+(?:the\s+)?|(?:(?:an?|the)\s+)?frozen\s+)"
)
_FROZEN = r"(?:(?:is|was|being|kept|held|stays?)\s+)*(?:frozen|fixed|untrained)\b(?!\s+at\b)"
_A_MODEL = r"(solver|model|agent|policy|network|actor|critic)\b"
_ONLY_THE = r"(?:only\s+(?:the\s+)?|just\s+(?:the\s+)?)"
_AT_EQUAL_COST = re.compile(
    r"\b(?:(?:at|for|with|given|under)\s+(?:an?\s+|the\s+)?(?:equal|same|fixed|matched|identical|constant)\s+"
    r"(?:(?:amount|number|total|budget)\s+of\s+|total\s+|training\s+)?"
    r"(?:compute|flops?|costs?|tokens(?!\s+(?:limit|per))|wall[\s-]?(?:clock)?(?:\s+time)?|gpu[\s-]hours)"
    r"|compute[\s-]matched|iso[\s-]?(?:compute|flops?))\b",
    re.IGNORECASE,
)
_SEEDS_FROM = re.compile(
    r"\bseeds?\s+(?:\w+\s+)?(?:from|starting (?:at|from|with)|beginning (?:at|with))\s+(?:seed\s+)?(\d+)\b(?!\s*(?:to|-|and)\b)",
    re.IGNORECASE,
)
_SEED_NUMBER = re.compile(
    r"\b(?<!per )(?<!each )(?<!every )(?:random\s+seed|(?<!random )seed)\s*(?:number|no\.?|#|=|:|of)?\s*(\d+)\b",
    re.IGNORECASE,
)
_SEED_NUMBERS = re.compile(
    r"\bseeds\s*(?:numbers?|=|:|of)?\s*(\d+)(?:(?:\s*,\s*\d+)*,?\s*(?:and|or|&|to|-|–|through)\s*\d+|(?:\s*,\s*\d+){2,})\b",
    re.IGNORECASE,
)
_LONE_N = re.compile(
    r"(?:^|[,;]|\b(?:with|at|for|using))\s*(n\s*=\s*(\d+))(?=\s*(?:$|[.?;)]|,(?!\s*\d)))", re.IGNORECASE
)
_VAGUE_ORDERS = re.compile(
    rf"\b(?:half\s+(?:an?\s+)?|(?!(?:{ORDERS})\s)[\w.]+\s+)orders?\s+of\s+magnitude\b", re.IGNORECASE
)
_UNCUT = re.compile(
    r"(?:\b(?:with|at|under|using|and|keeping)\s+|[(,]\s*)(?P<said>(?P<name>top[\s_-]?p|top[\s_-]?k|min[\s_-]?p)\s*"
    r"(?:of|=|at|:|set to)?\s*(?P<value>-?\d+(?:\.\d+)?))(?![\w.]*\d)\)?,?"
    r"(?!\s*(?:,|/|or|and|vs\.?|versus|than|to|against)\s*[\d.])",
    re.IGNORECASE,
)
_PART_OF_TIME = re.compile(
    r"(?P<said>\b(?:in|needs?|takes?|uses?|requires?)\s+(?:only\s+|just\s+|about\s+|roughly\s+)?(?:half|(?:a|one)\s+(?:third|quarter|fifth|tenth|fraction)|\d+\s?%)\s+"
    r"(?:(?:of\s+)?the\s+(?:training\s+|wall[\s-]?(?:clock\s+)?)?time|(?:as\s+much|of\s+the)\s+time))\b"
    r"(?P<of>\s+(?:of|as|that(?:\s+of)?|it\s+takes|than)(?=\s))?",
    re.IGNORECASE,
)
_STANDARD_ERRORS = r"(?:\w+\s+)?(?:standard\s+(?:errors?|deviations?)|sigmas?)"
_REPORTED_ERRORS = re.compile(
    r",?\s*(?:\b(?:with|and|including|plus)|±|\+/?-)\s+(?:(?:the|their|its|a|one)\s+)?standard\s+errors?\b",
    re.IGNORECASE,
)
_WITHIN_ERRORS = re.compile(rf"\bwithin\s+{_STANDARD_ERRORS}\s+of\b", re.IGNORECASE)
_BY_ERRORS = re.compile(rf"\bby\s+(?:(?:more|less)\s+than\s+|at\s+least\s+|about\s+)?{_STANDARD_ERRORS}", re.IGNORECASE)


def set_aside(topic: str, instrument: Instrument) -> tuple[str, list[str]]:
    """The topic without what changes nothing of its plan, and what was left out or put otherwise, in words."""
    topic, uncut = _without_uncut(topic, instrument)
    topic, within = _as_equal(topic)
    topic, sooner = _in_less_time(topic)
    topic, unharmed = _without_unharmed(topic, instrument)
    return topic, [*uncut, *within, *sooner, *unharmed]


def _without_uncut(topic: str, instrument: Instrument) -> tuple[str, list[str]]:
    """`with top-p 1.0`, which leaves sampling as it is; not where the instrument has such a factor, or it is compared."""
    notes: list[str] = []
    own = {keys for factor in instrument.factors for keys in phrases_of(factor)}

    def taken(match: re.Match[str]) -> str:
        name = re.sub(r"[\s_-]?([pk])$", r"_\1", match["name"].lower())
        if phrase(name) in own or float(match["value"]) not in UNCUT.get(name, (0,)):
            return match.group()
        notes.append(f"{match['said']!r} cuts nothing from what is sampled, as in every study.")
        return " "

    return _UNCUT.sub(taken, topic), notes


def _as_equal(topic: str) -> tuple[str, list[str]]:
    """`within one standard error of`: the same as; `with standard errors`: as every report. Raises: PlanningRefused where errors say how large an effect has to be."""
    by = _BY_ERRORS.search(topic)
    if by is not None:
        raise PlanningRefused(
            f"{by.group()!r} reads as the size of an effect, and the smallest effect of interest is fixed for each metric. Ask "
            "the same question without it",
            [by.group()],
        )
    within = _WITHIN_ERRORS.search(topic)
    if within is None:
        return _REPORTED_ERRORS.sub("", topic), []
    note = f"{within.group()!r} is read as no different from: within the margin of the metric, which is fixed."
    return _WITHIN_ERRORS.sub("the same as", topic), [note]


def _in_less_time(topic: str) -> tuple[str, list[str]]:
    """`in half the time`, `in half the time of 16`: in less time, than 16."""
    notes: list[str] = []

    def less(match: re.Match[str]) -> str:
        verb = match["said"].split()[0]
        notes.append(f"{match['said']!r} is read as {verb} less time, whatever its size.")
        return f"{verb} less time than" if match["of"] else f"{verb} less time"

    return _PART_OF_TIME.sub(less, topic), notes


def _without_unharmed(topic: str, instrument: Instrument) -> tuple[str, list[str]]:
    """The topic without `without hurting accuracy`, where something else is measured.

    Where nothing else is, `can the group size be halved without hurting accuracy?` asks about just that.
    """
    for metric in instrument.metrics:
        pattern = re.compile(rf"{_UNHARMED}(?:{_spelled((metric.name, *metric.aliases))})\b", re.IGNORECASE)
        said = pattern.search(topic)
        if said is None:
            continue
        rest = topic[: said.start()] + topic[said.end() :]
        if any(isinstance(m.what, Metric) and m.what != metric for m in mentions(instrument, tokens(rest))):
            note = f"{said.group().lstrip(', ')!r} is no part of the verdict: {metric.name} is reported beside it."
            return rest, [note]
    return topic, []


def put_plainly(topic: str, instrument: Instrument) -> str:
    """`freezing the planner` sets its learning rate to 0.

    Raises: PlanningRefused for what no plan holds: seeds that begin somewhere, arms of equal cost, an `n` of either of two things, decimals with a comma, `several` orders of magnitude, a model that cannot be frozen.
    """
    matched = _AT_EQUAL_COST.search(topic)
    if matched is not None:
        raise PlanningRefused(
            f"{matched.group()!r} asks for arms that cost the same, and here all arms make equally many steps; ask it without, and "
            "set what a trial costs against what it learnt in the report (wall_s, tokens)",
            [metric.name for metric in instrument.metrics],
        )
    begun = _SEEDS_FROM.search(topic) or _SEED_NUMBER.search(topic) or _SEED_NUMBERS.search(topic)
    if begun is not None:
        raise PlanningRefused(
            f"{begun.group()!r} says which seeds to take, which the topic cannot: leave it out, and give "
            f"`--first-seed {begun[1]}`",
            [f"--first-seed {begun[1]}"],
        )
    alone = _LONE_N.search(topic)
    if alone is not None and len(re.findall(r"\bn\s*=", topic, re.IGNORECASE)) == 1:
        raise PlanningRefused(
            f"{alone[1]!r} may be the number of seeds or the size of a group: write '{alone[2]} seeds' or 'group size {alone[2]}'",
            [f"{alone[2]} seeds", f"group size {alone[2]}"],
        )
    comma = re.search(r"(?<![\w,.])0,(\d+)(?![\d,.]*\d|e[-+]?\d)", topic)
    if comma is not None:
        raise PlanningRefused(
            f"{comma.group()!r} may be one number or two: decimals take a point (0.{comma[1]}), and levels a space behind the comma",
            [f"0.{comma[1]}"],
        )
    orders = _VAGUE_ORDERS.search(topic)
    if orders is not None:
        raise PlanningRefused(
            f"{orders.group()!r} does not say by how many: write a whole number (two orders of magnitude), or name the level itself",
            ["an order of magnitude"],
        )
    named = {factor.name for factor in instrument.factors}
    for role in instrument.roles:
        if f"{role}_learning_rate" in named:
            topic = _without_training(topic, role, instrument)
    frozen = (
        re.search(rf"{_FREEZING}{_A_MODEL}", topic, re.IGNORECASE)
        or re.search(rf"\b{_A_MODEL}\s+{_FROZEN}", topic, re.IGNORECASE)
        if instrument.roles
        else None
    )
    only = re.search(rf"\btraining\s+{_ONLY_THE}(?:{_spelled(instrument.roles)})\b", topic, re.IGNORECASE)
    if frozen is not None or (instrument.roles and only is not None):
        can = [role for role in instrument.roles if f"{role}_learning_rate" in named]
        freezing = "".join(f"{role}_learning_rate 0 freezes the {role} alone, " for role in can)
        what = frozen[1] if frozen is not None else "what else is trained"
        raise PlanningRefused(
            f"{what!r} cannot be frozen by itself in {instrument.name}: {freezing}learning_rate 0 freezes all models",
            [*(f"{role}_learning_rate" for role in can), "learning_rate"],
        )
    return topic


def _without_training(topic: str, role: str, instrument: Instrument) -> str:
    """`with the planner frozen`, `training the solver alone`, against `training both`: the learning rate of that role."""
    name = _spelled((role,))
    own = next(factor for factor in instrument.factors if factor.name == f"{role}_learning_rate")
    frozen, trained = f"with {role} learning rate 0", f"{role} learning rate {own.default}"
    topic = re.sub(rf"{_FREEZING}{name}\b", frozen, topic, flags=re.IGNORECASE)
    topic = re.sub(rf"\b(?:with\s+)?(?:the\s+)?{name}\s+{_FROZEN}", frozen, topic, flags=re.IGNORECASE)
    other = rf"(?!{name}\b){_A_MODEL}"
    alone = rf"\btraining\s+(?:{_ONLY_THE}{other}|(?:the\s+)?{other}\s+(?:only|alone))"
    both = rf"\btraining\s+(?:both(?:\s+models)?|(?:the\s+)?{name}\s+too|both)(?:\s+(?:of\s+)?(?:the\s+)?\w+\s+and\s+(?:the\s+)?{_A_MODEL})?"
    return re.sub(
        both, trained, re.sub(alone, frozen.removeprefix("with "), topic, flags=re.IGNORECASE), flags=re.IGNORECASE
    )


def _spelled(names: Iterable[str]) -> str:
    """Any of these names, with spaces, hyphens or underscores between its words."""
    longest = sorted(names, key=len, reverse=True)
    return "|".join(r"[\s_\-]+".join(re.escape(word) for word in re.split(r"[\s_\-]+", name)) for name in longest)
