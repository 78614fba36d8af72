"""How much memory this machine has, or the container we are in, as its system tells."""

from __future__ import annotations

from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of control groups, versions 2 and 1: limit, what is used, and where and by what name files stand that can be dropped from it."""


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can be used without swapping; None where the system does not tell."""
    free, limits = _field(meminfo, "MemAvailable:", unit=1024), _limits(cgroup)
    if free is None or limits is None:
        return free
    limit, used = limits
    return min(free, max(0, limit - used))


def total_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that this machine, or the container we are in, has in all; None where the system does not tell."""
    total, limits = _field(meminfo, "MemTotal:", unit=1024), _limits(cgroup)
    return total if total is None or limits is None else min(total, limits[0])


def _limits(cgroup: Path) -> tuple[int, int] | None:
    """(limit, used) of the container we are in, in bytes; None without a limit."""
    for limit_name, used_name, stat_name, files in _LIMITS:
        try:
            limit, used = (cgroup / limit_name).read_text().strip(), int((cgroup / used_name).read_text())
        except OSError:  # another version, or none
            continue
        return None if limit == "max" else (int(limit), used - (_field(cgroup / stat_name, files) or 0))
    return None


def _field(file: Path, name: str, *, unit: int = 1) -> int | None:
    """The number that stands after a name in a list of them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # another system than Linux, or a container that hides it
        return None
    return next((int(words[1]) * unit for words in map(str.split, lines) if words[:1] == [name]), None)
