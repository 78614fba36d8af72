"""The memory of this machine or container, and what its CPU can do. Does not import torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

REPRODUCIBLE_SUMS = {"MKL_CBWR": "AUTO"}
"""Environment of a process that trains on the CPU: only in this mode is MKL bitwise reproducible across runs (docs/decisions/0024)."""
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Control group files, for versions 2 and 1: limit, usage, statistics, and the statistic that counts reclaimable file cache."""


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of memory available without swapping; None if unknown."""
    free, limits = _field(meminfo, "MemAvailable:", unit=1024), _limits(cgroup)
    if free is None or limits is None:
        return free
    limit, used = limits
    return min(free, max(0, limit - used))


def total_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the total memory of this machine or container, in bytes; None if unknown."""
    total, limits = _field(meminfo, "MemTotal:", unit=1024), _limits(cgroup)
    return total if total is None or limits is None else min(total, limits[0])


def _limits(cgroup: Path) -> tuple[int, int] | None:
    """Return (limit, used) of this container's memory, in bytes; None without a limit."""
    for limit_name, used_name, stat_name, files in _LIMITS:
        try:
            limit, used = (cgroup / limit_name).read_text().strip(), int((cgroup / used_name).read_text())
        except OSError:  # a different cgroup version, or no cgroups
            continue
        return None if limit == "max" else (int(limit), used - (_field(cgroup / stat_name, files) or 0))
    return None


def _field(file: Path, name: str, *, unit: int = 1) -> int | None:
    """Return the number after a name in a file of `name number` lines; None if it is not there."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # not Linux, or a container that hides the file
        return None
    return next((int(words[1]) * unit for words in map(str.split, lines) if words[:1] == [name]), None)


# -- CPU ------------------------------------------------------------------------------------------------------------------

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = ({"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""Instruction sets that torch needs for vectorised bfloat16 products, on x86 and on ARM."""


@cache
def multiplies_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """True if torch multiplies bfloat16 matrices about as fast as float32 ones on this CPU, or if that is unknown.

    Most laptop CPUs cannot: on them bfloat16 is eight times slower than float32. Two cores of an AMD Zen 3 reach 17 GFLOP/s in
    bfloat16 and 145 in float32 when they multiply 1,136 rows by SmolLM2's matrices.
    """
    can = _instructions(cpuinfo)
    return can is None or any(needed <= can for needed in _BFLOAT16)


def _instructions(cpuinfo: Path) -> set[str] | None:
    """Return the instruction sets of the first core; None if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux, or a container that hides the file
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return None
