"""What a machine has: its memory or what a container is given of it, and what its CPU can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.machine import available_memory, multiplies_bfloat16, total_memory

MACHINE = {"meminfo": "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   8388608 kB\n"}
GIB = 1 << 30
SECOND = {"cgroup/memory.max": f"{4 * GIB}\n", "cgroup/memory.current": f"{3 * GIB}\n"}
FIRST = {"cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n", "cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n"}


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, None, None),
        (MACHINE, 16 * GIB, 8 * GIB),
        (MACHINE | SECOND, 4 * GIB, GIB),
        (MACHINE | SECOND | {"cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n"}, 4 * GIB, 2 * GIB),
        (MACHINE | SECOND | {"cgroup/memory.max": "max\n"}, 16 * GIB, 8 * GIB),
        (MACHINE | FIRST, 4 * GIB, GIB),
        (MACHINE | FIRST | {"cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n"}, 4 * GIB, 2 * GIB),
        (MACHINE | FIRST | {"cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 16 * GIB, 8 * GIB),
    ],
    ids=["nothing tells", "a machine", "v2", "v2 with files", "v2 unlimited", "v1", "v1 with files", "v1 unlimited"],
)
def test_a_containers_limit_counts_and_files_that_can_be_dropped_are_free(
    tmp_path: Path, files: dict[str, str], total: int | None, available: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    where = (tmp_path / "meminfo", tmp_path / "cgroup")
    assert (total_memory(*where), available_memory(*where)) == (total, available)


@pytest.mark.parametrize(
    ("cpuinfo", "can"),
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
    tmp_path: Path, cpuinfo: str, can: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") == can


def test_a_system_that_does_not_tell_is_taken_for_one_that_can(tmp_path: Path) -> None:
    assert multiplies_bfloat16(tmp_path / "none")
