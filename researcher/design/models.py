"""Models of specs and plans, and the cost of hosting several models in turn on one machine.

A folder's fingerprint is part of the plan. A name stands for whatever weights the first trial finds, so that one spec gives the
same plan on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from foundation.nearest import nearest
from researcher.instruments.instrument import STUDY_MODEL, Factor, Instrument
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Plan, PlanModel
from researcher.study.spec import StudySpec
from swarm.models.catalogue import find, hosted_name, known_names
from swarm.protocol.errors import SwarmError

BOOT_S = 45.0
"""Time to boot a server on two cores, in seconds."""
_SHOWN = 8
"""Number of hexadecimal digits of the fingerprint that a model's name shows."""
_MODEL = "model"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def with_models(spec: StudySpec, instrument: Instrument) -> tuple[StudySpec, dict[str, PlanModel]]:
    """Replace the spec's models by the names used in arms, reports and findings. Returns the spec, and a map from name to model.

    Raises: SpecRefused for an unknown model, or a model that the spec names twice.
    """
    bundled = [str(settings[_MODEL]) for settings in spec.arms.values() if _MODEL in settings]
    found = models_named([*spec.models, *bundled], declared=(instrument.model,))
    if instrument.roles and (bundled or len(spec.models) > 1):
        roles = ", ".join(instrument.roles)
        raise SpecRefused(
            "model", f"trials of {instrument.name} train further models ({roles}), so arms cannot differ in the model"
        )
    names, first = {text: model.name for text, model in found.items()}, dict[str, str]()
    for text in spec.models:
        if (other := first.setdefault(names[text], text)) != text:
            raise SpecRefused("model", f"{other} and {text} are the same model", [other])
    model = names[spec.model] if isinstance(spec.model, str) else tuple(names[text] for text in spec.models) or None
    arms = {
        arm: settings | {name: names[str(level)] for name, level in settings.items() if name == _MODEL}
        for arm, settings in spec.arms.items()
    }
    return spec.model_copy(update={"model": model, "arms": arms}), {model.name: model for model in found.values()}


def models_named(texts: Iterable[str], declared: Collection[str] = ()) -> dict[str, PlanModel]:
    """Map each text to its model. Folders with equal weights give the same model; different models get different names.

    `declared` are model names that an instrument accepts unchecked. Raises: SpecRefused.
    """
    found, first = dict[str, PlanModel](), dict[str, PlanModel]()
    for text in texts:
        model = model_of(text, declared)
        found[text] = first.setdefault(model.fingerprint or model.name, model)
    called = Counter(hosted_name(model.name) for model in first.values())
    for text, model in found.items():
        shared = called[hosted_name(model.name)] > 1 or find(model.name) is not None
        if model.path is not None and shared:  # a folder that has the name of a model but holds other weights
            found[text] = model.model_copy(update={"name": f"{model.name}-{str(model.fingerprint)[:_SHOWN]}"})
    return found


def model_of(text: str, declared: Collection[str] = ()) -> PlanModel:
    """Return the model with this name or in this folder. A known name is never read as a folder: write `./NAME` for that.

    Raises: SpecRefused for an unknown name, or a folder without a checkpoint.
    """
    known = find(text)
    if known is not None or text in declared:
        return PlanModel(name=text if known is None else known.name)
    place = Path(text).expanduser()
    if place.is_dir():
        return folder_model(place.resolve())
    if text.startswith((".", "~", "/")) or text.count("/") > 1 or place.exists():
        raise SpecRefused("model", f"there is no folder {text}", known_names())
    if _HUB_NAME.fullmatch(text):
        return PlanModel(name=text)
    guess = nearest(text.lower(), known_names())
    hint = f"did you mean {guess}?" if guess else f"known names: {', '.join(known_names())}."
    raise SpecRefused(
        "model",
        f"there is no model or folder {text!r}; {hint} Otherwise give a hub name OWNER/NAME, or the path of a folder with a "
        "Hugging Face checkpoint",
        known_names(),
    )


def folder_model(path: Path) -> PlanModel:
    """Return the model in a folder, identified by its weights. Raises: SpecRefused for a folder without a complete checkpoint."""
    from swarm.models import resolve  # imports httpx, which names do not need
    from swarm.models.folder import has_tokenizer

    try:
        found = resolve(str(path))
    except (SwarmError, OSError) as error:
        raise SpecRefused("model", str(error)) from error
    if not has_tokenizer(path):
        said = f"{path} has no tokenizer; save it beside the weights (transformers' `save_pretrained`)"
        raise SpecRefused("model", said)
    name = re.sub(r"[^\w.-]+", "-", path.name).strip("-") or "model"
    return PlanModel(name=name, fingerprint=found.fingerprint, path=str(path))


def models_of(arms: Sequence[Arm], factors: Sequence[Factor], named: Mapping[str, PlanModel]) -> tuple[PlanModel, ...]:
    """Return the models in which arms differ, in the arms' order; empty if all arms share one. `named` maps names to spec models."""
    names = [factor.name for factor in factors if factor.target == STUDY_MODEL]
    found = dict.fromkeys(str(arm.levels[name]) for arm in arms for name in names if name in arm.levels)
    return tuple(named.get(model) or PlanModel(name=model) for model in found)


def model_factor(models: Sequence[str]) -> Factor:
    """Return a factor whose levels are these models. `models` are names from `with_models`, the default first."""
    return Factor(name="model", target=STUDY_MODEL, type="choice", default=models[0], choices=tuple(models))


def boots_s(plan: Plan, *, at_most: bool) -> float:
    """Return the seconds spent on server boots if one server runs at a time and hosts the models in turn.

    Each stage runs its seeds in order and starts each seed with the model hosted at that point. All arms of a stage count, because
    the survivors of a race are not known yet and may use any model.
    """
    if not plan.models:
        return 0.0
    boots, hosted, ran = 0, "", set[tuple[str, int]]()
    for stage in plan.stages:
        for seed in range(stage.first_seed, stage.first_seed + (stage.max_seeds if at_most else stage.seeds)):
            left = dict.fromkeys(plan.model_of(arm).name for arm in stage.arms if (arm, seed) not in ran)
            ran |= {(arm, seed) for arm in stage.arms}
            others = [model for model in left if model != hosted]
            boots += len(others)
            hosted = others[-1] if others else hosted
    return boots * BOOT_S
