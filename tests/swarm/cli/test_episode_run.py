"""`swarm episode run`: what an agent is given, who scores it, and what becomes of the episode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from foundation.confinement import PORTS, landlock_version
from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import Cause, DropReason, LedgerEntry
from tests.swarm.cli.conftest import ROOT, spec
from tests.swarm.cli.test_black_box import AGENT

ADMIN, CLIENT = "swt_admin_0123456789", "swt_client_0123456789"
ATTACKER = ROOT / "tests" / "fakes" / "self_rewarding_agent.py"
confines = pytest.mark.skipif(landlock_version() < PORTS, reason="this kernel shuts no TCP ports")


@dataclass(frozen=True)
class Ran:
    code: int
    said: dict[str, Any]
    err: str


@dataclass(frozen=True)
class Place:
    """A server with a run, and a folder that `swarm episode run` is started in."""

    server: ServerProcess
    run_id: str
    folder: Path
    token: str | None = None

    def start(self, scorer: str, agent: list[str], *options: str, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "swarm.main", "episode", "run", "--task", "t", "--kind", "eval"]
        command += ["--url", self.server.url, "--scorer", scorer, *options, "--", *agent]
        ours = {**os.environ, "PYTHONPATH": str(ROOT), "RESEARCHER_HOME": str(self.folder.parent / "home"), **environ}
        return subprocess.Popen(
            command, cwd=self.folder, env=ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, scorer: str, agent: list[str], *options: str, **environ: str) -> Ran:
        return ended(self.start(scorer, agent, *options, **environ))

    def entry(self, episode_id: str) -> LedgerEntry:
        with SwarmClient(self.server.url, self.token) as client:
            return client.entry(episode_id)


def ended(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=120)
    return Ran(process.returncode, json.loads(out) if out else {}, err)


def place_of(server: ServerProcess, tmp_path: Path, token: str | None = None) -> Place:
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    with SwarmClient(server.url, token) as client:
        return Place(server, client.start_run(spec()).run_id, folder, token)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One server for all tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("shared")
    with ServerProcess(folder / "state", "--log-level", "warning") as server:
        yield place_of(server, folder)


@pytest.fixture
def place(shared: Place, tmp_path: Path) -> Place:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "agent.py").write_text(AGENT)
    return replace(shared, folder=tmp_path / "work")


@pytest.fixture(params=[None, ADMIN], ids=["without tokens", "with tokens"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "work").mkdir()
    tokens = {"SWARM_ADMIN_TOKEN": ADMIN, "SWARM_CLIENT_TOKEN": CLIENT} if request.param else {}
    with ServerProcess(tmp_path / "work" / "state", "--log-level", "warning", environ=tokens) as server:
        yield place_of(server, tmp_path, request.param)


PYTHON = [sys.executable, "agent.py"]
PLAYS = (
    "import contextlib, io, runpy\nwith contextlib.redirect_stdout(io.StringIO()):\n    runpy.run_path('agent.py')\n"
)
"""An agent begins with it where its call is not what the test is about."""
KEEP = "import os, pathlib, sys; pathlib.Path(os.environ['OUT']).write_text(sys.stdin.read()); print(0)"


def shell(code: str) -> list[str]:
    return ["sh", "-c", code]


# -- an agent that wants a reward without earning it ---------------------------------------------------------------------


def attack(place: Place, *options: str) -> dict[str, list[str]]:
    """What the agent could do to its own episode, by kind. Its scorer says 0."""
    folder = place.folder
    (folder / "score.py").write_text(KEEP)
    (folder / "attacker.py").write_bytes(ATTACKER.read_bytes())
    (folder / "token").write_text(place.token or ADMIN)
    home = folder.parent / "home"
    home.mkdir()
    (home / "studies.db").write_text("rewards")
    known = {
        "server": place.server.url,
        "run": place.run_id,
        "server_pid": place.server.pid,
        "processes": [os.getpid(), place.server.pid],
        "secrets": [str(folder / "state"), str(folder / "token"), str(folder / "score.py"), str(home)],
        "not_mine": [str(folder / "agent.py"), str(folder / "new"), "/tmp/swarm-not-mine", sys.executable],
        "nap": f"86{os.getpid()}",
    }
    found = folder.parent / "found.json"
    ran = place.run(
        f"{sys.executable} score.py",
        [sys.executable, "attacker.py"],
        *("--query", json.dumps(known), "--scorer-env", "OUT", "--token-file", "token"),
        *options,
        OUT=str(found),
        SWARM_TOKEN=place.token or ADMIN,
    )
    assert (ran.code, ran.said["status"], ran.said["reward"]) == (0, "evaluated", 0.0), ran
    asleep = subprocess.run(["pgrep", "-f", f"sleep {known['nap']}"], capture_output=True, text=True, check=False)
    assert asleep.stdout == "", "what the agent left behind lives on"
    assert place.entry(ran.said["episode_id"]).reward == 0.0
    return {way: did for way, did in json.loads(found.read_text()).items() if did}


@confines
def test_an_agent_with_a_shell_that_tries_to_reward_itself_is_refused_in_every_way(guarded: Place) -> None:
    assert attack(guarded) == {}


@confines
@pytest.mark.parametrize("guarded", [None], indirect=True)
def test_without_confinement_the_same_agent_gets_at_files_and_the_control_routes(guarded: Place) -> None:
    """So it is the confinement that stops it. Its environment is clean all the same, and the relay serves the model alone."""
    found = attack(guarded, "--unconfined")
    assert {"files", "routes", "sockets"} <= set(found)
    assert {"environment", "smuggled"}.isdisjoint(found)
    assert all(f" at {guarded.server.url.rpartition(':')[2]}:" in each for each in found["routes"])


def test_an_agent_gets_the_models_address_its_key_and_nothing_else_of_ours(place: Place) -> None:
    out = place.folder.parent / "env.json"
    agent = [
        sys.executable,
        "-c",
        PLAYS + "import json, os; print(json.dumps([dict(os.environ), os.listdir('/proc/self/fd')]))",
    ]
    ran = place.run(
        _keeping(place),
        agent,
        *("--scorer-env", "OUT", "--env", "EXTRA"),
        OUT=str(out),
        EXTRA="mine",
        OTHER="not mine",
        SWARM_TOKEN=ADMIN,
        SWARM_LEASE="swl_other",
    )
    assert ran.code == 0, ran
    environ, descriptors = json.loads(out.read_text())
    ours = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}
    plain = {"PATH", "HOME", "TMPDIR", "EXTRA", "LANG", "LANGUAGE", "TZ"}
    assert ours | {"PATH", "HOME", "TMPDIR", "EXTRA"} <= set(environ)
    assert {name for name in environ if not name.startswith("LC_")} <= ours | plain
    assert environ["OPENAI_API_KEY"].startswith("swk_")
    assert not Path(environ["HOME"]).exists(), "its home is gone with it"
    assert len(descriptors) == 4, "three, and the one that lists them"


def _keeping(place: Place) -> str:
    (place.folder / "keep.py").write_text(KEEP)
    return f"{sys.executable} keep.py"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--env", "SWARM_TOKEN"], "may contain a token or a lease"),
        (["--env", "COPY"], "may contain a token or a lease"),
        (["--scorer-env", "SWARM_TOKEN"], "may contain a token or a lease"),
        (["--env", "NO_SUCH_NAME"], "this environment variable is not set"),
        (["--read", "nowhere"], "'nowhere' does not exist"),
        (["--metadata", "[]"], "must be a JSON object"),
        (["--scorer", "'"], "No closing quotation"),
        (["--scorer", "no-such-scorer"], "program 'no-such-scorer' not found"),
        (["--scorer", ""], "no scorer given"),
        (["--task", ""], "no task given"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_is_claimed(
    place: Place, option: list[str], said: str
) -> None:
    with SwarmClient(place.server.url) as client:
        before = list(client.ledger())
        ran = place.run("echo 1", PYTHON, *option, SWARM_TOKEN=ADMIN, COPY=f"x{ADMIN}")
        assert (ran.code, ran.said, ran.err.count("\n")) == (2, {}, 1), ran.err
        assert said in ran.err
        assert list(client.ledger()) == before


def test_an_agent_that_is_no_program_is_refused_before_anything_is_claimed(place: Place) -> None:
    assert "program 'no-such-agent' not found" in place.run("echo 1", ["no-such-agent"]).err
    assert "no agent given" in place.run("echo 1", []).err


@confines
def test_what_an_agent_may_read_and_write_can_be_widened_and_narrowed(place: Place) -> None:
    beside, inside = place.folder.parent / "beside", place.folder / "answers"
    for folder in (beside, inside):
        folder.mkdir()
        (folder / "text").write_text(folder.name)
    agent = shell(f"cat {beside}/text answers/text; echo new > {beside}/written; echo new > written; true")
    ran = place.run(_keeping(place), agent, "--scorer-env", "OUT", OUT=str(place.folder.parent / "out"))
    assert (place.folder.parent / "out").read_text() == "answers", ran
    assert not (beside / "written").exists()
    assert not (place.folder / "written").exists()
    options = ["--read", str(beside), "--write", str(beside), "--hide", "answers", "--scorer-env", "OUT"]
    place.run(_keeping(place), agent, *options, OUT=str(place.folder.parent / "out"))
    assert (place.folder.parent / "out").read_text() == "beside"
    assert (beside / "written").exists()


# -- who lost it -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        (
            "sh -c 'echo 0; echo the tests are gone >&2; exit 1'",
            "exited with code 1; its last output: the tests are gone",
        ),
        ("sh -c 'echo 1; kill -9 $$'", "was killed by SIGKILL"),
        ("true", "printed no reward (it printed nothing)"),
        ("echo well done", "printed no reward"),
        ("echo NaN", "printed no reward"),
        ("echo true", "printed no reward"),
        ("""echo '{"success": true}'""", "printed no reward"),
        ("""echo '{"reward": 1, "lease": "x"}'""", "printed no reward"),
        ("""echo '{"reward": 1, "sucess": true}'""", "printed no reward"),
        ("sh -c 'echo 1; exec sleep 60'", "ran longer than 0.5 s"),
    ],
)
def test_a_scorer_that_fails_gives_no_reward(place: Place, scorer: str, said: str) -> None:
    ran = place.run(scorer, PYTHON, "--query", "Repeat red", "--scorer-timeout", "0.5")
    assert (ran.code, ran.said["status"], ran.said["cause"], ran.said["reward"]) == (6, "aborted", "grader", None), ran
    entry = place.entry(ran.said["episode_id"])
    assert (entry.reason, entry.reward) == (DropReason.ABORTED, None)
    assert said in (entry.detail or "")


@pytest.mark.parametrize(
    ("agent", "options", "cause", "said"),
    [
        (shell("echo 1; echo no idea >&2; exit 3"), [], Cause.ROLLOUT, "exited with code 3;"),
        (shell("kill -SEGV $$"), [], Cause.ROLLOUT, "was killed by SIGSEGV"),
        (shell("trap '' TERM; echo hm >&2; sleep 60"), ["--timeout", "0.5"], Cause.LIMIT, "ran longer than 0.5 s"),
    ],
)
def test_an_agent_that_fails_is_not_scored(
    place: Place, agent: list[str], options: list[str], cause: Cause, said: str
) -> None:
    ran = place.run("echo 1", agent, *options)
    assert (ran.code, ran.said["cause"], ran.said["scorer"]) == (6, cause, ""), ran
    assert said in (place.entry(ran.said["episode_id"]).detail or "")


def test_the_last_line_of_a_failure_is_the_agents_own(place: Place) -> None:
    """Where there is room for one line, that one is shown: `swarm top`, older failures in `swarm ledger --summary`."""
    ran = place.run("echo 1", shell("echo Traceback >&2; echo RuntimeError: agent broke >&2; exit 1"))
    said = (place.entry(ran.said["episode_id"]).detail or "").splitlines()
    assert said[0] == "the agent exited with code 1;"
    assert said[-1] == "RuntimeError: agent broke"


@pytest.mark.parametrize(("kind", "status"), [("train", "pooled"), ("eval", "evaluated")])
def test_what_became_of_an_episode_is_said_as_it_is(place: Place, kind: str, status: str) -> None:
    played = place.run("echo 1", PYTHON, "--query", "Repeat red", "--kind", kind)
    assert (played.code, played.said["status"], played.said["cause"]) == (0, status, None), played
    silent = place.run("echo 1", shell("echo red"), "--kind", kind)
    assert (silent.code, silent.said["status"], silent.said["cause"]) == (6, "dropped", "rollout"), silent
    assert "no_calls" in silent.said["reason"]
    entry = place.entry(silent.said["episode_id"])
    assert (entry.state, entry.reason, entry.cause) == ("dropped", DropReason.NO_CALLS, Cause.ROLLOUT)


def test_a_score_may_say_more_than_a_number(place: Place) -> None:
    score = {"reward": 0.5, "success": True, "metrics": {"turns": 3}, "metadata": {"note": "x"}}
    (place.folder / "score").write_text(json.dumps(score))
    ran = place.run("cat score", PYTHON, "--query", "Repeat red", "--metadata", '{"k": 1}')
    assert (ran.code, ran.said["reward"], ran.said["success"]) == (0, 0.5, True), ran
    entry = place.entry(ran.said["episode_id"])
    assert (entry.reward, entry.success, entry.metrics) == (0.5, True, {"turns": 3.0})
    assert entry.metadata == {"k": 1, "note": "x"}
    assert entry.calls == 1


def test_a_scorer_gets_the_answer_and_the_task_and_no_key(place: Place) -> None:
    out = place.folder.parent / "out"
    (place.folder / "score.py").write_text(
        "import json, os, sys\n"
        "json.dump([sys.stdin.read(), dict(os.environ)], open(os.environ['OUT'], 'w'))\nprint('noise')\nprint(1)\n"
    )
    agent = [sys.executable, "-c", PLAYS + "import sys; sys.stdout.write(sys.stdin.read())"]
    ran = place.run(f"{sys.executable} score.py", agent, "--query", "a\nb", "--scorer-env", "OUT", OUT=str(out))
    assert ran.code == 0, ran
    answer, environ = json.loads(out.read_text())
    assert answer == "a\nb"
    assert (environ["SWARM_TASK_ID"], environ["SWARM_QUERY"]) == ("t", "a\nb")
    assert not any("swk_" in value or "swl_" in value for value in environ.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_person_who_stops_it_is_the_cause(place: Place, number: signal.Signals) -> None:
    (place.folder / "agent.py").write_text(
        "import sys, time\nprint('here', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    process = place.start("echo 1", PYTHON)
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(number)
    ran = ended(process)
    assert (ran.code, ran.said["cause"]) == (130, "person"), ran


def test_two_at_once_are_two_episodes(place: Place) -> None:
    agent = [*PYTHON, "Repeat red"]
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda score: place.run(f"echo {score}", agent), (0.25, 0.75))
    assert one.said["episode_id"] != other.said["episode_id"]
    rewards = [place.entry(each.said["episode_id"]).reward for each in (one, other)]
    assert rewards == [0.25, 0.75]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """One that may be killed."""
    with ServerProcess(tmp_path / "own", "--log-level", "warning") as server:
        yield server


WAITS = """
import sys
print('here', file=sys.stderr, flush=True)
open(sys.argv[1]).read()
print('done')
"""


@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_server_that_goes_in_the_middle_is_a_reason_to_try_again(
    own_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setenv("SWARM_URL", own_server.url)
    place = place_of(own_server, tmp_path)
    os.mkfifo(tmp_path / "go")
    (place.folder / "agent.py").write_text(
        WAITS if comes_back else f"{WAITS}\n{AGENT.replace('sys.argv[-1]', repr('x'))}"
    )
    process = place.start("echo 1", [*PYTHON, str(tmp_path / "go")])
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    place.server.kill()
    port = place.server.url.rpartition(":")[2]
    if comes_back:
        with ServerProcess(place.server.state_dir, "--log-level", "warning", "--port", port):
            (tmp_path / "go").write_text("")
            ran = ended(process)
        assert (ran.code, ran.said["status"], ran.said["cause"]) == (4, "lost", "server"), ran
    else:
        (tmp_path / "go").write_text("")
        ran = ended(process)
        assert (ran.code, ran.said["status"], ran.said["cause"]) == (4, "aborted", "network"), ran
        assert "1 calls did not reach the server" in ran.said["reason"]
