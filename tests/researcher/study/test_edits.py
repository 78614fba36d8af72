"""Options of the command line set fields of the spec by name."""

from __future__ import annotations

import re

import pytest

from foundation.commandline import UsageError
from researcher.study.draft import Draft, arms_of, edited, marked, options_of, seeds_of, settings_of, vary_of
from researcher.study.spec import StudySpec

FIELDS = {
    "compare": {"kl": {"levels": [0.1]}},
    "set": {"epochs": 2},
    "seeds": {"min": 3, "max": 8},
    "claim": "increase",
}
DRAFT = Draft(
    fields=FIELDS, sources=marked(FIELDS, "file"), author="file", because="it matters", uncovered=("the cost",)
)


def test_the_first_level_is_the_baseline_and_a_single_one_stands_against_the_default() -> None:
    assert vary_of(["lr=1e-5, 4e-5", "algorithm=rloo", "hints=true,false"]) == {
        "lr": {"baseline": 1e-5, "levels": [4e-5]},
        "algorithm": {"levels": ["rloo"]},
        "hints": {"baseline": True, "levels": [False]},
    }


def test_a_spec_can_be_written_as_options() -> None:
    spec = StudySpec.model_validate(
        {"question": "Is it better?", "instrument": "arithmetic", **FIELDS, "heldout_every": 2}
    )
    assert options_of(spec, {"kl": 0})[-4:] == ["--claim", "increase", "--heldout-every", "2"]


def test_arms_settings_and_seeds_are_read() -> None:
    assert arms_of(["vanilla:", "dapo:clip_high=0.28,kl=0,loss_agg=token"]) == {
        "vanilla": {},
        "dapo": {"clip_high": 0.28, "kl": 0, "loss_agg": "token"},
    }
    assert settings_of("--set", ["said=a=b", "epochs=2"]) == {"said": "a=b", "epochs": 2}
    assert seeds_of("3") == {"min": 3, "max": 3}
    assert seeds_of("3..8") == {"min": 3, "max": 8}


@pytest.mark.parametrize(
    ("read", "given", "says"),
    [
        (lambda text: vary_of([text]), "lr", "--vary 'lr' is not a setting; write --vary FACTOR=A,B"),
        (lambda text: vary_of([text]), "lr=1,,2", "has an empty level"),
        (lambda text: vary_of([text, text]), "lr=1", "--vary lr is given twice"),
        (lambda text: arms_of([text]), "kl=1", "has no colon; write --arm NAME:FACTOR=LEVEL"),
        (lambda text: arms_of([text, text]), "a:kl=1", "is given twice"),
        (lambda text: arms_of([text]), "a:kl", "--arm 'kl' is not a setting"),
        (lambda text: settings_of("--set", [text]), "kl=", "--set 'kl=' is not a setting; write --set FACTOR=LEVEL"),
        (seeds_of, "3-8", "--seeds '3-8' is not a number of seeds; write 3, or 3..8"),
        (seeds_of, "-1", "is not a number of seeds"),
    ],
)
def test_what_is_no_option_says_how_to_write_it(read, given: str, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=re.escape(says)):
        read(given)


def test_options_replace_what_is_compared_and_add_to_settings_seeds_and_budget() -> None:
    edits = {"set": {"digits": 2}, "seeds": {"first": 9}, "budget": {"wall": 60.0}, "claim": "none"}
    found = edited(DRAFT, edits)
    added = {"set": {"epochs": 2, "digits": 2}, "seeds": {"min": 3, "max": 8, "first": 9}, "budget": {"wall": 60.0}}
    assert found.fields == {**FIELDS, **added, "claim": "none"}
    flagged = {path for path, source in found.sources.items() if source == "flag"}
    assert flagged == {"set.digits", "seeds.first", "budget.wall", "claim"}
    assert found.sources["seeds.min"] == "file"
    assert (found.author, found.because, found.uncovered) == ("file", "it matters", ("the cost",))
    empty = Draft(fields={"set": None}, author="file")
    assert edited(empty, {"set": {"digits": 2}}).fields == {"set": {"digits": 2}}


def test_arms_take_the_place_of_what_is_compared_and_the_other_way_round() -> None:
    arms = edited(DRAFT, {"arms": {"a": {}, "b": {"kl": 0.1}}})
    assert "compare" not in arms.fields
    assert not [path for path in arms.sources if path.startswith("compare")]
    compared = edited(arms, {"compare": {"epochs": {"levels": [2]}}})
    assert "arms" not in compared.fields
    assert compared.sources["compare.epochs"] == "flag"
    assert not [path for path in compared.sources if path.startswith("arms")]


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="--set sets epochs twice"):
        settings_of("--set", ["epochs=2", "epochs=3"])
    with pytest.raises(UsageError, match="--arm sets kl twice"):
        arms_of(["a:kl=0,kl=0.1"])
