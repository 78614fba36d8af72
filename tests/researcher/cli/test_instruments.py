"""`researcher instruments` says what can be asked, and each thing once."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from researcher.instruments.catalogue import available, open_instrument
from researcher.main import main, parser
from researcher.refusals import PlanningRefused

NAMES = [each.instrument.name for each in available({})]


@pytest.fixture(autouse=True)
def _ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_STUDIES", raising=False)


def test_without_a_name_each_instrument_has_a_line_and_what_they_share_stands_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["instruments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(NAMES)]] == NAMES
    for name in ("learning_rate", "algorithm", "entropy_final", "tokens_sampled", "seconds_to_threshold"):
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_with_a_name_one_screen_shows_what_is_its_own_and_how_to_start(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["instruments", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    asked = parser().parse_args(shlex.split(lines[-1])[1:])
    assert (asked.instrument, asked.vary) == (name, ["learning_rate=1e-5,4e-5"])
    own = {factor.name for factor in open_instrument(name).instrument.factors if factor.target.startswith("task.")}
    assert own <= {line.split()[0] for line in lines}


def test_an_unknown_name_or_level_lists_the_five_nearest_at_most() -> None:
    with pytest.raises(PlanningRefused, match=rf"there are (\w+, ){{4}}\w+ and {len(NAMES) - 5} more") as refused:
        open_instrument("chess", {})
    assert len(refused.value.nearest) == 5
