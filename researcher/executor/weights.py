"""Whether a server hosts what a plan trains, and the weights that a study has seen under each model's name."""

from __future__ import annotations

from researcher.store.store import Store
from researcher.study.plan import PlanModel
from swarm.models.catalogue import hosted_name
from swarm.protocol.status import ServerStatus

_EVENT = "weights"
_SHOWN = 12
"""Hexadecimal digits of a fingerprint, as servers show it."""


def misfit(model: PlanModel, url: str, status: ServerStatus, seen: str | None = None) -> str | None:
    """Why trials of `model` cannot run on the server at `url`; None where they can.

    seen: the fingerprint that the study's earlier trials of the model had.
    """
    found = status.model_fingerprint
    if not model.is_hosted(status.model, found, status.engine.backend):
        return (
            f"the plan trains {model.title} ({url} hosts {hosted(status)}): start one with {serving(model, status)}, or plan a "
            f"study of {hosted_name(status.model)} with --model"
        )
    if None not in (seen, found) and seen != found:
        return (
            f"{url} hosts other weights than this study trains as {model.name}: {hosted(status)}, not {str(seen)[:_SHOWN]}; "
            "serve the weights of its first trials again, or start a new study"
        )
    return None


def hosted(status: ServerStatus) -> str:
    """What a server hosts, with the beginning of its fingerprint where there are weights."""
    name = hosted_name(status.model)
    if status.model_fingerprint is None or status.engine.backend == "echo":
        return name
    return f"{name}@{status.model_fingerprint[:_SHOWN]}"


def serving(model: PlanModel, status: ServerStatus | None = None) -> str:
    """How to have a server of it. status: of a server whose engine is meant."""
    if status is not None and status.engine.backend == "echo":
        return f"`swarm serve --model {model.name} --engine echo`"
    return f"`swarm serve --model {model.source}`"


def weights_seen(store: Store, study_id: str) -> dict[str, str]:
    """Fingerprints of the weights that the study's trials had, by the models' names."""
    return {event.detail["model"]: event.detail["fingerprint"] for event in store.events(study_id, kind=_EVENT)}


def note_weights(store: Store, study_id: str, model: PlanModel, status: ServerStatus) -> None:
    """Have the study train no other weights than the server's under this model's name."""
    detail = {"model": model.name, "fingerprint": status.model_fingerprint, "hosted": status.model}
    store.record_event(study_id, _EVENT, detail)
