"""A simulated chat endpoint: a hasty but competent model that leads a campaign.

It knows only its messages: the prompt, results of look-ups, and errors. It screens, compares the best settings, and confirms
promising ones on little evidence. Sometimes it starts with an unreadable answer, or confirms too early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.ids import derived_seed
from researcher.study.file import scalar

Levels = dict[str, Any]
Proposals = list[dict[str, Any]]

_MOST_CONFIRMATIONS, _MOST_EXPLORATIONS, _MOST_ARMS = 4, 7, 10
_GOOD, _PROMISING = 1.0, 0.3
"""Lead over the current best setting, in margins, that a careful and an eager model try to confirm."""
_LEAST_TRIALS = 8
"""With fewer trials left, the model asks for nothing more."""

_FACTOR = re.compile(r"^- (\w+): (.+)$", re.MULTILINE)
_STUDY = re.compile(r"^- (\S+): (explore|confirm|replicate) (H\d+), (\w+)(?:, (\w+))?, \d+ trials")
_ARM = re.compile(
    r"^  .+? \((?P<levels>[^()]*)\): (?:no trial finished|(?P<mean>-?[\d.e+-]+)(?: ± [\d.e+-]+)?) \(n (?P<n>\d+)",
    re.MULTILINE,
)
_EFFECT = re.compile(r"effect of (\w+): (-?[\d.e+-]+) \[")


@dataclass(frozen=True, slots=True)
class Study:
    """A row of the prompt. arms: levels, mean and trials of each arm, best first; empty for shortened rows. effects: by factor."""

    name: str
    action: str
    hypothesis: str
    verdict: str
    arms: tuple[tuple[Levels, float, int], ...]
    effects: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of the prompt that this model uses. explore, confirm: numbers of trials left for each."""

    sign: int
    margin: float
    factors: dict[str, list[Any]]
    defaults: Levels
    explore: int
    confirm: int
    confirmations: int
    incumbent: Levels
    studies: tuple[Study, ...]
    refused: bool

    @classmethod
    def of(cls, prompt: str) -> Reading:
        aim, left = _section(prompt, "Aim"), _section(prompt, "Left of the budget")
        factors, defaults = dict[str, list[Any]](), dict[str, Any]()
        for name, levels in _FACTOR.findall(aim):
            for text in levels.split(", "):
                level = scalar(text.removesuffix(" (default)"))
                factors.setdefault(name, []).append(level)
                if text.endswith("(default)"):
                    defaults[name] = level
        return cls(
            sign=1 if "more is better" in aim else -1,
            margin=float(_found(r"effect that matters is ([\d.e-]+\d)", aim, "0")),
            factors=factors,
            defaults=defaults,
            explore=int(float(_found(r"An exploration may spend .*?([\d.]+) trials", left, "60"))),
            confirm=int(float(_found(r"A confirmation may spend .*?([\d.]+) trials", left, "60"))),
            confirmations=int(_found(r"Confirmations so far: (\d+)", left, "0")),
            incumbent=_levels(_found(r"Incumbent: (.+)", prompt, "")),
            studies=tuple(_studies(_section(prompt, "Studies"))),
            refused="# What was wrong with your last proposals" in prompt,
        )

    def explorations(self) -> int:
        return sum(study.action == "explore" for study in self.studies)

    def measured(self) -> list[tuple[Levels, float, int]]:
        """Every setting with its mean over all rows and its trials, best first."""
        found: dict[str, tuple[Levels, float, int]] = {}
        for levels, mean, n in (arm for study in self.studies for arm in study.arms):
            if n == 0:
                continue
            _, before, count = found.get(_key(levels), (levels, 0.0, 0))
            found[_key(levels)] = (levels, (before * count + mean * n) / (count + n), count + n)
        return sorted(found.values(), key=lambda each: -self.sign * each[1])

    def ahead(self) -> list[tuple[Levels, float, int]]:
        """Settings with their lead over the incumbent (else the default) in margins, and their trials."""
        measured = self.measured()
        stands = next((mean for levels, mean, _ in measured if _key(levels) == _key(self.incumbent)), None)
        if stands is None:
            return []
        others = [each for each in measured if _key(each[0]) != _key(self.incumbent)]
        return [(levels, self.sign * (mean - stands) / self.margin, n) for levels, mean, n in others]

    def failed(self) -> set[str]:
        """Settings whose confirmation failed."""
        tried = [study for study in self.studies if study.action != "explore" and study.verdict != "supported"]
        return {_key(levels) for study in tried for levels, _, _ in study.arms if _key(levels) != _key(self.incumbent)}

    def ranked(self) -> list[str]:
        """Factors by their effects in screens, strongest first; unscreened factors come last."""
        newest: dict[str, float] = {}
        for study in self.studies:
            newest |= study.effects
        return sorted(self.factors, key=lambda name: -abs(newest.get(name, 0.0)))


def _section(prompt: str, title: str) -> str:
    found = re.search(rf"^# {title}\n(.*?)(?=^# |\Z)", prompt, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[1]


def _found(pattern: str, text: str, otherwise: str) -> str:
    found = re.search(pattern, text)
    return otherwise if found is None else found[1]


def _studies(text: str) -> list[Study]:
    found = []
    for rows in re.split(r"^(?=- )", text, flags=re.MULTILINE):
        if (head := _STUDY.match(rows)) is None:
            continue
        arms = [
            (_levels(arm["levels"]), float(arm["mean"] or 0.0), int(arm["n"]))
            for arm in _ARM.finditer(rows)
            if "cut off" not in arm["levels"]
        ]
        effects = {name: float(diff) for name, diff in _EFFECT.findall(rows)}
        found.append(Study(head[1], head[2], head[3], head[5] or "", tuple(arms), effects))
    return found


def _levels(text: str) -> Levels:
    """Parse `kl=0.1, epochs=2`. A text without `=` means all defaults."""
    return {name: scalar(level) for name, _, level in (each.partition("=") for each in text.split(", ")) if level}


def _key(levels: Levels) -> str:
    return json.dumps(levels, sort_keys=True)


@dataclass(slots=True)
class HastyLlm:
    """Implements `researcher.llm.endpoint.Endpoint`. seed: for its random behaviour; equal messages get equal answers.

    malformed, looks_up: probability that a conversation starts with an unreadable answer, or with a look-up. eager: probability of a
    confirmation that comes too early. again: probability that a failed confirmation is tried once more.
    """

    seed: int
    malformed: float = 0.15
    looks_up: float = 0.3
    eager: float = 0.2
    again: float = 0.3

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        first, *later = request["messages"][1:]
        draw = np.random.default_rng(derived_seed(self.seed, first["content"]))
        tools, wrong, looks = "tools" in request, draw.random() < self.malformed, draw.random() < self.looks_up
        reading = Reading.of(first["content"])
        eager, again = draw.random() < self.eager and not reading.refused, draw.random() < self.again
        made = _ideas(reading, draw, eager=eager, again=again)
        made = _mended(made) if reading.refused else made
        turn = sum(message["role"] == "assistant" for message in later)
        if tools and wrong and turn == 0:
            return _malformed(made, draw)
        if tools and looks and turn == int(wrong) and "spec" in made[0]:
            return _called("price", {"action": made[0]["action"], "spec": made[0]["spec"]})
        if any("It has problems" in str(message["content"]) for message in later if message["role"] == "tool"):
            made = _mended(made)
        return _called("propose", {"proposals": made}) if tools else _said({"ending": "propose", "proposals": made})


# -- ideas --------------------------------------------------------------------------------------------------------------


def _ideas(reading: Reading, draw: np.random.Generator, *, eager: bool, again: bool) -> Proposals:
    """Proposals for the next step, best first."""
    confirmation = _confirmation(reading, draw, eager=eager, again=again)
    if confirmation:
        return confirmation
    if not reading.studies:
        return [_screen(reading, draw)] if reading.explore >= _LEAST_TRIALS else [_CONCLUDE]
    if reading.explorations() < _MOST_EXPLORATIONS and reading.explore >= _LEAST_TRIALS:
        return [_comparison(reading, draw), _CONCLUDE]
    return [_CONCLUDE]


def _mended(made: Proposals) -> Proposals:
    """The proposed explorations with half as many arms or factors; finally, a proposal to conclude."""
    smaller = []
    for each in made:
        spec = each.get("spec", {})
        if each["action"] == "explore" and "arms" in spec:
            kept = dict(list(spec["arms"].items())[: max(2, len(spec["arms"]) // 2)])
            smaller.append({**each, "spec": {**spec, "arms": kept}})
        elif each["action"] == "explore":
            kept = dict(list(spec["compare"].items())[: max(2, len(spec["compare"]) // 2)])
            smaller.append({**each, "spec": {**spec, "compare": kept}})
    return [*smaller, _CONCLUDE]


_CONCLUDE: dict[str, Any] = {
    "action": "conclude",
    "because": "What is left would not change the answer.",
    "words": "The best confirmed setting stands; without one, the default does.",
}


def _screen(reading: Reading, draw: np.random.Generator) -> dict[str, Any]:
    compare = {}
    for name, levels in reading.factors.items():
        others = [level for level in levels if level != reading.defaults[name]]
        compare[name] = {"baseline": reading.defaults[name], "levels": [others[int(draw.integers(len(others)))]]}
    return _study("explore", {"design": "screen", "compare": compare}, "some of these factors matter")


def _comparison(reading: Reading, draw: np.random.Generator) -> dict[str, Any]:
    """Compare the current best setting with candidates: what looked best, the best levels combined, strong factors at other levels."""
    base, ahead = reading.incumbent, reading.ahead()
    seen = {_key(levels) for levels, _, _ in ahead}
    singles = [_at(reading, base, name, level) for name in reading.ranked() for level in reading.factors[name]]
    good = [levels for levels, margins, _ in ahead if margins > _PROMISING and levels in singles]
    together = {**base, **{name: level for levels in reversed(good[:3]) for name, level in levels.items()}}
    settings = [
        *(levels for levels, _, _ in ahead[:1]),
        together,
        *(each for each in singles if _key(each) not in seen),
    ]
    if ahead:  # one more change to the setting that looks best
        name = str(draw.choice(list(reading.factors)))
        levels = reading.factors[name]
        settings.append(_at(reading, ahead[0][0], name, levels[int(draw.integers(len(levels)))]))
    different = {_key(levels): levels for levels in settings if _key(levels) != _key(base)}
    most = max(2, min(_MOST_ARMS, reading.explore // 2))
    arms = {"stands": base} | {f"idea{n}": levels for n, levels in enumerate([*different.values()][: most - 1], 1)}
    spec = {"design": "screen", "arms": arms, "seeds": {"min": 2}}
    return _study("explore", spec, "one of these is better than what stands")


def _at(reading: Reading, base: Levels, name: str, level: Any) -> Levels:
    """The setting with one factor changed; leaves out factors at their defaults."""
    rest = {other: each for other, each in base.items() if other != name}
    return rest if level == reading.defaults[name] else {**rest, name: level}


def _confirmation(reading: Reading, draw: np.random.Generator, *, eager: bool, again: bool) -> Proposals:
    """Confirm what looks best, if it looks good enough. An eager model confirms any setting before it has seen results."""
    if eager and not reading.studies:
        name = next(iter(reading.factors))
        return [_confirmed(reading, _at(reading, {}, name, reading.factors[name][-1]), draw)]
    spent = reading.confirmations >= _MOST_CONFIRMATIONS or reading.confirm < _LEAST_TRIALS
    if spent or (reading.explorations() < 2 and not eager):
        return []
    least, failed = _PROMISING if eager else _GOOD, reading.failed()
    for levels, margins, n in reading.ahead():
        if margins < least or (n < 2 and not eager):
            continue
        if _key(levels) not in failed or again:
            return [_confirmed(reading, levels, draw)]
    return []


def _confirmed(reading: Reading, levels: Levels, draw: np.random.Generator) -> dict[str, Any]:
    arms = {"stands": reading.incumbent, "better": levels}
    seeds = {"min": int(draw.integers(3, 6)), "max": 40}
    return _study("confirm", {"design": "compare", "arms": arms, "seeds": seeds}, f"{_words(levels)} is better")


def _study(action: str, spec: dict[str, Any], claim: str) -> dict[str, Any]:
    new = {"claim": claim, "prediction": "the metric rises by the margin", "kill_if": "it does not"}
    return {"action": action, "because": f"It seems that {claim}.", "spec": spec, "hypothesis": new}


def _words(levels: Levels) -> str:
    return " and ".join(f"{name} {level}" for name, level in levels.items())


# -- answers ------------------------------------------------------------------------------------------------------------


def _malformed(made: Proposals, draw: np.random.Generator) -> dict[str, Any]:
    """An invalid answer: prose, no proposal, a misspelt field, or truncated arguments."""
    whole = {"proposals": made}
    wrong: Sequence[Any] = (
        {"proposals": []},
        {"proposals": [{"actions": each["action"], "because": each["because"]} for each in made]},
        json.dumps(whole)[: len(json.dumps(whole)) // 2],
        None,
    )
    kind = wrong[int(draw.integers(len(wrong)))]
    if kind is None:
        return _completion({"role": "assistant", "content": "Let me think about which factors could matter first."})
    return _called("propose", kind)


def _said(answer: dict[str, Any]) -> dict[str, Any]:
    return _completion({"role": "assistant", "content": f"Here it is:\n{json.dumps(answer)}"})


def _called(name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": text}}
    return _completion({"role": "assistant", "content": None, "tool_calls": [call]})


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
