"""Trained weights that a study has kept, used as the model that another study starts from.

A trial is given as STUDY/TRIAL: the study's id or a prefix of it, and the trial's folder name (`ARM-seedN`) or key.
"""

from __future__ import annotations

from foundation.nearest import MOST_NAMES, nearest
from researcher.design.models import folder_model
from researcher.executor.blueprint import folder_name
from researcher.executor.cleanup import model_place
from researcher.home import Home
from researcher.models import TrialRecord, TrialStatus
from researcher.refusals import SpecRefused
from researcher.study.plan import PlanModel

_FIELD = "start_from"


def kept_model(home: Home, reference: str) -> PlanModel:
    """Return the model of this trial: its folder, the fingerprint of its weights, and the trial as their origin.

    Raises: SpecRefused for an unknown study or trial, a trial that is not done, or a model that was not kept.
    """
    from researcher.store.errors import StoreError  # SQLAlchemy takes longer to import than a dry run takes

    said, _, name = reference.partition("/")
    if not said or not name:
        raise SpecRefused(_FIELD, f"write STUDY/TRIAL, such as st-12ab34/learning_rate=4e-5-seed0, got {reference!r}")
    try:
        study_id = home.store.studies.resolve(said)
    except StoreError as error:
        raise SpecRefused(_FIELD, str(error)) from error
    trial = _trial(home.store.trials.all(study_id, series=()), study_id, name)
    if trial.status is not TrialStatus.DONE:
        problem = f"{folder_name(trial)} of {study_id} is {trial.status.value}, but only a finished trial has weights to start from"
        raise SpecRefused(_FIELD, problem)
    place = model_place(home.studies / study_id, trial)
    if not place.is_dir():
        if home.store.studies.get(study_id).options.keep_models:
            what = (
                f"`researcher resume {study_id}` keeps the models of its finished trials once no trial is left to run"
            )
        else:
            what = "a study keeps its models when it is started with --keep-models"
        raise SpecRefused(_FIELD, f"the model of {folder_name(trial)} of {study_id} was not kept: {what}")
    try:
        model = folder_model(place.resolve())
    except SpecRefused as error:
        problem = "; ".join(what for _, what in error.problems)
        raise SpecRefused(_FIELD, f"the kept model of {reference} cannot be read: {problem}") from error
    return model.model_copy(update={"origin": f"{study_id}/{folder_name(trial)}"})


def _trial(trials: list[TrialRecord], study_id: str, name: str) -> TrialRecord:
    """Find the trial by its folder name or key. Raises: SpecRefused with the nearest name."""
    names = {folder_name(trial): trial for trial in trials}
    known = {trial.key: trial for trial in trials} | names
    if name in known:
        return known[name]
    if not trials:
        raise SpecRefused(_FIELD, f"{study_id} has no trials yet")
    guess = nearest(name, names)
    hint = f"did you mean {guess}?" if guess else f"it has {', '.join([*names][:MOST_NAMES])}"
    raise SpecRefused(_FIELD, f"{study_id} has no trial {name!r}; {hint}", [guess] if guess else [*names][:MOST_NAMES])
