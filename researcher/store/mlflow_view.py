"""What a person sees in MLflow's UI without arranging anything: each arm's curve, averaged over its seeds, in one chart.

A saved view of MLflow's runs page is an experiment tag that the page's address names; ours is written with every study.
"""

from __future__ import annotations

import json

KEY = "arms"
"""Of the saved view, in the page's address."""
_TAG = f"mlflow.sharedViewState.{KEY}"
_KIND = "mlflow.experimentKind"


def view_tags() -> dict[str, str]:
    """Tags of the experiment: the saved view, and that its runs are training runs (else the UI guesses by the traces)."""
    state = {
        "searchFilter": "params.arm LIKE '%'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "arm"}]},
        "useGroupedValuesInCharts": True,
        "runsHiddenMode": "SHOW_ALL",
    }
    return {_TAG: json.dumps(state), _KIND: "custom_model_development"}


def page_of(experiment_id: str, run_id: str | None = None) -> str:
    """The page below MLflow's address: of one run, or of the study the charts of the saved view."""
    if run_id is not None:
        return f"#/experiments/{experiment_id}/runs/{run_id}"
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={KEY}&compareRunsMode=CHART"
