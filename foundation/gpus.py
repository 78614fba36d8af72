"""The NVIDIA GPUs of this machine: which ones the driver reports, and which ones models may use. Never imports torch or starts CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version")
_LIMIT_S = 20.0
_MIB = 1 << 20
DEVICE = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver; it exists in containers too."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = Path("/dev")
_CUDA_VLLM = "vllm"
"""Name of the vLLM distribution built for CUDA; the CPU build has a different name."""
NEWEST_CUDA_DRIVER = 580
"""The first driver that runs CUDA 13, which torch and vLLM are built for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU. `index` is the driver's number for it, `total` and `free` are bytes of its memory, and `driver` is the
    driver's version, such as "580.159.04"."""

    index: int
    name: str
    total: int
    free: int
    driver: str

    @property
    def driver_is_new_enough(self) -> bool:
        """Whether this driver runs CUDA 13."""
        major = self.driver.partition(".")[0]
        return major.isdecimal() and int(major) >= NEWEST_CUDA_DRIVER


class DriverSilent(Exception):
    """This machine has an NVIDIA driver, but the driver does not list its GPUs. The message says why."""


def cards(tool: str = "nvidia-smi") -> list[Card]:
    """Return all GPUs of the machine, even those hidden from CUDA; empty if there is no driver or it does not answer."""
    try:
        return answered_cards(tool)
    except DriverSilent:
        return []


def answered_cards(tool: str = "nvidia-smi", device: Path = DEVICE) -> list[Card]:
    """Return all GPUs like `cards`, but raise DriverSilent if the driver does not answer."""
    program = shutil.which(tool)
    if program is None:
        if device.exists():
            raise DriverSilent(
                f"this machine has an NVIDIA driver but no {tool}: in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return []
    wanted = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(wanted, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise DriverSilent(f"{tool} does not answer: {error}") from error
    if answer.returncode:
        raise DriverSilent(f"{tool} failed: {(answer.stdout + answer.stderr).strip() or answer.returncode}")
    return [card for line in answer.stdout.splitlines() if (card := _card(line)) is not None]


def _card(line: str) -> Card | None:
    """Parse one line of the driver's answer; None for a GPU that does not report its memory."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_FIELDS):
        return None
    index, name, total, free, driver = parts
    if not (index.isdecimal() and total.isdecimal() and free.isdecimal()):
        return None
    return Card(index=int(index), name=name, total=int(total) * _MIB, free=int(free) * _MIB, driver=driver)


def why_no_gpu(environ: Mapping[str, str]) -> str | None:
    """Return why no GPU can be used; None if one can."""
    if not DEVICE.exists():
        return f"this machine has no NVIDIA driver ({DEVICE} is missing)"
    if environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return f"{VISIBLE} hides every GPU"
    try:
        distribution(_CUDA_VLLM)
    except PackageNotFoundError:
        return "vLLM is not built for CUDA here; install requirements/gpu.txt (pip install --no-deps -r requirements/gpu.txt)"
    return None


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that CUDA may use, by number or UUID, up to the first invalid one; None means all."""
    if VISIBLE not in environ:
        return None
    named: list[str] = []
    for each in environ[VISIBLE].split(","):
        if each.strip() in ("", "-1"):
            break
        named.append(each.strip())
    return named


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that CUDA may use; unless CUDA_VISIBLE_DEVICES is set, count their device files."""
    visible = visible_gpus(environ)
    if visible is not None:
        return len(visible)
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in _DEVICE_FILES.glob("nvidia*"))
