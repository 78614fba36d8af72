"""Numbers in all usual forms."""

from __future__ import annotations

import pytest

from researcher.planner.wording import number_text, phrase, tokens


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4e-5, 4E-05, 0.00004 and 4e−5", [4e-5] * 4),
        ("1×10^-5 1x10^-5 1·10⁻⁵ 10^-5 10⁻⁵ 1*10**-5 1 × 10^(-5)", [1e-5] * 7),
        ("5/15/25", [5, 15, 25]),
        ("4,8,16", [4, 8, 16]),
        ("4–8 and 4-8", [4, 8, 4, 8]),
        ("1,000 steps", [1000]),
        (".7 or 70%", [0.7, 0.7]),
        ("2-digit", [2]),
        ("lr=1e-5;n=8", [1e-5, 8]),
        ("SmolLM2-135M has 30 layers", [30]),
        ("-0.5", [-0.5]),
    ],
)
def test_a_number_is_read_in_every_usual_form(text: str, values: list[float]) -> None:
    assert [t.value for t in tokens(text) if t.kind == "number"] == pytest.approx(values)


@pytest.mark.parametrize("text", ["10x the rate", "10× the rate", "ten times the rate", "10-fold"])
def test_what_multiplies_is_no_level(text: str) -> None:
    found = tokens(text)
    assert found[0].kind == "times"
    assert found[0].value == 10


@pytest.mark.parametrize(
    ("value", "text"), [(4e-5, "4e-5"), (1.6e-4, "1.6e-4"), (0.7, "0.7"), (16.0, "16"), (0.0, "0"), (0.002, "0.002")]
)
def test_a_number_is_written_as_people_write_it(value: float, text: str) -> None:
    assert number_text(value) == text
    assert float(text) == value


def test_hyphens_underscores_and_plurals_do_not_matter_in_names() -> None:
    assert phrase("group_sizes") == phrase("Group-size") == phrase("group size")
