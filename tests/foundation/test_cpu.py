"""What this machine's CPU can do, read from what its system tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.cpu import multiplies_bfloat16


@pytest.mark.parametrize(
    ("told", "can"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx avx2 fma f16c\n", False),
        ("flags\t\t: avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16\n", True),
        ("flags\t\t: avx2 avx512f\n", False),
        ("Features\t: fp asimd\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("model name\t: of another kind\n", True),
    ],
)
def test_a_cpu_multiplies_bfloat16_where_it_has_the_instructions_or_does_not_tell(
    tmp_path: Path, told: str, can: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") == can


def test_a_system_that_does_not_tell_is_taken_for_one_that_can(tmp_path: Path) -> None:
    assert multiplies_bfloat16(tmp_path / "none")
