"""A share is a share of the whole: in the plan, in what runs, in what the sentinels and the report hold against it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from researcher.instruments.catalogue import read_instrument
from researcher.instruments.instrument import Factor
from researcher.instruments.shares import with_shares
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from swarm.protocol.runspec import RunSpec
from tests.fakes.specs import planned

KITCHEN = Path(__file__).parents[2] / "instruments" / "kitchen"
SUMS = {"sums_ratio": {"baseline": 0.4, "levels": [0.7]}}
TARGET = "run.batch.mix.{}.ratio"


def mixed() -> Plan:
    return planned("cocktail", compare=SUMS, claim="increase")


def mixes(plan: Plan) -> dict[str, dict[str, float]]:
    """By arm: the ratios that a server gets, as shares of their sum."""
    found = {}
    for arm in plan.arms:
        mix = RunSpec.model_validate(plan.run_fields(plan.levels_of(arm))).batch.mix
        whole = math.fsum(each.ratio for each in mix.values())
        found[arm.name] = {name: round(each.ratio / whole, 6) for name, each in mix.items()}
    return found


def test_a_share_of_a_spec_is_the_share_that_runs() -> None:
    plan = mixed()
    assert mixes(plan) == {
        "sums_ratio=0.4": {"sums": 0.4, "words": 0.3, "larger": 0.3},
        "sums_ratio=0.7": {"sums": 0.7, "words": 0.15, "larger": 0.15},
    }
    assert "The mix of sums_ratio=0.7 is sums 70 %, words 15 %, larger 15 %." in plan.assumptions
    assert not [name for name, _ in plan.held if ".mix." in name]


def test_a_share_that_all_arms_have_is_one_too() -> None:
    plan = planned("cocktail", set={"sums_ratio": 0.7})
    assert set(map(str, mixes(plan).values())) == {str({"sums": 0.7, "words": 0.15, "larger": 0.15})}


@pytest.mark.parametrize("level", [1.2, 0, "70 %"])
def test_what_is_no_share_of_a_whole_is_refused(level: float | str) -> None:
    with pytest.raises(PlanningRefused, match=r"^compare\.sums_ratio: sums_ratio (is a share|takes numbers)"):
        planned("cocktail", compare={"sums_ratio": {"baseline": 0.4, "levels": [level]}})


def test_a_factor_whose_words_say_share_is_one_without_a_flag(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(KITCHEN, tmp_path / "kitchen"))
    file = folder / "instrument.toml"
    added = """
[[factors]]
name = "soup"
target = "run.batch.mix.soup.ratio"
type = "float"
default = 2.0
low = 0.1
high = 10.0
aliases = ["ALIAS of soup"]

[defaults.run.batch.mix]
soup = { ratio = 2.0 }
bread = { ratio = 6.0 }
"""
    text = file.read_text()
    for alias, share in (("percentage", True), ("weight", None)):
        file.write_text(text + added.replace("ALIAS", alias))
        factor = next(each for each in read_instrument(folder).instrument.factors if each.name == "soup")
        assert (factor.share, factor.default) == (share, 0.25 if share else 2.0)


def test_shares_leave_the_rest_to_the_others_in_their_own_proportion() -> None:
    mix = {"a": {"ratio": 1.0, "patience_s": 5.0}, "b": {"ratio": 3.0}, "c": {"ratio": 1.0}}
    found = with_shares(mix, {"a": 0.2})
    assert found == {"a": {"ratio": 0.2, "patience_s": 5.0}, "b": {"ratio": 0.6}, "c": {"ratio": 0.2}}
    assert with_shares(mix, {"a": 0.2, "b": 0.5})["c"] == {"ratio": 0.3}
    with pytest.raises(ValueError, match="leave nothing for b, c"):
        with_shares(mix, {"a": 1.0})
    with pytest.raises(ValueError, match="do not sum to 1"):
        with_shares({"a": {"ratio": 1.0}}, {"a": 0.5})


def test_plans_that_were_frozen_with_a_weight_keep_it_and_their_hash() -> None:
    plan = mixed()
    old = plan.model_copy(update={"factors": tuple(each.model_copy(update={"share": None}) for each in plan.factors)})
    assert "share" not in Factor.model_validate(old.factors[0].model_dump()).model_dump(mode="json")
    assert mixes(old)["sums_ratio=0.7"]["sums"] == pytest.approx(0.7 / 1.3, abs=1e-6)
    assert old.shared_out(old.arms[1]) == {}
    assert TARGET.format("sums") in old.levels_of(old.arms[1])
