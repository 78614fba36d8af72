"""Models as levels of a factor: their names, bare sizes (`135M`), and the larger or smaller one.

Works on a topic's text, before its words are read: each model that is named leaves a word in its place, as what a topic
writes out does. Knows choices by their names alone, from the smallest to the largest; a name says its size (`name-135m`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from foundation.nearest import nearest
from researcher.instruments.catalogue import parameters, size_of
from researcher.instruments.instrument import STUDY_MODEL, Factor, Instrument
from researcher.planner.levels import Level
from researcher.planner.mentions import split_models
from researcher.planner.sides import Opposition
from researcher.refusals import PlanningRefused

ALIKE = 0.02
"""Sizes this near to each other are one, as in `80M` for 81 million."""
_SIZE = re.compile(
    r"(?<![\w.\-])(\d+(?:\.\d+)?)\s?(m|b|million|billion)\b(?:[\s\-]*param(?:eter)?s?\b)?(?:[\s\-]+models?\b)?",
    re.IGNORECASE,
)
_SIZED = re.compile(
    r"\b(?:(?P<large>larger|largest|bigger|biggest|full[\s\-]?sized?)|(?P<small>smaller|smallest|half[\s\-]?sized?))"
    r"\s+(?:language\s+)?(?:(?:model|llm|network)s?|(?P<one>ones?))\b(?:\s*\(\s*(?P<named>[^()]*?)\s*\))?",
    re.IGNORECASE,
)
_PLAIN = re.compile(
    r"\b(?P<size>small|big|large)\b(?P<noun>\s+(?:language\s+)?(?:model|llm|network|one)s?\b|(?=\s*(?:[?.,;:)]|$)))",
    re.IGNORECASE,
)
_COMPARATIVES = {"small": "smaller", "big": "bigger", "large": "larger"}
_SEVERAL = re.compile(
    r"\b(?:both|all|each|every|either)\s+(?:of\s+)?(?:the\s+)?(?:two\s+)?models?\b"
    r"|\b(?P<whatever>regardless|irrespective|independent(?:ly)?)\s+of\s+(?:the\s+)?(?:model|size\s+of\s+the\s+model)\b",
    re.IGNORECASE,
)
_SPOKEN_OF = re.compile(
    r"\bmodel[\s\-]+(?:size|scale|depth)s?\b|\b(?:size|depth)s?\s+of\s+(?:the\s+)?models?\b", re.IGNORECASE
)
_OF_MODEL = re.compile(r"\b(?:model|llm|network)s?\s*\($", re.IGNORECASE)
"""Before a size, as in `the small model (81M)`."""
_TIME_LIMIT = re.compile(r"\b(?:in|within|under|budget|spend|spending|for)\s+(?:\w+\s+){0,2}$", re.IGNORECASE)
Place = Callable[[Factor, str], str]
"""Notes a level of the factor; returns the word that stands for it."""


def model_factor(instrument: Instrument) -> Factor | None:
    """The factor whose levels are models; None where the instrument always trains one."""
    return next((factor for factor in instrument.factors if factor.target == STUDY_MODEL), None)


def models_of(instruments: Iterable[Instrument]) -> list[str]:
    """Every model that the instruments know by name."""
    found: dict[str, None] = {}
    for instrument in instruments:
        factor = model_factor(instrument)
        found |= dict.fromkeys([instrument.model, *(map(str, factor.choices) if factor else ())])
    return list(found)


def compares_models(topic: str, models: Sequence[str]) -> bool:
    """Whether it asks about models: names or sizes of two of them, one and `the smaller model`, `model size`."""
    rest, known, _ = split_models(_compared(topic), models)
    sizes = {model for number, unit in _SIZE.findall(rest) if (model := _of_size(number, unit, models)) is not None}
    return len({*known, *sizes}) > 1 or bool(_spoken_of(rest))


def sole_model(topic: str, models: Sequence[str]) -> tuple[str | None, str]:
    """The one model that the topic means by its size (`the 81M model`), and the topic without it.

    Raises: PlanningRefused for a size that no model has.
    """
    sized = [
        match
        for match in _SIZE.finditer(topic)
        if re.search(r"model|param", match.group(), re.IGNORECASE) or _OF_MODEL.search(topic[: match.start()])
    ]
    found = {match.group().strip(): _model_of_size(match, models) for match in sized}
    if len(set(found.values())) != 1:
        return None, topic
    for text in found:
        topic = topic.replace(text, "model")
    return next(iter(found.values())), topic


def levels_out(topic: str, factor: Factor, place: Place) -> tuple[str, list[str]]:
    """The topic with words in place of the models that it names as levels, and what was assumed.

    Raises: PlanningRefused for a size that no model has, where a name and its description are not of one model, and where
    something else is asked of several models.
    """
    topic = _compared(topic)
    models = [str(choice) for choice in factor.choices]
    notes: list[str] = []

    def sized(match: re.Match[str]) -> str:
        model = models[-1] if match["large"] else models[0]
        if match["named"] is not None:
            named = _named(match["named"], models)
            if named is None:
                return f"{place(factor, model)} ({match['named']})"
            if named != model:
                raise PlanningRefused(f"{match.group()!r} does not fit: of {', '.join(models)} it is {model}", models)
        return place(factor, model)

    def bare(match: re.Match[str]) -> str:
        if _TIME_LIMIT.search(match.string[: match.start()]):
            return match.group()
        model = _model_of_size(match, models)
        if parameters(match[1], match[2]) != size_of(model):
            notes.append(f"{match.group().strip()!r} is read as {model}.")
        return f" {place(factor, model)} "

    compared = compares_models(topic, models)
    _refuse_several(topic, models, compared=compared)
    if not compared:
        return topic, notes
    topic = _SIZED.sub(sized, topic)
    topic, _, unknown = split_models(topic, models, lambda model: f" {place(factor, model)} ")
    if unknown:
        raise unknown_model(unknown[0], models)
    return _SIZE.sub(bare, topic), notes


def refuse_models(topic: str, instrument: Instrument) -> None:
    """Raises: PlanningRefused where the topic names models, and the instrument always trains one."""
    _, _, named = split_models(topic, [])
    if named and model_factor(instrument) is None:
        raise PlanningRefused(
            f"the topic names {' and '.join(dict.fromkeys(named))}; a study of {instrument.name} trains one model, "
            f"{instrument.model} unless the topic names another one",
            [instrument.model],
        )


def unknown_model(unknown: str, models: Sequence[str]) -> PlanningRefused:
    """What is said of a model that is not to be had here."""
    guess = nearest(unknown.lower(), models)
    hint = f"did you mean {guess!r}? There are: " if guess else "there are: "
    return PlanningRefused(
        f"model {unknown!r} is not available; {hint}{', '.join(models)}", [guess] if guess else models
    )


def opposed(factor: Factor, levels: Sequence[Level]) -> Opposition:
    """Models that a topic does not set against each other: one against its smaller neighbour, all against the smallest."""
    models = factor.choices
    if not levels:
        smallest, *larger = models
        return Opposition(tuple(Level(-1, factor, model) for model in larger), (Level(-1, factor, smallest),))
    place = models.index(levels[0].value)
    return Opposition((levels[0],), (Level(-1, factor, models[place - 1 if place else 1]),))


def _compared(topic: str) -> str:
    """`for the small model but not the large`: plain adjectives are read as comparatives where both kinds stand."""
    found = {match["size"].lower(): match["noun"] for match in _PLAIN.finditer(topic)}
    if "small" not in found or len(found) == 1 or not any("model" in (noun or "").lower() for noun in found.values()):
        return topic
    return _PLAIN.sub(lambda match: _COMPARATIVES[match["size"].lower()] + (match["noun"] or " model"), topic)


def _refuse_several(topic: str, models: Sequence[str], *, compared: bool) -> None:
    """compared: whether the topic asks about models; then `both models` are its levels."""
    said = _SEVERAL.search(topic)
    if said is not None and (said["whatever"] or not compared):
        raise PlanningRefused(
            f"{said.group()!r}: a comparison is made on one model; name it ({' or '.join(models)}), ask which model is better, "
            "or ask whether the model size and the factor interact",
            models,
        )


def _spoken_of(topic: str) -> bool:
    """`the smaller model`, `model size`; `the smaller one` alone may be anything."""
    return bool(_SPOKEN_OF.search(topic)) or any(
        match["one"] is None or "half" in match.group().lower() for match in _SIZED.finditer(topic)
    )


def _named(text: str, models: Sequence[str]) -> str | None:
    _, known, unknown = split_models(text, models)
    if unknown:
        raise unknown_model(unknown[0], models)
    if known:
        return known[0]
    size = _SIZE.fullmatch(text)
    return None if size is None else _of_size(size[1], size[2], models)


def _model_of_size(match: re.Match[str], models: Sequence[str]) -> str:
    """The model of the size that `_SIZE` found. Raises: PlanningRefused where there is none."""
    model = _of_size(match[1], match[2], models)
    if model is None:
        raise PlanningRefused(f"no model has {match.group().strip()!r}; there are: {', '.join(models)}", models)
    return model


def _of_size(number: str, unit: str, models: Sequence[str]) -> str | None:
    wanted = parameters(number, unit)
    near = [model for model in models if (own := size_of(model)) is not None and abs(own - wanted) <= ALIKE * own]
    return min(near, key=lambda model: abs((size_of(model) or 0.0) - wanted), default=None)
