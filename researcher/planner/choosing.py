"""Which instrument and which model a topic is about."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.design.reading import Reading
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.planner.matching import read
from researcher.planner.mentions import keyword_hits, split_models
from researcher.planner.seam import PlanRequest
from researcher.planner.sizes import compares_models, model_factor, models_of, sole_model, unknown_model
from researcher.planner.wording import Token, tokens
from researcher.planner.written import pieces, without_data
from researcher.refusals import PlanningRefused


def model_and_rest(request: PlanRequest) -> tuple[str | None, str]:
    """The model that the topic names for all arms, if any, and the topic without it. Models that are compared stay in it.

    Raises: PlanningRefused for a model that is not available, or two where no instrument compares models.
    """
    known_here = models_of(folder.instrument for folder in request.instruments)
    available = list(dict.fromkeys([*known_here, *request.options.models]))
    rest, known, unknown = "", list[str](), list[str]()
    for piece, is_data in pieces(request.topic):
        left, here, not_here = (piece, [], []) if is_data else split_models(piece, available)
        rest, known, unknown = rest + left, known + here, unknown + not_here
    if unknown:
        raise unknown_model(unknown[0], available)
    varied = any(model_factor(folder.instrument) is not None for folder in request.instruments)
    if varied and compares_models(without_data(request.topic)[0], available):
        return None, request.topic
    if len(set(known)) > 1:
        raise PlanningRefused(f"the topic names {' and '.join(dict.fromkeys(known))}; a study trains one model", known)
    if known:
        return known[0], rest
    return sole_model(rest, available) if varied else (None, rest)


def choose(topic: str, request: PlanRequest) -> tuple[InstrumentFolder, Reading]:
    """The instrument that was asked for, else the one whose factors and keywords fit best, else a general one.

    Raises: PlanningRefused: the one that fits best says why it does not fit.
    """
    folders = asked_for(request)
    said, has_data = without_data(topic)
    scores = {folder.path: _score(folder, tokens(said), has_data=has_data) for folder in folders}
    readings: list[tuple[InstrumentFolder, Reading]] = []
    refusals: list[tuple[int, PlanningRefused]] = []
    for folder in folders:
        try:
            readings.append((folder, read(topic, folder.instrument)))
        except PlanningRefused as refusal:
            refusals.append((scores[folder.path], refusal))
    if not readings:
        raise max(refusals, key=lambda each: each[0])[1]
    if refusals and request.options.instrument is None:
        best_refused = max(refusals, key=lambda each: each[0])
        if best_refused[0] > max(scores[folder.path] for folder, _ in readings):
            raise best_refused[1]
    most = max(scores[folder.path] for folder, _ in readings)
    best = [each for each in readings if scores[each[0].path] == most]
    if not most and len(best) > 1:
        best = [each for each in best if each[0].instrument.general] or best
    if len(best) > 1:
        names = [folder.instrument.name for folder, _ in best]
        raise PlanningRefused(f"the topic fits {' and '.join(names)}; choose one with --instrument", names)
    return best[0] if most or request.options.instrument else _unsaid(*best[0])


def _score(folder: InstrumentFolder, found: Sequence[Token], *, has_data: bool) -> int:
    """Keywords that the topic contains, and data where the instrument takes some: those weigh as much as its name."""
    takes = any(factor.type == "data" for factor in folder.instrument.factors)
    return keyword_hits(folder.instrument, found) + 2 * (has_data and takes)


def asked_for(request: PlanRequest) -> Sequence[InstrumentFolder]:
    """The instruments that may be chosen: all, or the one that a person named. Raises: PlanningRefused."""
    if request.options.instrument is None:
        if not request.instruments:
            raise PlanningRefused("there is no instrument; put one under studies/ or name its folder by --instrument")
        return request.instruments
    named = [each for each in request.instruments if each.instrument.name == request.options.instrument]
    return named or [open_instrument(request.options.instrument)]


def _unsaid(folder: InstrumentFolder, reading: Reading) -> tuple[InstrumentFolder, Reading]:
    instrument = folder.instrument
    note = f"The topic names no instrument: it is asked of {instrument.name} ({instrument.title.lower()})."
    return folder, reading.model_copy(update={"assumptions": (*reading.assumptions, note)})
