"""Images are built from the locks, run without root and hold no secret; and what their steps install serves a model."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.deploy.images import ROOT, Step, is_of_the_system, last, play, sources, steps_of

FOLDER = ROOT / "deploy" / "docker"
FILES = [FOLDER / "Dockerfile.cpu", FOLDER / "Dockerfile.cuda"]
files = pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])


def test_the_linter_finds_nothing() -> None:
    linted = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), *FILES], capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


@files
def test_packages_come_from_the_locks_before_any_code_does(file: Path) -> None:
    steps = steps_of(file)
    lock = {"cpu": "requirements/cpu.txt", "cuda": "requirements/gpu.txt"}[file.suffix[1:]]
    copied = [step for step in steps if step.name == "COPY"]
    assert lock in copied[0].words
    assert all(word.startswith("requirements/") for word in copied[0].words)
    installed = [step for step in steps if step.name == "RUN" and not is_of_the_system(step)]
    assert [step.text.startswith("python -m pip install --no-cache-dir --no-deps ") for step in installed] == [True] * 2
    assert f"-r {lock}" in installed[0].text
    assert steps.index(copied[0]) < steps.index(installed[0]) < steps.index(copied[1])


@files
def test_an_image_takes_every_package_of_ours_and_nothing_that_is_ignored(file: Path) -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    taken = [source for step in steps_of(file) if step.name == "COPY" for source in sources(step)]
    assert all(source.exists() for source in taken)
    named = {source.relative_to(ROOT).parts[0] for source in taken}
    assert named == let_through
    assert {"foundation", "swarm", "researcher", "studies", "db", "pyproject.toml", "setup.py"} <= named


@files
def test_a_container_is_no_root_and_keeps_its_state_in_a_volume(file: Path) -> None:
    steps = steps_of(file)
    home = last(steps, "VOLUME").text
    assert last(steps, "USER").text == "10001:10001"
    assert any(is_of_the_system(step) and f"--home-dir {home} --uid 10001" in step.text for step in steps)
    assert f"HOME={home}" in last(steps, "ENV").text
    assert last(steps, "WORKDIR").text == home
    assert all("chown" not in step.text and not step.flags for step in steps if step.name == "COPY")


@files
def test_nothing_secret_is_built_in(file: Path) -> None:
    for step in steps_of(file):
        if step.name in ("ARG", "ENV"):
            assert not any(word in step.text.upper() for word in ("TOKEN", "PASSWORD", "SECRET", "API_KEY"))
        if step.name == "ARG":
            assert step.text.endswith('=""')


def test_both_images_have_the_same_steps_but_for_the_lock_and_the_gpu() -> None:
    def rest(file: Path) -> list[Step]:
        return [
            step for step in steps_of(file) if step.name in ("USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT")
        ]

    assert rest(FILES[0]) == rest(FILES[1])


@pytest.mark.campaign
def test_what_the_steps_of_the_cpu_image_install_serves_its_model(tmp_path: Path) -> None:
    """In a new environment, with nothing of this one but pip's configuration and the models that were fetched. Some minutes, 4 GB."""
    steps = steps_of(FILES[0])
    environment, home = tmp_path / "environment", tmp_path / last(steps, "VOLUME").text.lstrip("/")
    venv.EnvBuilder(with_pip=True, symlinks=True).create(environment)
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    path = f"{environment / 'bin'}:{os.defpath}"
    play(steps, tmp_path, {**pip, "PATH": path, "HOME": str(home), "LANG": "C.UTF-8"})
    home.mkdir(parents=True, exist_ok=True)
    environ = {
        "PATH": path,
        "HOME": str(home),
        "SWARM_MODELS": os.environ.get("SWARM_MODELS", str(Path.home() / ".cache" / "swarm-researcher" / "models")),
        "SWARM_ADMIN_TOKEN": secrets.token_hex(16),
        "SWARM_CLIENT_TOKEN": secrets.token_hex(16),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*last(steps, "CMD").words, "--port", port]
    check = [word.replace("8642", port) for word in steps_of_check(steps)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=home, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while subprocess.run(check, env=environ, capture_output=True, check=False).returncode:
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(1)
        asked = [
            "swarm", "run", "start", "--url", f"http://127.0.0.1:{port}", "--set", "limits.steps=1", "--json",
        ]  # fmt: skip
        started = subprocess.run(
            asked,
            env=environ | {"SWARM_TOKEN": environ["SWARM_ADMIN_TOKEN"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert started.returncode == 0, started.stderr
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60) is not None
    assert server.returncode == 0, (tmp_path / "log").read_text()


def steps_of_check(steps: list[Step]) -> list[str]:
    """The command of the health check."""
    return Step("CMD", (), last(steps, "HEALTHCHECK").text.removeprefix("CMD ")).words
