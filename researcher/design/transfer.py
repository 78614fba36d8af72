"""Scores trained models on held-out tasks of other instruments: the plan's fields for it, and the metrics that it adds."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Instrument, Metric
from researcher.study.plan import Plan, Transfer


def scored_on(plan: Plan, others: Sequence[InstrumentFolder]) -> Plan:
    """Return the plan with trials that also play held-out tasks of these instruments, once after training."""
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
    """Return the instrument's own metrics of held-out tasks after training, else its reward, with the instrument in their names."""
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
