"""How much memory there is: the machine's, or what a container is given of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.memory import available_memory, total_memory

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
