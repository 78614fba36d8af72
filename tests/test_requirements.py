"""The locks agree with each other, with what their packages require, and with the package index.

Nothing is installed here. The CPU lock is compared with the metadata of this environment, which was made from it; the GPU lock, which is
installed on no machine of CI, is resolved by uv against the index's metadata.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).resolve().parents[1] / "requirements"
PIN = re.compile(r"([\w.-]+)===?([\w.+!]+)")

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
"""vLLM names them for audio and video, which nothing here uses."""

BUILT_FOR_CUDA = {"apache-tvm-ffi", "torch", "triton"}
"""Pinned differently on a GPU: torch's builds, its own Triton, and what TileLang takes of apache-tvm-ffi."""

VERL_UNMET = {
    ("opencensus", "google-api-core"),  # Ray's dashboard uses none of it
    ("verl", "pybind11"),  # to compile Megatron's helpers
    ("verl", "pylatexenc"),  # a reward function of verl's own
    ("verl", "tensordict"),  # verl wants older ones than vLLM and transformers here; the engine's tests run this set
    ("verl", "transformers"),
    ("verl", "wandb"),
    ("verl", "tensorboard"),
}


def pins(*names: str) -> dict[str, str]:
    """Versions by normalised name. Raises: AssertionError for a line that pins nothing."""
    found: dict[str, str] = {}
    for name in names:
        for line in (LOCKS / f"{name}.txt").read_text().splitlines():
            if not line or line.startswith(("#", "-r ")):
                continue
            pin = PIN.fullmatch(line)
            assert pin is not None, f"{name}.txt: {line}"
            found[canonicalize_name(pin[1])] = pin[2]
    return found


def unmet(*names: str) -> set[tuple[str, str]]:
    """(package, requirement) wherever the locks together do not have what an installed package of them requires."""
    locked, missing = pins(*names), set[tuple[str, str]]()
    for package in locked:
        try:
            wanted = [Requirement(text) for text in requires(package) or ()]
        except PackageNotFoundError:  # an environment of another lock
            continue
        for one in wanted:
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            version = locked.get(canonicalize_name(one.name))
            if version is None or not one.specifier.contains(version, prereleases=True):
                missing.add((package, canonicalize_name(one.name)))
    return missing


def test_the_cpu_lock_has_what_its_packages_require() -> None:
    assert {name for _, name in unmet("cpu")} <= LEFT_OUT


def test_verls_lock_lacks_only_what_is_known_to_be_lacking() -> None:
    lacking = {each for each in unmet("cpu", "ray", "verl") if each[1] not in LEFT_OUT}
    assert lacking <= VERL_UNMET


def test_locks_that_lie_on_top_of_each_other_pin_the_same_versions() -> None:
    for name in ("gpu", "ray", "verl", "dev"):
        cpu, other = pins("cpu"), pins(name)
        assert {each for each in cpu.keys() & other.keys() if cpu[each] != other[each]} <= BUILT_FOR_CUDA, name
    gpu, verl = pins("gpu"), pins("ray", "verl", "dev")
    assert {each for each in gpu.keys() & verl.keys() if gpu[each] != verl[each]} == set()


def test_the_gpu_lock_cannot_be_met_by_the_cpu_build_of_torch() -> None:
    assert re.search(r"^torch===[\d.]+$", (LOCKS / "gpu.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_gpu_lock_resolves_to_itself_on_the_index(python: str) -> None:
    """No conflict, a wheel for each pin, and nothing required that it does not pin, the development tools included."""
    locks = [str(LOCKS / f"{name}.txt") for name in ("gpu", "dev")]
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", *locks, "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    command += ["--quiet", "--no-header", "--no-annotate"]
    environ = {
        **os.environ,
        **_index(),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_HTTP_RETRIES": "1",
        "UV_HTTP_TIMEOUT": "20",
    }
    resolved = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if resolved.returncode == 2:  # 1 is a conflict
        pytest.skip(f"no package index to resolve against: {resolved.stderr.strip().splitlines()[0]}")
    assert resolved.returncode == 0, resolved.stderr
    found = {canonicalize_name(pin[1]): pin[2] for line in resolved.stdout.splitlines() if (pin := PIN.fullmatch(line))}
    assert pins("gpu", "dev").items() <= found.items()
    assert found.keys() - pins("gpu", "dev").keys() == LEFT_OUT


def _index() -> dict[str, str]:
    """pip's own index for uv, which does not read pip's configuration."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return {"UV_DEFAULT_INDEX": shown.stdout.strip()} if shown.returncode == 0 else {}
