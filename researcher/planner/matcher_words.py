"""The words of a topic: bounds taken out, then every word named as a factor, a level, a metric, an instrument or a way to compare.

Knows what instruments declare and the tables of `matcher.toml`; how a study follows from it is for `matcher.py`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from foundation.durations import duration_s
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.study.spec import duration_text
from swarm.models.catalogue import CATALOGUE

Kind = Literal[
    "factor", "level", "number", "times", "metric", "class", "instrument", "model", "mark", "stop", "unknown"
]
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("matcher.toml").read_text(encoding="utf-8"))
SCREENED: list[str] = _TABLE["shared"]["screen"]
SWITCHED_ON: dict[str, float] = _TABLE["shared"]["on"]
_NUMBER_WORDS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
).split()
_DIGITS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS, 2)} | {
    "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "hundred": "100",
}  # fmt: skip
_NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+"
_LENGTH = (
    r"\d+(?:\.\d+)? ?(?:hours?|hrs?|h|minutes?|mins?|min|m|seconds?|secs?|days?|d)(?: ?\d+ ?(?:minutes?|min|m))?\b"
)
_TOKEN = re.compile(
    rf"(?P<times>(?:{_NUMBER})[x×](?![a-z0-9]))|(?P<number>(?:{_NUMBER})(?![\w%]|\.\d))|(?P<word>[a-z_][a-z0-9_+]*(?:'[a-z]+)?)"
    r"|(?P<odd>[\w.]*\w%?)|(?P<mark>->|>=|<=|[^\s\w])"
)
_HUB = re.compile(r"(?<![\w/.:-])[A-Za-z][\w.-]*/[A-Za-z][\w.-]*\w")
_DATA = re.compile(r"hf:[\w.-]+/[\w.-]*\w|(?<![\w/.])[\w./~-]+\.jsonl\b")
_MARKS = ",.?!:;()[]{}/-|&'\"`*~"
_COUNTED = frozenset(
    "number numbers problem problems question questions model models task tasks agent agents sizes values".split()
)
_SIZED = re.compile(r"\d[bm]\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Item:
    """A phrase that is understood, or one word that is not. what: a factor's, metric's, class's or instrument's name.
    value: of a level or a number. led: the preposition before it."""

    kind: Kind
    text: str
    what: str = ""
    value: Scalar | None = None
    led: str = ""

    def isa(self, *classes: str) -> bool:
        return self.kind == "class" and self.what in classes


@dataclass(slots=True)
class Said:
    """A topic without its bounds and models. fields: what those say, by dotted path of the spec."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def normal(text: str) -> str:
    """Lower case, plain dashes and quotes, powers of ten and numerals in digits."""
    text = re.sub(
        r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: "^" + m[0].translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")), text
    )
    text = text.translate(
        str.maketrans({"−": "-", "–": "-", "—": " - ", "‐": "-", "‑": "-", "’": "'", "→": " -> ", "≥": ">=", "≤": "<="})
    )
    text = text.lower().replace("β", " beta ").replace("η", " learning rate ")
    text = re.sub(r"(\d+(?:\.\d+)?)\s*[x×*·]\s*10\s*(?:\^|\*\*)?\s*[({]?(-\d+)[)}]?", r"\1e\2", text)
    text = re.sub(r"\b10\s*(?:\^|\*\*)\s*[({]?(-\d+)[)}]?", r"1e\1", text)
    return re.sub(r"\b[a-z]+\b", lambda m: _DIGITS.get(m[0], m[0]), text)


def said(topic: str) -> Said:
    """The topic with its models and bounds taken out, in the words that the tables know."""
    found = Said("")

    def file(match: re.Match[str]) -> str:
        found.data.append(match[0])
        return f" datafile{'abcdefgh'[len(found.data) % 8]} "

    text = normal(_without_models(_DATA.sub(file, topic), found))
    for each in _TABLE["rewrites"]:
        text = re.sub(each["said"], each["meant"], text)
    for each in _TABLE["bounds"]:
        pattern = (
            each["said"]
            .replace("{n}", r"(?P<n>\d+)")
            .replace("{m}", r"(?P<m>\d+)")
            .replace("{k}", r"(?P<k>\d+)")
            .replace("{d}", f"(?P<d>{_LENGTH})")
        )
        text = re.sub(
            rf"(?<![\w.]){pattern}(?![\w-]|\.\d| (?:per|each|a) | apart)",
            lambda m, e=each: _bound(m, e["set"], found),
            text,
        )
    found.text = text
    return found


def _without_models(topic: str, found: Said) -> str:
    def named(match: re.Match[str]) -> str:
        name = match[0].rpartition("/")[2]
        if not _SIZED.search(match[0]) and not (re.search(r"[A-Z]", name) and re.search(r"-|\d", name)):
            return match[0]
        found.models.append(match[0])
        return " modelname "

    text = _HUB.sub(named, topic)
    for known in CATALOGUE:
        size = known.name.rpartition("-")[2]
        for name in (
            *sorted((known.name, *known.aliases), key=len, reverse=True),
            rf"{size}( (?:parameter )?models?)?",
        ):
            pattern = name if name.startswith(size) else re.escape(name)
            text, count = re.subn(rf"(?<![\w/.-]){pattern}(?![\w-])", " modelname ", text, flags=re.IGNORECASE)
            found.models += [known.name] * bool(count)
    found.models[:] = sorted(
        dict.fromkeys(found.models), key=lambda name: topic.lower().find(name.rpartition("-")[2].lower())
    )
    return text


def _bound(match: re.Match[str], fields: dict[str, str], found: Said) -> str:
    for group, path in fields.items():
        written = match[group]
        if written is None:
            continue
        if path == "budget.wall":
            path, value = _length(written)
        elif path == "budget.tokens":
            value = written
        elif path == "schedule.windows":
            value = written if path not in found.fields else f"{found.fields[path]}-{written}"
        else:
            value = float(written) if path == "margin" else int(written)
        if path in found.fields and path != "schedule.windows":
            found.problems.append(f"The topic gives {path} twice: {found.fields[path]} and {value}.")
        found.fields[path] = value
    return " | "


def _length(written: str) -> tuple[str, Any]:
    text = re.sub(r"(h)(ou)?rs?|(m)in(ute)?s?|(s)ec(ond)?s?|(d)ays?", lambda m: m[0][0], written.replace(" ", ""))
    if re.fullmatch(r"\d+d", text):
        return "schedule.days", int(text[:-1])
    return "budget.wall", duration_text(duration_s(text) or 0)


@cache
def keys(text: str) -> tuple[str, ...]:
    """The words of a phrase as they are compared: singular, without hyphens."""
    return tuple(_key(token) for token in re.findall(r"[\w+']+|[/:]", normal(text).replace("_", " ").replace("-", " ")))


def _key(word: str) -> str:
    word = word.removesuffix("'s")
    if word == "seconds":  # of time, and no ordinal
        return word
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


@cache
def _classes() -> dict[tuple[str, ...], Item]:
    listed = {keys(word): Item("stop", word) for word in _TABLE["stop"].split()}
    for name, line in _TABLE["classes"].items():
        listed |= {keys(word): Item("class", word, name) for word in line.split()}
    return listed


def vocabulary(instrument: Instrument, named: Iterable[str], data: Sequence[str] = ()) -> dict[tuple[str, ...], Item]:
    """Every phrase of one instrument and of the tables. named: factors that the topic names, whose choices may stand alone."""
    classes = _classes()
    listed = dict(classes) | {
        keys(instrument.model.partition("-")[0]): Item("stop", instrument.model),
        ("modelname",): Item("model", "model"),
    }
    for word in (instrument.name, *instrument.keywords):
        if keys(word) not in classes or len(keys(word)) > 1:
            listed[keys(word)] = Item("instrument", word, instrument.name)
    for metric in instrument.metrics:
        for name in (metric.name, *metric.aliases):
            phrase = keys(name)
            says = {classes[(word,)].what for word in phrase if (word,) in classes}
            way = 1 if says & {"more", "better", "faster"} else -1 if says & {"less", "worse", "slower"} else None
            if way is None or not all((word,) in classes for word in phrase):
                listed[phrase] = Item("metric", name, metric.name, way)
    listed |= {keys(word): Item("metric", word, name, way) for word, (name, way) in _TABLE["shared"]["metrics"].items()}
    shared = _TABLE["shared"]
    for factor in instrument.factors:
        for name in (factor.name, *factor.aliases, *shared["aliases"].get(factor.name, ())):
            listed[keys(name)] = Item("factor", name, factor.name)
        if factor.name in shared["bare"] or factor.proper or factor.name in named:
            listed |= {
                keys(str(c)): Item("level", str(c), factor.name, c)
                for c in factor.choices
                if str(c) not in ("none", "full")
            }
            listed |= {keys(f"{factor.name} {c}"): Item("level", str(c), factor.name, c) for c in factor.choices}
    names = {factor.name for factor in instrument.factors}
    if "data" in names:
        listed |= {
            (f"datafile{'abcdefgh'[n % 8]}",): Item("level", path, "data", path) for n, path in enumerate(data, 1)
        }
    listed |= {
        keys(word): Item("level", word, name, value)
        for word, (name, value) in shared["values"].items()
        if name in names
    }
    return listed


def choose_instrument(text: str, folders: Sequence[InstrumentFolder]) -> tuple[list[InstrumentFolder], bool]:
    """The instruments that the topic may be about, and whether it names one. A general one answers where none is named."""
    words = [_key(token) for token in re.findall(r"[\w+']+", text.replace("-", " ").replace("_", " "))]
    ordinary = {key for phrase in _classes() for key in phrase} | {
        "number",
        "digit",
        "together",
        "mix",
        "mixed",
        "share",
        "range",
    }
    hits: dict[str, set[int]] = {}
    for folder in folders:
        instrument = folder.instrument
        known = [keys(word) for word in (instrument.name, *instrument.keywords)]
        if any(factor.type == "data" for factor in instrument.factors):
            known += [("datafileb",)]
        own = [
            keys(name)
            for each in instrument.factors
            if not each.target.startswith(
                ("run.optim", "run.algo", "run.samp", "run.param", "run.max", "run.batch.t", "run.batch.g", "study.")
            )
            for name in (each.name, *each.aliases)
        ]
        for phrase in [*known, *[name for name in own if len(name) > 1]]:
            weight = 2 * len(phrase) + (phrase == known[0])
            for i in range(len(words) - len(phrase) + 1):
                if tuple(words[i : i + len(phrase)]) == phrase and not (len(phrase) == 1 and phrase[0] in ordinary):
                    hits.setdefault(instrument.name, set()).update(range(i * 10, i * 10 + weight))
    whole = {name: at for name, at in hits.items() if not any(at < other for other in hits.values())}
    named = {keys(folder.instrument.name): folder.instrument.name for folder in folders}
    spelled = [name for phrase, name in named.items() if name in whole and " ".join(phrase) in " ".join(words)]
    chosen = [folder for folder in folders if folder.instrument.name in (spelled or whole)]
    if chosen:
        return chosen, True
    return [folder for folder in folders if folder.instrument.general] or list(folders), False


def items(text: str, instrument: Instrument, data: Sequence[str] = ()) -> list[Item]:
    """The topic, phrase by phrase, the longest first; words without content are left out."""
    plain = re.sub(r"(?<=[a-z0-9])-(?=[a-z])|(?<=[a-z]{2})-(?=\d)|_", " ", text)
    found = [(m.lastgroup or "", m[0]) for m in _TOKEN.finditer(plain)]
    has_shares = any(factor.share for factor in instrument.factors)
    known = _named(found, vocabulary(instrument, ()), has_shares)
    return _led(
        _named(
            found,
            vocabulary(instrument, {item.what for item in known if item.kind in ("factor", "level")}, data),
            has_shares,
        )
    )


def _named(found: Sequence[tuple[str, str]], listed: dict[tuple[str, ...], Item], has_shares: bool) -> list[Item]:
    longest = max(map(len, listed))
    words = [_key(text) for _, text in found]
    result: list[Item] = []
    i = 0
    while i < len(found):
        kind, text = found[i]
        length = next((n for n in range(min(longest, len(found) - i), 0, -1) if _fits(listed, found, words, i, n)), 0)
        if length:
            written = " ".join(text for _, text in found[i : i + length])
            result.append(replace(listed[tuple(words[i : i + length])], text=written))
        elif kind == "times":
            result.append(Item("times", text, value=float(text[:-1])))
        elif kind == "odd" and re.fullmatch(r"\d+%", text) and has_shares:
            result.append(Item("number", text, value=float(text[:-1]) / 100))
        elif kind == "number":
            result.append(Item("number", text, value=float(text)))
        elif kind == "mark" and (text in ("->", "=") or text in _MARKS):
            result.append(Item("mark", text, text))
        else:
            result.append(Item("unknown", text))
        i += length or 1
    return result


def _fits(
    listed: dict[tuple[str, ...], Item], found: Sequence[tuple[str, str]], words: Sequence[str], i: int, n: int
) -> bool:
    item = listed.get(tuple(words[i : i + n]))
    if item is None or found[i][0] == "number":
        return False
    if len(item.text) == 1 and item.kind == "factor":  # `n = 8`, `r=4`, and no letter else
        return i + 2 < len(found) and (found[i + 1][1] in ("=", ":") or found[i + 1][0] == "number")
    return True


def _led(found: Sequence[Item]) -> list[Item]:
    """Without words of no content; each knows its preposition. `with` before a bare factor stays, as it may switch it on."""
    result: list[Item] = []
    led = ""
    for i, item in enumerate(found):
        if item.kind == "stop":
            if item.text in _COUNTED and result and i and found[i - 1].kind == "number":
                result[-1] = Item("unknown", f"{found[i - 1].text} {item.text}")
            continue
        behind = next((other for other in found[i + 1 :] if other.kind != "stop"), None)
        if item.isa("prep") or (item.isa("on") and item.text == "with" and (behind is None or not behind.isa("list"))):
            led = item.text
            if behind is None or behind.kind != "factor":
                continue
            if item.isa("prep"):
                continue
            result.append(item)
            continue
        result.append(replace(item, led=led))
        led = ""
    return result


def factors_of(instrument: Instrument) -> dict[str, Factor]:
    return {factor.name: factor for factor in instrument.factors}
