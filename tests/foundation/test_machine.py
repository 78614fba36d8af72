"""What a machine has: its memory or what a container is given of it, what its CPU can do, and its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foundation.machine import Gpu, GpusUnknown, available_memory, gpus, multiplies_bfloat16, total_memory

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


H100 = "0, NVIDIA H100 80GB HBM3, 81559, 81079, 9.0, 580.95.05\n"


def smi(folder: Path, does: str) -> dict[str, Any]:
    """A driver, and an nvidia-smi that does this."""
    (folder / "nvidiactl").touch()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return {"driver": folder / "nvidiactl", "program": str(program)}


def test_gpus_are_those_that_nvidia_smi_names(tmp_path: Path) -> None:
    said = H100 + "1, Tesla T4, 15360, 15000, 7.5, 580.95.05\n"
    first, second = gpus(**smi(tmp_path, f"printf '{said}'"))
    assert first == Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 81079 << 20, (9, 0), "580.95.05")
    assert first.driver_branch == 580
    assert (second.index, second.capability) == (1, (7, 5))


def test_a_machine_without_nvidias_driver_has_no_gpu(tmp_path: Path) -> None:
    assert gpus(driver=tmp_path / "none", program="no-such-program") == []


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ("exit 3", "failed: 3"),
        ("echo '0, [GPU is lost], [N/A], [N/A], [N/A], 580.95.05'", "GPU is lost"),
    ],
)
def test_a_driver_that_does_not_say_is_no_machine_without_a_gpu(tmp_path: Path, does: str, said: str) -> None:
    with pytest.raises(GpusUnknown, match=said):
        gpus(**smi(tmp_path, does))


def test_a_driver_without_nvidia_smi_is_no_machine_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(GpusUnknown, match="does not answer"):
        gpus(**smi(tmp_path, "") | {"program": str(tmp_path / "none")})
