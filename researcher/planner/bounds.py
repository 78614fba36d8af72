"""What a topic states that no spec may lose, and what a spec names that only a person may name.

A scan for numbers with units and for names that are written out; nothing here reads a sentence. What the scan finds and the spec
does not hold has to be named in `uncovered`, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from foundation.durations import duration_s
from researcher.instruments.instrument import STUDY_MODEL, Instrument, Scalar
from researcher.study.spec import StudySpec
from swarm.models import catalogue as models

_DAY_S = 86_400.0
_WORDS: dict[str, float] = {
    "half an": 0.5, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "twenty": 20, "eine": 1, "einen": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7,
    "acht": 8, "neun": 9, "zehn": 10, "zwölf": 12, "deux": 2, "trois": 3, "quatre": 4, "cinq": 5, "huit": 8, "dos": 2, "tres": 3,
    "cuatro": 4, "cinco": 5, "ocho": 8, "一": 1, "两": 2, "二": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8, "九": 9, "十": 10,
}  # fmt: skip
_TIMES = {
    "h|hours?|hrs?|stunden?|heures?|horas?|ore|个?小时|時間": 3600.0,
    "min|mins|minutes?|minuten?|minutos?|分钟": 60.0,
    "days?|nights?|tagen?|tage|nächten?|jours?|nuits?|días?|noches?|天|晚|日間": _DAY_S,
    "weeks?|wochen?|semaines?|semanas?|个?星期|周": 7 * _DAY_S,
}
_COUNTS = {
    "seeds": "(?:random |different |fresh |independent )?seeds?|startwerten?|(?:个?(?:随机)?种子)|graines?|semillas?",
    "trials": "trials?|versuche?n?|次试验",
    "steps": "(?:training |optimi[sz]er )?steps?|schritten?|schritte|步",
    "tokens": "tokens?",
}
_WRITTEN = "|".join(sorted(map(re.escape, _WORDS), key=len, reverse=True))
_N = rf"(?:\d{{1,3}}(?:,\d{{3}})+|\d+(?:[.,]\d+)?(?:e\d+)?|(?:{_WRITTEN}))"
_FREE = r"(?<![A-Za-z0-9_.])"
_TO = r"\s*(?:-|–|\.\.|to|or|bis|oder|à|a|到|至)\s*"
_LESS = re.compile(r"(?:fewer|less|under|below|weniger als|moins de|menos de|少于)\s*(?:than)?\s*$", re.IGNORECASE)
_MORE = re.compile(r"(?:more|over|above|mehr als|plus de|más de|多于)\s*(?:than)?\s*$", re.IGNORECASE)
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
    """kind: time, window, seeds, trials, steps, tokens or name. text: as it stands in the topic. meant: of "fewer than 6", 5."""

    kind: str
    text: str
    value: float | str
    meant: float | None = None


_FIELDS = {
    "time": "budget.wall or schedule.days",
    "window": "schedule.windows",
    "seeds": "seeds",
    "trials": "budget.trials",
    "steps": "steps",
    "tokens": "budget.tokens",
    "name": "model or set",
}


def stated(topic: str) -> list[Stated]:
    """Times, clock times, counts and names that stand in the topic, each once."""
    found = [*_times(topic), *_clock_times(topic), *_counts(topic), *_names(topic)]
    return list({(each.kind, each.value): each for each in found}.values())


def lost(topic: str, spec: StudySpec, uncovered: Sequence[str], fixed: Collection[str]) -> tuple[list[str], list[str]]:
    """The bounds that neither the spec nor `uncovered` holds: a problem for each, and those that an option of a person's
    overrules, as entries of `uncovered`. fixed: the fields that options have set."""
    named = "\n".join(uncovered)
    named_bounds = {(each.kind, each.value) for each in stated(named)}
    problems, overruled = list[str](), list[str]()
    for each in stated(topic):
        said = each.text.casefold() in named.casefold() or (each.kind, each.value) in named_bounds
        if said or _holds(spec, each):
            continue
        fields = _FIELDS[each.kind]
        if any(name in fixed for name in re.findall(r"[a-z]+", fields)):
            overruled.append(f"{each.text}: an option says otherwise")
        else:
            problems.append(
                f"the topic says {each.text!r}, and the spec does not: set {fields}, or name {each.text!r} in `uncovered` "
                "with the reason"
            )
    return problems, overruled


def invented(spec: StudySpec, instrument: Instrument, said: str) -> list[str]:
    """One problem for each model, file, data set or text in the spec that nobody has named. said: all that people wrote."""
    problems = [
        f"{what} {name!r} does not stand in the topic as it is: only its author may name one"
        for what, name in _named_by_people(spec, instrument)
        if not _stands(name, said)
    ]
    return list(dict.fromkeys(problems))


def _times(topic: str) -> Iterator[Stated]:
    for match in _COMPOUND.finditer(topic):
        text = re.sub(r"\s", "", match.group()).lower()
        yield Stated("time", match.group(), duration_s(text) or 0.0)
    rest = _COMPOUND.sub(" ", topic)
    for match in _SHORT_MINUTES.finditer(rest):
        yield Stated("time", match.group(), 60 * float(match[1]))
    for unit, length in _TIMES.items():
        for match in re.finditer(rf"{_FREE}({_N})[\s-]*(?:{unit})(?![A-Za-zäöü])", rest, re.IGNORECASE):
            yield Stated("time", match.group(), length * _number(match[1]))


def _clock_times(topic: str) -> Iterator[Stated]:
    for match in _CLOCK.finditer(topic):
        hour, half = int(match[1] or match[4]), (match[3] or match[5] or "").lower()
        hour = hour % 12 + 12 * (half == "p") if half else hour
        yield Stated("window", match.group(), f"{hour:02}:{match[2] or '00'}")
    for match in _FULL_HOUR.finditer(topic):
        yield from (Stated("window", match.group(), f"{int(hour):02}:00") for hour in match.groups() if hour)


def _counts(topic: str) -> Iterator[Stated]:
    for kind, noun in _COUNTS.items():
        scale = r"\s*(k|m|millions?)?" if kind == "tokens" else "()"
        for match in re.finditer(
            rf"{_FREE}(?:({_N}){_TO})?({_N}){scale}[\s-]*(?:{noun})(?![A-Za-zäöü])", topic, re.IGNORECASE
        ):
            factor, before = _SCALES[(match[3] or "").lower()], topic[: match.start()]
            beside = -1 if _LESS.search(before) else 1 if _MORE.search(before) else 0
            for number in (match[1], match[2]):
                if number is not None and not (kind != "seeds" and number.lower() in ("one", "an", "eine", "一")):
                    value = factor * _number(number)
                    yield Stated(kind, match.group(), value, value + beside if beside else None)
    for match in re.finditer(rf"\bseeds?\s*[:=]?\s*(\d+){_TO}(\d+)", topic, re.IGNORECASE):
        yield from (Stated("seeds", match.group(), float(number)) for number in match.groups())


def _names(topic: str) -> Iterator[Stated]:
    """Hub names, models by their size, files. `alpha/rank` and `4/8` are none: a name has letters and digits."""
    written = [(match.group(), True) for match in _FILE.finditer(topic)]
    written += [(match[2], match[1] is not None) for match in _HUB.finditer(topic)]
    written += [(match.group(), False) for match in _SIZED.finditer(topic)]
    for name, certain in written:
        if certain or (re.search(r"\d", name) and re.search(r"[A-Za-z]{2}", name)):
            yield Stated("name", name, name)


def _number(text: str) -> float:
    plain = text.lower()
    if plain in _WORDS:
        return _WORDS[plain]
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+", plain)
    return float(plain.replace(",", "" if grouped else "."))


def _holds(spec: StudySpec, each: Stated) -> bool:
    if each.kind == "window":
        return any(str(each.value) in window for window in spec.schedule.windows)
    if each.kind == "name":
        document = spec.document() | {"question": ""}
        written = str(each.value).casefold() in json.dumps(document, ensure_ascii=False).casefold()
        return written or models.hosted_name(str(each.value)) in map(models.hosted_name, _asked_models(spec))
    value, meant = float(each.value), each.meant
    if each.kind == "time":
        days = None if spec.schedule.days is None else spec.schedule.days * _DAY_S
        return any(held is not None and abs(held - value) < 0.01 * value for held in (spec.budget.wall, days))
    if each.kind == "seeds":
        seeds = spec.seeds
        last = [seeds.first + count - 1 for count in (seeds.min, seeds.max) if count is not None]
        return bool(({value, meant} - {None}) & {seeds.min, seeds.max, seeds.first, *last})
    own = {"trials": (spec.budget.trials, spec.fine), "tokens": (spec.budget.tokens,), "steps": (spec.steps,)}
    levels = [level for _, level in _settings(spec) if not isinstance(level, str)]
    return bool(({value, meant} - {None}) & {*own[each.kind], *levels})


def _settings(spec: StudySpec) -> Iterator[tuple[str, Scalar]]:
    """Every level that the spec names, by its factor."""
    for name, compared in spec.compare.items():
        yield from ((name, level) for level in (compared.baseline, *compared.levels) if level is not None)
    yield from spec.set.items()
    for arm in spec.arms.values():
        yield from arm.items()


def _asked_models(spec: StudySpec) -> list[str]:
    return [*spec.models, *(str(level) for name, level in _settings(spec) if name == "model")]


def _named_by_people(spec: StudySpec, instrument: Instrument) -> Iterator[tuple[str, str]]:
    factors = {factor.name: factor for factor in instrument.factors}
    known = {
        instrument.model,
        *(str(each) for f in instrument.factors if f.target == STUDY_MODEL for each in f.choices),
    }
    yield from (("the model", name) for name in _asked_models(spec) if name not in known and models.find(name) is None)
    for name, level in _settings(spec):
        factor = factors.get(name)
        if factor is not None and factor.type in ("text", "data") and level != factor.default:
            yield f"{name}", str(level).removeprefix("hf:")
    if spec.start_from != "base":
        yield "start_from", spec.start_from
    yield from (("notify", name) for name in spec.notify)


def _stands(name: str, said: str) -> bool:
    """As a whole: `secret` does not stand in `secrets.jsonl`."""
    return bool(name) and bool(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w/-]|\.\w)", said))
