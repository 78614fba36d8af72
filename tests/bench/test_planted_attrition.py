"""The bars of planted attrition: a rate misses one only when its exact interval excludes it."""

from __future__ import annotations

import numpy as np
import pytest

from bench.planted_attrition import Losses, Setting, judged, line_of, run_setting

RANDOM = Setting(background=0.05)
SELECTIVE = Setting(background=0.05, selective=0.1)


@pytest.mark.parametrize(
    ("setting", "tally", "name"),
    [
        (RANDOM, Losses(studies=300, flagged=60), "random_flagged"),
        (RANDOM, Losses(studies=300, supported=60), "null_supported_rate"),
        (SELECTIVE, Losses(studies=300, caught=240), "selective_caught"),
    ],
)
def test_a_rate_far_from_its_bar_is_named(setting: Setting, tally: Losses, name: str) -> None:
    summary, missed = judged([(setting, tally)])
    assert len(missed) == 1
    assert missed[0].startswith(name)
    assert summary["pass"] is False


def test_luck_is_no_miss() -> None:
    results = [(RANDOM, Losses(studies=300, flagged=20)), (SELECTIVE, Losses(studies=300, caught=280))]
    assert judged(results)[1] == []


@pytest.mark.anyio
async def test_wrong_answers_that_one_arm_loses_make_an_effect_which_the_sentinel_takes() -> None:
    setting = Setting(background=0.02, selective=0.3)
    tally = await run_setting(setting, 5, np.random.default_rng(0))
    assert (tally.studies, tally.caught, tally.supported) == (5, 5, 0)
    assert tally.bare >= 4
    line = line_of(setting, tally, 0.0)
    assert line["selective_caught"] == 1.0
