"""Scores trained models on held-out tasks of other instruments: adds the tasks and their metrics to the plan."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Instrument, Metric
from researcher.study.plan import Plan, Transfer


def scored_on(plan: Plan, others: Sequence[InstrumentFolder]) -> Plan:
    """Return the plan with trained models also scored once, after training, on held-out tasks of these instruments."""
    if not others:
        return plan
    transfers = tuple(_transfer(each) for each in others)
    metrics = tuple(metric for each in others for metric in _metrics(each.instrument))
    tasks = " and ".join(f"{each.tasks} held-out tasks of {each.instrument}" for each in transfers)
    said = f"After training every trial is also scored on {tasks}: these numbers decide nothing."
    return plan.model_copy(
        update={
            "transfers": transfers,
            "metrics": (*plan.metrics, *metrics),
            "assumptions": (*plan.assumptions, said),
        }
    )


def _transfer(folder: InstrumentFolder) -> Transfer:
    defaults = folder.instrument.defaults
    return Transfer(
        instrument=folder.instrument.name,
        code=folder.code,
        task=dict(defaults.task),
        tasks=defaults.heldout_tasks,
        episodes=defaults.heldout_episodes,
        temperature=defaults.heldout_temperature,
    )


def _metrics(instrument: Instrument) -> list[Metric]:
    """Return the instrument's metrics that are measured on held-out tasks after training, or its held-out reward if it has none.

    The instrument's name is added to each metric's name.
    """
    own = [
        metric
        for metric in instrument.metrics
        if metric.kind in ("heldout_accuracy", "heldout_reward") and metric.when == "after" and not metric.on_request
    ]
    if not own:
        margin = next(metric.margin for metric in instrument.metrics if metric.name == instrument.defaults.metric)
        own = [Metric(name="heldout_reward", kind="heldout_reward", margin=margin)]
    return [
        metric.model_copy(update={"name": f"{instrument.name}_{metric.name}", "on": instrument.name, "sigma": None})
        for metric in own
    ]
