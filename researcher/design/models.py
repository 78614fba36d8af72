"""Models that a spec names: a known name, a hub name or a folder becomes what a plan says of it.

A folder is known by its weights, so its fingerprint is part of the plan. A name stands for whatever weights the first trial
finds under it: the same spec gives the same plan whether or not this machine has the model yet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from foundation.nearest import nearest
from researcher.instruments.instrument import Instrument
from researcher.refusals import PlanningRefused
from researcher.study.plan import PlanModel
from researcher.study.spec import StudySpec
from swarm.models.catalogue import find, hosted_name, known_names
from swarm.protocol.errors import SwarmError

_SHOWN = 8
"""Hexadecimal digits of the fingerprint in a name."""
_MODEL = "model"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def with_models(spec: StudySpec, instrument: Instrument) -> tuple[StudySpec, dict[str, PlanModel]]:
    """The spec with every model under the name that arms, reports and findings give it, and the models by these names.

    Raises: PlanningRefused for a model that is none, or that is named twice.
    """
    bundled = [str(settings[_MODEL]) for settings in spec.arms.values() if _MODEL in settings]
    found = models_named([*spec.models, *bundled], declared=(instrument.model,))
    if instrument.roles and (bundled or len(spec.models) > 1):
        roles = ", ".join(instrument.roles)
        raise PlanningRefused(
            f"model: trials of {instrument.name} train further models ({roles}), so arms cannot differ by it"
        )
    names = {text: model.name for text, model in found.items()}
    _refuse_twice(spec.models, names)
    model = names[spec.model] if isinstance(spec.model, str) else tuple(names[text] for text in spec.models) or None
    arms = {
        arm: settings | ({_MODEL: names[str(settings[_MODEL])]} if _MODEL in settings else {})
        for arm, settings in spec.arms.items()
    }
    return spec.model_copy(update={"model": model, "arms": arms}), {model.name: model for model in found.values()}


def models_named(texts: Iterable[str], declared: Collection[str] = ()) -> dict[str, PlanModel]:
    """Each text with its model: the same for folders with the same weights; different models have different names.

    declared: names that an instrument takes as they are. Raises: PlanningRefused.
    """
    first: dict[str, PlanModel] = {}
    found = {
        text: first.setdefault(_weights_of(model), model) for text in texts for model in [model_of(text, declared)]
    }
    weights: dict[str, set[str]] = {}
    for model in found.values():
        weights.setdefault(hosted_name(model.name), set()).add(_weights_of(model))
    return {
        text: _with_weights_in_name(model) if _is_ambiguous(model, weights) else model for text, model in found.items()
    }


def model_of(text: str, declared: Collection[str] = ()) -> PlanModel:
    """The model that is called `text`, or lies in the folder `text`. A known name is never a folder: `./NAME` is one.

    Raises: PlanningRefused for what is neither, and for a folder without a checkpoint.
    """
    known = find(text)
    if known is not None or text in declared:
        return PlanModel(name=text if known is None else known.name)
    place = Path(text).expanduser()
    if place.is_dir():
        return _folder(place.resolve())
    if text.startswith((".", "~", "/")) or text.count("/") > 1 or place.exists():
        raise PlanningRefused(f"model: there is no folder {text}", known_names())
    if _HUB_NAME.fullmatch(text):
        return PlanModel(name=text)
    guess = nearest(text.lower(), known_names())
    hint = f"did you mean {guess}?" if guess else f"known names: {', '.join(known_names())}."
    raise PlanningRefused(
        f"model: there is no model or folder {text!r}; {hint} Else give a hub name OWNER/NAME, or the path of a folder with a "
        "Hugging Face checkpoint",
        known_names(),
    )


def _folder(path: Path) -> PlanModel:
    from swarm.models import resolve  # imports httpx, which names do not need
    from swarm.models.folder import has_tokenizer

    try:
        found = resolve(str(path))
    except (SwarmError, OSError) as error:
        raise PlanningRefused(f"model: {error}") from error
    if not has_tokenizer(path):
        raise PlanningRefused(
            f"model: {path} has no tokenizer; save it beside the weights (transformers' `save_pretrained`)"
        )
    name = re.sub(r"[^\w.-]+", "-", path.name).strip("-") or "model"
    return PlanModel(name=name, fingerprint=found.fingerprint, path=str(path))


def _weights_of(model: PlanModel) -> str:
    return model.fingerprint or model.name


def _is_ambiguous(model: PlanModel, weights: dict[str, set[str]]) -> bool:
    """Whether a folder is called like a model that is not in it."""
    return model.path is not None and (len(weights[hosted_name(model.name)]) > 1 or find(model.name) is not None)


def _with_weights_in_name(model: PlanModel) -> PlanModel:
    return model.model_copy(update={"name": f"{model.name}-{str(model.fingerprint)[:_SHOWN]}"})


def _refuse_twice(texts: Iterable[str], names: dict[str, str]) -> None:
    first: dict[str, str] = {}
    for text in texts:
        if (other := first.setdefault(names[text], text)) != text:
            raise PlanningRefused(f"model: {other} and {text} are the same model", [other])
