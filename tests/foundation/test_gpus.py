"""NVIDIA cards, as nvidia-smi names them; a driver that does not answer is not taken for a machine without one where it matters."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.gpus import Card, DriverSilent, answered_cards, cards

H100 = "0, NVIDIA H100 80GB HBM3, 81559, 81079, 580.95.05\n"
T4 = "1, Tesla T4, 15360, 15000, 535.183.01\n"


def smi(folder: Path, does: str) -> str:
    """An nvidia-smi that does this."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return str(program)


def test_cards_are_those_that_nvidia_smi_names(tmp_path: Path) -> None:
    first, second = cards(smi(tmp_path, f"printf '{H100}{T4}'"))
    assert first == Card(index=0, name="NVIDIA H100 80GB HBM3", total=81559 << 20, free=81079 << 20, driver="580.95.05")
    assert (first.driver_is_new_enough, second.driver_is_new_enough) == (True, False)


def test_a_machine_without_nvidias_driver_has_no_card(tmp_path: Path) -> None:
    assert answered_cards("no-such-program", device=tmp_path / "none") == []


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ("exit 3", "failed: 3"),
    ],
)
def test_a_driver_that_does_not_say_is_no_machine_without_a_card(tmp_path: Path, does: str, said: str) -> None:
    with pytest.raises(DriverSilent, match=said):
        answered_cards(smi(tmp_path, does))
    assert cards(smi(tmp_path, does)) == []


def test_a_driver_without_nvidia_smi_is_no_machine_without_a_card(tmp_path: Path) -> None:
    with pytest.raises(DriverSilent, match="NVIDIA_DRIVER_CAPABILITIES"):
        answered_cards("no-such-program", device=tmp_path)
