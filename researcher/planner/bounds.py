"""Limits in a topic that the spec must respect, and names in a spec that only a person may choose.

Scans for numbers with units and for names; does not parse sentences. Each kind of bound belongs to certain fields of the spec. A
bound that those fields do not respect must be listed in `uncovered`, with a reason.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from foundation.durations import duration_s
from researcher.instruments.instrument import STUDY_MODEL, STUDY_STEPS, Factor, Instrument, Scalar
from researcher.study.spec import BASE, StudySpec
from swarm.models import catalogue as models

Kind = Literal["time", "days", "daily", "window", "seeds", "trials", "steps", "tokens", "model", "data", "hub"]
Side = Literal["exact", "least", "most", "first", "last"]

_DAY_S = 86_400.0
_FREE = r"(?<![A-Za-z0-9_.])"
_TO = r"\s*(?:-|–|\.\.|to|or|bis|oder|à|a|到|至)\s*"
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "million": 1e6, "millions": 1e6}

_COMPOUND = re.compile(rf"{_FREE}\d+\s*h\s*\d+\s*m(?:in)?\b", re.IGNORECASE)
_SHORT_MINUTES = re.compile(r"(?<![\w.-])(\d+)m\b(?!\s*-?\s*(?:param|model|weights|net|token))")
_CLOCK = re.compile(
    r"(?<![\d:.])(?:(\d{1,2}):(\d{2})(?:\s*([ap])\.?m\b)?|(\d{1,2})\s*([ap])\.?m\b)(?!:?\d)", re.IGNORECASE
)
_FULL_HOUR = re.compile(rf"(?<![\d:.])(?:(\d{{1,2}}){_TO})?(\d{{1,2}})\s*(?:uhr\b|点)", re.IGNORECASE)
_HUB = re.compile(r"(?<![\w./:@-])(hf:)?([A-Za-z][\w.-]+/[\w.-]*\w)(?![\w/])")
_SIZED = re.compile(r"(?<![\w./-])[A-Za-z][\w.]*(?:-[\w.]+)*-\d+(?:\.\d+)?[mb]\b(?:-\w+)*", re.IGNORECASE)
_FILE = re.compile(r"[^\s\"'`“”‘’,;?()<>]+\.jsonl\b")


@dataclass(frozen=True, slots=True)
class Stated:
    """A bound or name found in the topic.

    `text` is its wording in the topic. `value` is in seconds, a clock time ("22:00"), a count or a name. `side` says which limit it
    is; `first` and `last` are the first and last seed, as in "seeds 3 to 7". `meant` is the effective limit: 5 for "fewer than 6".

    Kinds: `daily` counts hours per day; `model` is a name with a size; `data` is a file, or a name marked as a data set; `hub` is a
    hub name that may be a model or a data set.
    """

    kind: Kind
    text: str
    value: float | str
    side: Side = "exact"
    meant: float = 0.0


_LENGTHS = ("time", "days", "daily")


@cache
def _words() -> dict[str, Any]:
    """Return the parsed `bounds.toml`."""
    return tomllib.loads(Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8"))


@cache
def _n() -> str:
    """Return a regex for a number in digits or in words."""
    written = "|".join(sorted(map(re.escape, _words()["numbers"]), key=len, reverse=True))
    return rf"(?:\d{{1,3}}(?:,\d{{3}})+|\d+(?:[.,]\d+)?(?:e\d+)?|(?:{written}))"


def stated(topic: str) -> list[Stated]:
    """Return the times, clock times, counts and names in the topic, each once."""
    found = [*_times(topic), *_clock_times(topic), *_counts(topic), *_names(topic)]
    limits = {(each.kind, each.value) for each in found if each.side in ("least", "most")}
    # A number that was stated as a limit is the same limit when it is repeated.
    kept = [each for each in found if each.side != "exact" or (each.kind, each.value) not in limits]
    return list({(each.kind, each.value, each.side): each for each in kept}.values())


def lost(
    topic: str, spec: StudySpec, uncovered: Sequence[str], *, given: Mapping[str, Any], factors: Sequence[Factor]
) -> tuple[list[str], list[str]]:
    """Compare the topic's bounds with the spec.

    Args:
        uncovered: the planner's list of parts of the topic that the spec does not cover.
        given: spec fields that are set by command-line options.
        factors: factors of the spec's instrument.
    Returns: a problem for each bound missing from both the spec and `uncovered`; and an `uncovered` entry for each bound that an
    option overrules.
    """
    named = "\n".join(uncovered)
    named_bounds = {(each.kind, each.value) for each in stated(named)}
    problems, overruled = list[str](), list[str]()
    for each in stated(topic):
        said = each.text.casefold() in named.casefold() or (each.kind, each.value) in named_bounds
        if said or _holds(spec, each, factors):
            continue
        if _overrules(given, each, factors):
            overruled.append(f"{each.text}: an option says otherwise")
        else:
            counted = f" or a factor that counts {each.kind}" if each.kind in ("steps", "tokens") else ""
            problems.append(
                f"the topic says {each.text!r}, and the spec does not: set {' and '.join(_fields(each))}{counted}, or name "
                f"{each.text!r} in `uncovered` with the reason"
            )
    return list(dict.fromkeys(problems)), list(dict.fromkeys(overruled))


def invented(spec: StudySpec, instrument: Instrument, said: str) -> list[str]:
    """Return a problem for each model, file, data set or text in the spec that no person named. `said` is everything people wrote."""
    problems = [
        f"{what} {name!r} is not in the topic, spelled exactly so: only the topic's author may name it"
        for what, name in _named_by_people(spec, instrument)
        if not _stands(name, said)
    ]
    return list(dict.fromkeys(problems))


def _times(topic: str) -> Iterator[Stated]:
    for match in _COMPOUND.finditer(topic):
        yield _limited("time", topic, match, duration_s(re.sub(r"\s", "", match.group()).lower()) or 0.0)
    rest = _COMPOUND.sub(lambda match: " " * len(match.group()), topic)
    for match in _SHORT_MINUTES.finditer(rest):
        yield _limited("time", rest, match, 60 * float(match[1]))
    words = _words()
    daily = re.compile(rf"\s*(?:{words['daily']})\s+(?:{words['day']})(?![A-Za-z])", re.IGNORECASE)
    for length, unit in words["times"].items():
        for match in re.finditer(rf"{_FREE}({_n()})[\s-]*(?:{unit})(?![A-Za-zäöü])", rest, re.IGNORECASE):
            kind: Kind = "days" if int(length) >= _DAY_S else "daily" if daily.match(rest, match.end()) else "time"
            yield _limited(kind, rest, match, int(length) * _number(match[1]))


def _limited(kind: Kind, topic: str, match: re.Match[str], value: float) -> Stated:
    """Return the bound for the matched number; the words before and after it say whether it is a minimum, a maximum or exact."""
    before, after = topic[: match.start()], topic[match.end() :]
    for each in _words()["before"]:
        if re.search(rf"(?<![A-Za-z])(?:{each['words']})\s*$", before, re.IGNORECASE):
            beside = 0 if kind in _LENGTHS else each.get("beside", 0)
            return Stated(kind, match.group(), value, each["side"], value + beside)
    for each in _words()["after"]:
        shared = r"(?:\s+(?:each|per \w+))?"
        if re.match(rf"{shared}\s*(?:{each['words']})(?![A-Za-z])(?!\s*{_n()})", after, re.IGNORECASE):
            return Stated(kind, match.group(), value, each["side"], value)
    return Stated(kind, match.group(), value, "exact", value)


def _clock_times(topic: str) -> Iterator[Stated]:
    for match in _CLOCK.finditer(topic):
        hour, half = int(match[1] or match[4]), (match[3] or match[5] or "").lower()
        hour = hour % 12 + 12 * (half == "p") if half else hour
        yield Stated("window", match.group(), f"{hour:02}:{match[2] or '00'}")
    for match in _FULL_HOUR.finditer(topic):
        yield from (Stated("window", match.group(), f"{int(hour):02}:00") for hour in match.groups() if hour)


def _counts(topic: str) -> Iterator[Stated]:
    words = _words()
    between = rf"(?:{words['between']})\s+({_n()})\s+(?:{words['and']})\s+"
    for kind, noun in words["counts"].items():
        scale = r"\s*(k|m|millions?)?" if kind == "tokens" else "()"
        counted = rf"{_FREE}(?:{between}|({_n()}){_TO})?({_n()}){scale}[\s-]*(?:{noun})(?![A-Za-zäöü])"
        for match in re.finditer(counted, topic, re.IGNORECASE):
            factor, low = _SCALES[(match[4] or "").lower()], match[1] or match[2]
            if low is not None and _counted(kind, low):
                yield Stated(kind, match.group(), factor * _number(low), "least", factor * _number(low))
            if _counted(kind, match[3]):
                high = factor * _number(match[3])
                yield Stated(kind, match.group(), high, "most", high) if low else _limited(kind, topic, match, high)
    for match in re.finditer(rf"\bseeds?\s*[:=]?\s*(\d+){_TO}(\d+)", topic, re.IGNORECASE):
        yield Stated("seeds", match.group(), float(match[1]), "first")
        yield Stated("seeds", match.group(), float(match[2]), "last")


def _counted(kind: Kind, number: str) -> bool:
    """Return whether the number word is a count. In "in one step" it is not."""
    return kind == "seeds" or number.lower() not in ("one", "an", "eine", "一")


def _names(topic: str) -> Iterator[Stated]:
    """Find hub names, models with a size, and files. Names need both letters and digits, so `alpha/rank` and `4/8` are skipped."""
    written: list[tuple[Kind, str, bool]] = [("data", match.group(), True) for match in _FILE.finditer(topic)]
    for match in _HUB.finditer(topic):
        marked, sized = match[1] is not None, _SIZED.fullmatch(match[2].partition("/")[2]) is not None
        written.append(("data" if marked else "model" if sized else "hub", match[2], marked))
    written += [("model", match.group(), False) for match in _SIZED.finditer(topic)]
    for kind, name, certain in written:
        if certain or (re.search(r"\d", name) and re.search(r"[A-Za-z]{2}", name)):
            yield Stated(kind, name, name)


def _number(text: str) -> float:
    plain = text.lower()
    if plain in _words()["numbers"]:
        return float(_words()["numbers"][plain])
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+", plain)
    return float(plain.replace(",", "" if grouped else "."))


def _holds(spec: StudySpec, each: Stated, factors: Sequence[Factor]) -> bool:
    seeds, windows = spec.seeds, spec.schedule.windows
    match each.kind, each.side:
        case "window", _:
            return any(str(each.value) in window for window in windows)
        case "daily", _:
            return any(_within(each, length) for length in map(_length_s, windows))
        case "model" | "data" | "hub", _:
            return _names_it(spec, str(each.value))
        case "time" | "days", _:
            days = None if spec.schedule.days is None else spec.schedule.days * _DAY_S
            return _within(each, spec.budget.wall) or _within(each, days)
        case "seeds", "first":
            return seeds.first == each.value
        case "seeds", "last":
            return all(count is not None and seeds.first + count - 1 == each.value for count in (seeds.min, seeds.max))
        case "seeds", side:
            ends = {"least": (seeds.min,), "most": (seeds.max,)}.get(side, (seeds.min, seeds.max))
            return all(_within(each, end) for end in ends)
        case "trials", _:
            return _within(each, spec.budget.trials)
        case _:
            held = spec.budget.tokens if each.kind == "tokens" else spec.steps
            return _within(each, held) or _a_factor_holds(spec, each, factors)


def _names_it(spec: StudySpec, name: str) -> bool:
    """Return whether the spec contains this model, file or hub name anywhere."""
    texts = [level for _, level in _settings(spec) if isinstance(level, str)]
    written = any(
        name.casefold() in text.casefold() for text in (*spec.models, *texts, spec.start_from, spec.instrument)
    )
    return written or models.hosted_name(name) in map(models.hosted_name, _asked_models(spec))


def _length_s(window: str) -> float | None:
    """Return the daily length of a time window in seconds, or None if the text is not a window."""
    ends = re.findall(r"(\d{1,2}):(\d{2})", window)
    if len(ends) != 2:
        return None
    begins, closes = (3600.0 * int(hour) + 60.0 * int(minute) for hour, minute in ends)
    return (closes - begins) % _DAY_S or _DAY_S


def _within(each: Stated, held: float | None) -> bool:
    if held is None:
        return False
    near = 0.01 * each.meant if each.kind in _LENGTHS else 0.0
    above, below = held >= each.meant - near, held <= each.meant + near
    return above if each.side == "least" else below if each.side == "most" else above and below


def _fields(each: Stated) -> list[str]:
    """Return the spec fields that can satisfy this bound."""
    fields: list[str] = _words()["fields"].get(f"{each.kind}.{each.side}") or _words()["fields"][each.kind]
    return fields


def _a_factor_holds(spec: StudySpec, each: Stated, factors: Sequence[Factor]) -> bool:
    """Return whether a factor whose name contains the bound's unit, such as `warmup_steps`, has the stated number as a level."""
    names = {factor.name: (factor.name, *factor.aliases) for factor in factors}
    return any(
        level in (each.value, each.meant) and not isinstance(level, bool)
        for factor, level in _settings(spec)
        if any(each.kind in re.split(r"[\W_]+", name) for name in names.get(factor, (factor,)))
    )


def _overrules(given: Mapping[str, Any], each: Stated, factors: Sequence[Factor]) -> bool:
    """Return whether an option already sets what this bound is about. For a name that may be a model or data, both must be set."""
    arms = given.get("arms", {}).values()
    sets = {name for settings in (given.get("set", {}), given.get("compare", {}), *arms) for name in settings}
    targets = {factor.target for factor in factors if factor.name in sets}
    model = "model" in given or "model" in sets or STUDY_MODEL in targets
    data = [factor.name in sets for factor in factors if factor.type == "data"]
    match each.kind:
        case "model":
            return model
        case "data":
            return bool(data) and all(data)
        case "hub":
            return model and all(data)
        case "steps":
            return "steps" in given or STUDY_STEPS in targets
        case _:
            paths = [field.partition(".") for field in _fields(each)]
            return any(name in given.get(within, {}) for within, _, name in paths)


def _settings(spec: StudySpec) -> Iterator[tuple[str, Scalar]]:
    """Yield every level in the spec as (factor name, level)."""
    for name, compared in spec.compare.items():
        yield from ((name, level) for level in (compared.baseline, *compared.levels) if level is not None)
    yield from spec.set.items()
    for arm in spec.arms.values():
        yield from arm.items()


def _asked_models(spec: StudySpec) -> list[str]:
    return [*spec.models, *(str(level) for name, level in _settings(spec) if name == "model")]


def _named_by_people(spec: StudySpec, instrument: Instrument) -> Iterator[tuple[str, str]]:
    factors = {factor.name: factor for factor in instrument.factors}
    offered = [str(each) for factor in instrument.factors if factor.target == STUDY_MODEL for each in factor.choices]
    for name in _asked_models(spec):
        if name not in (instrument.model, *offered) and models.find(name) is None:
            yield "the model", name
    for name, level in _settings(spec):
        factor = factors.get(name)
        if factor is not None and factor.type in ("text", "data") and level != factor.default:
            yield name, str(level).removeprefix("hf:")
        elif factor is not None and factor.takes_functions and level not in factor.choices:
            yield name, str(level)
    if spec.start_from != BASE:
        yield "start_from", spec.start_from
    yield from (("notify", name) for name in spec.notify)


def _stands(name: str, said: str) -> bool:
    """Return whether people wrote the name as a whole word: `secrets.jsonl` does not contain `secret`."""
    return bool(name) and bool(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w/-]|\.\w)", said))
