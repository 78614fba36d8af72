"""Code that means harm, in both kinds of sandbox: what it tries is stopped, and what it needs works."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from foundation.confinement import Bounds, landlock_version
from researcher.sandbox.launch import Mode, confined, of_mode, sandbox, spec_of

LIMIT_S = 120
BOUNDS = Bounds(cpu_s=60, address_bytes=2 << 30, file_bytes=1 << 20)


@pytest.fixture(params=[Mode.BUBBLEWRAP, Mode.LIMITS])
def mode(request: pytest.FixtureRequest) -> Mode:
    wanted: Mode = request.param
    if wanted is Mode.BUBBLEWRAP and sandbox().mode is not Mode.BUBBLEWRAP:
        pytest.skip(sandbox().words)
    if sys.platform != "linux":
        pytest.skip("seccomp and Landlock are Linux's")
    return wanted


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """What lies in somebody's home."""
    file = tmp_path / "home" / ".ssh" / "id_ed25519"
    file.parent.mkdir(parents=True)
    file.write_text("a private key")
    return file


def shut(mode: Mode, least: int) -> None:
    """Skip where the limits of this kernel do not reach so far; `sandbox()` says so to people."""
    if mode is Mode.LIMITS and landlock_version() < least:
        pytest.skip(f"Landlock {landlock_version()} of this kernel does not shut it: {of_mode(mode).words}")


def run(
    code: str,
    place: Path,
    mode: Mode,
    *,
    servers: tuple[str, ...] = (),
    reads: tuple[Path, ...] = (),
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    program = f"import os, socket, subprocess, sys, threading\n{code}\nprint('went through')\n"
    environ = {
        **os.environ,
        "RESEARCHER_LLM_API_KEY": "sk-verysecret",
        "SWARM_ADMIN_TOKEN": "swt_admin",
        "AWS_SECRET": "s",
    }
    command, environ = confined(
        [python, "-c", program],
        environ,
        place / "sandbox",
        reads=reads,
        servers=servers,
        mode=mode,
        bounds=BOUNDS,
    )
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def serving() -> Iterator[int]:
    """A server on this machine; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_code_does_not_start_where_a_promised_barrier_is_not_in_force(tmp_path: Path, mode: Mode) -> None:
    """The system may report that it set less than it had said that it can."""
    spec = spec_of([sys.executable, "-c", "print('ran')"], tmp_path, reads=[], mode=mode, bounds=BOUNDS)
    assert spec.promised
    file = tmp_path / "sandbox.json"
    file.write_text(spec.model_dump_json())
    weak = "from researcher.sandbox import entry; from foundation.confinement import Confined\n"
    weak += "entry.confine = lambda *_, **__: Confined(calls=False, files=False, ports=False)\n"
    weak += f"entry.become(entry.SandboxSpec.model_validate_json(open({str(file)!r}).read()))"
    done = subprocess.run([sys.executable, "-c", weak], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    assert "ran" not in done.stdout
    assert "does not enforce the promised limits on calls" in done.stderr


def test_what_an_instrument_needs_works(tmp_path: Path, mode: Mode) -> None:
    data = tmp_path / "instrument" / "words.txt"
    data.parent.mkdir()
    data.write_text("ba de")
    code = (
        f"print(open({str(data)!r}).read())\n"
        "open(os.path.join(os.environ['HOME'], 'mine'), 'w').write('x')\n"
        "open(os.path.join(os.environ['TMPDIR'], 'too'), 'w').write('x')\n"
        "thread = threading.Thread(target=print, args=('a thread',)); thread.start(); thread.join()\n"
        "import httpx, pydantic, ssl, swarm.client.trial\n"
    )
    done = run(code, tmp_path, mode, reads=(data.parent,))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["ba de", "a thread", "went through"]


def test_its_servers_can_be_reached_and_no_others(tmp_path: Path, mode: Mode) -> None:
    shut(mode, 4)
    get = "import httpx\nprint(httpx.get('http://127.0.0.1:{}/', trust_env=False).text)\n"
    with serving() as mine, serving() as other:
        reached = run(get.format(mine), tmp_path, mode, servers=(f"http://127.0.0.1:{mine}",))
        assert reached.stdout.startswith("hello"), reached.stderr
        refused = run(get.format(other), tmp_path, mode, servers=(f"http://127.0.0.1:{mine}",))
    assert "hello" not in refused.stdout
    assert "ConnectError" in refused.stderr


def test_the_exit_code_is_the_commands_own(tmp_path: Path, mode: Mode) -> None:
    assert run("sys.exit(7)", tmp_path, mode, servers=("http://127.0.0.1:1",)).returncode == 7


@pytest.mark.parametrize("reach", ["open({!r}).read()", "os.listdir(os.path.dirname({!r}))"])
def test_keys_in_a_home_are_not_read(tmp_path: Path, mode: Mode, secret: Path, reach: str) -> None:
    shut(mode, 1)
    done = run(f"print({reach.format(str(secret))})", tmp_path, mode)
    assert done.returncode != 0
    assert "private" not in done.stdout
    assert "id_ed25519" not in done.stdout


@pytest.mark.parametrize("place", ["/bin/python3", "/usr/bin/python3", "home/bin/python", "home/copied/bin/python"])
def test_what_lies_around_a_python_is_not_read(tmp_path: Path, mode: Mode, secret: Path, place: str) -> None:
    shut(mode, 1)
    python, real = tmp_path / place, Path(sys.executable).resolve()
    if python.is_relative_to(tmp_path):
        python.parent.mkdir(parents=True)
        shutil.copy(real, python) if "copied" in place else python.symlink_to(real)
    if not python.exists():
        pytest.skip(f"there is no {python}")
    assert "went through" in run("import json", tmp_path, mode, python=str(python)).stdout
    done = run(f"print(open({str(secret)!r}).read())", tmp_path, mode, python=str(python))
    assert done.returncode != 0
    assert "private" not in done.stdout


def test_a_python_of_an_environment_has_its_packages_through_a_link_too(tmp_path: Path, mode: Mode) -> None:
    venv.EnvBuilder(symlinks=True).create(tmp_path / "environment")
    next((tmp_path / "environment" / "lib").glob("python*/site-packages")).joinpath("word_maker.py").write_text("")
    (tmp_path / "link").symlink_to("environment")
    for name in ("environment", "link"):
        python = str(tmp_path / name / "bin" / "python")
        done = run("import word_maker", tmp_path, mode, python=python)
        assert "went through" in done.stdout, done.stderr


def test_secrets_are_not_in_its_environment_nor_in_another_processs(tmp_path: Path, mode: Mode) -> None:
    done = run("print(dict(os.environ))", tmp_path, mode)
    assert "went through" in done.stdout
    for secret in ("sk-verysecret", "swt_admin", "AWS_SECRET"):
        assert secret not in done.stdout
    shut(mode, 1)
    assert run(f"print(open('/proc/{os.getpid()}/environ').read())", tmp_path, mode).returncode != 0


def test_nothing_is_written_outside_its_room(tmp_path: Path, mode: Mode) -> None:
    shut(mode, 1)
    target = tmp_path / "outside"
    run(f"open({str(target)!r}, 'w').write('x')", tmp_path, mode)
    assert not target.exists()
    assert run("open('/usr/mine', 'w').write('x')", tmp_path, mode).returncode != 0


@pytest.mark.parametrize(
    "attempt", ["os.fork()", "subprocess.run(['/bin/true'], check=True)", "os.posix_spawn('/bin/true', ['true'], {})"]
)
def test_a_fork_bomb_does_not_get_its_first_child(tmp_path: Path, mode: Mode, attempt: str) -> None:
    done = run(attempt, tmp_path, mode)
    assert done.returncode != 0
    assert "PermissionError" in done.stderr


def test_the_network_is_shut_but_for_tcp_to_its_servers(tmp_path: Path, mode: Mode) -> None:
    for kind in ("socket.AF_INET, socket.SOCK_DGRAM", "socket.AF_UNIX, socket.SOCK_STREAM"):
        done = run(f"socket.socket({kind})", tmp_path, mode)
        assert "PermissionError" in done.stderr
    shut(mode, 4)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        done = run(f"socket.create_connection({listening.getsockname()!r}, 5)", tmp_path, mode)
    assert "went through" not in done.stdout


def test_a_server_given_by_its_address_opens_no_other_port(tmp_path: Path, mode: Mode) -> None:
    shut(mode, 4)
    if landlock_version() < 4:
        pytest.skip("this kernel shuts no TCP ports")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        reach = f"socket.create_connection({listening.getsockname()!r}, 5)"
        done = run(reach, tmp_path, mode, servers=("http://192.0.2.7:8642",))
    assert "PermissionError" in done.stderr


@pytest.mark.parametrize(
    "attempt", ["held = bytearray(16 << 30)", "open(os.environ['HOME'] + '/big', 'wb').write(b'x' * (8 << 20))"]
)
def test_memory_and_files_are_bounded(tmp_path: Path, mode: Mode, attempt: str) -> None:
    assert run(attempt, tmp_path, mode).returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_names_are_looked_up_only_where_a_server_has_one(tmp_path: Path) -> None:
    ask = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
    assert run(ask, tmp_path, Mode.LIMITS, servers=("http://some-host:8642",)).returncode == 0
    assert run(ask, tmp_path, Mode.LIMITS, servers=("http://10.0.0.1:8642",)).returncode != 0


def test_people_are_told_which_sandbox_it_is() -> None:
    assert "bubblewrap" in sandbox().words
    assert ("WITHOUT" in sandbox().words) is (sandbox().mode is Mode.LIMITS)
    assert "memory" in of_mode(Mode.LIMITS).words
