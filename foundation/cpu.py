"""What this machine's CPU can do, as its system tells. Imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = ({"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""Instructions, on x86 and on ARM, without which torch multiplies bfloat16 number by number."""


@cache
def multiplies_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether torch multiplies matrices in bfloat16 at least about as fast as in float32 here; True where nothing tells.

    On CPUs that cannot, which most laptops have, it is eight times slower: 17 against 145 GFLOP/s for 1,136 rows of SmolLM2's
    matrices on two cores of an AMD Zen 3.
    """
    can = _instructions(cpuinfo)
    return can is None or any(needed <= can for needed in _BFLOAT16)


def _instructions(cpuinfo: Path) -> set[str] | None:
    """Of the first core; None where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system than Linux, or a container that hides it
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return None
