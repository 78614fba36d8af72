"""`instruments --check` plays a few episodes where a metric is made of what they report."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from researcher.cli.instruments import check_reported
from researcher.instruments.catalogue import read_instrument
from researcher.refusals import PlanningRefused

pytestmark = pytest.mark.anyio

INSTRUMENTS = Path(__file__).parents[2] / "instruments"


async def test_an_instrument_whose_episodes_report_its_metrics_is_sound() -> None:
    said = await check_reported(read_instrument(INSTRUMENTS / "flattery"), sys.executable)
    assert said is not None
    assert "report honest" in said


async def test_nothing_is_played_where_no_metric_asks_for_it() -> None:
    assert await check_reported(read_instrument(INSTRUMENTS / "repeat"), sys.executable) is None


async def test_a_declared_metric_that_no_episode_reports_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(INSTRUMENTS / "flattery", tmp_path / "flattery"))
    file = folder / "workflow.py"
    file.write_text(file.read_text().replace('metrics={"honest": honest}', 'metrics={"candid": honest}'))
    with pytest.raises(
        PlanningRefused, match=r"do not report it: have every rollout return Outcome\(…, metrics=\{'honest': …\}\)"
    ):
        await check_reported(read_instrument(folder), sys.executable)
