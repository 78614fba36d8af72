"""The swarm command: one clear line for each error, and training from a shell alone."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.main import main
from swarm.models.folder import ModelFolder

ROOT = Path(__file__).parents[2]
LONG_NUMBER, DEEP = "1" * 5_000, "[" * 100_000
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "state", "--log-level", "warning") as process:
        monkeypatch.setenv("SWARM_URL", process.url)
        monkeypatch.delenv("SWARM_TOKEN", raising=False)
        yield process


def swarm(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as exit:
        return int(exit.code or 0)


def on_devices(trainer: str, inference: str) -> list[str]:
    return ["--trainer-device", trainer, "--inference-devices", inference]


def answer(capsys: Capture, *arguments: str) -> Any:
    """What a command with --json says, as data."""
    assert swarm(*arguments, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


# -- without a server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "status", "--url", "http://127.0.0.1:9"], 1, "start one with `swarm serve`"),
        (["run", "status", "--url", "nonsense"], 2, "a url looks like http://"),
        (["run", "start", "--url", "notaurl"], 2, "a url looks like http://"),
        (["try", "json:dumps", "--task", '{"id": 1'], 2, "is not JSON"),
        (["try", "json:dumps", "--task", "x", "--task-id", ""], 2, "the task's id is empty"),
        (["try", "json:dumps", "--task", '{"id": "t-1"}'], 2, "JSON but has no `query`"),
        (["try", "json:dumps", "--task", '{"query": "q", "metdata": {}}'], 2, "not metdata"),
        (["episode", "end", "--agent-reward", "planner"], 2, "no episode given"),
        (["ledger", "--limit", "0"], 2, "--limit must be at least 1"),
        (["ledger", "--step", "-1"], 2, "--step must be at least 0"),
        (["join", "judge"], 2, "no task given"),
        (["join", "play", "/nowhere/workflow.py"], 1, "workflow file /nowhere/workflow.py does not exist"),
        (["join", "watch"], 2, "see `swarm join --help`"),
        (["runn"], 2, "did you mean run?"),
        (["run", "status", "--watsh"], 2, "did you mean --watch?"),
        (["run", "start", "--set", "optimizer.learning_rte=1"], 2, "did you mean 'optimizer.learning_rate'?"),
        (["run", "start", "--set", "optimizer"], 2, "write PATH=VALUE"),
        (["run", "start", "--set", "labels.x=1"], 2, "valid string, got 1; write 'labels.x=\"1\"'"),
        (["run", "start", "--set", "batch.group_size=1"], 2, "at least 2"),
        (["run", "start", "/nowhere/spec.json"], 2, "cannot read /nowhere/spec.json"),
        (["run", "patch", "--url", "http://127.0.0.1:9"], 2, "nothing to change"),
        (["episode", "claim"], 2, "no task given"),
        (["episode", "claim", "--task", ""], 2, "no task given"),
        (["episode", "claim", "--task", "t", "--wait-s", "-1"], 2, "wait_s: should be greater than or equal to 0"),
        (["episode", "end", "--reward", "1"], 2, "no episode given"),
        (["run", "restore", "-1"], 2, "a whole number, at least 0"),
        (["run", "patch", "--set", "optimizer.learning_rate=NaN", "--run-id", "r"], 2, "cannot be sent as JSON"),
        (["run", "status", "--url", "http://127.0.0.1:99999"], 2, "a url looks like http://"),
        (["join", "play", "--task", "x", "--max-episode-s", "nan"], 2, "--max-episode-s must be positive"),
        (
            ["join", "play", "--task", "x", "--refused-reward", "nan"],
            2,
            "must be a number with an absolute value of at most",
        ),
        (["join", "play", "..agent:play", "--task", "x"], 1, "is not the name of a rollout"),
        (["ledger", "--reason", "ecpired"], 2, "did you mean expired?"),
        (["try", "no_such_module:f", "--task", "x"], 1, "module 'no_such_module' not found"),
        (["try", "json:dumpz", "--task", "x"], 1, "did you mean 'dump"),
        (["serve", "--engine", "echo", "--model", "x", "--device", "cpu"], 2, "--device is for --engine local"),
        (["serve", "--engine", "echo", "--trainer-device", "cpu"], 2, "--trainer-device is for --engine local"),
        (["serve", "--engine", "verl", "--model", "x", "--inference-devices", "cpu"], 2, "is for --engine local"),
        (["serve", "--model", "x", "--trainer-device", "cpu"], 2, "give both or neither"),
        (["serve", "--model", "x", "--inference-devices", "cpu"], 2, "give both or neither"),
        (["serve", "--model", "x", *on_devices("cpu", "cpu"), "--device", "cpu"], 2, "--device sets one device"),
        (["serve", "--model", "x", *on_devices("cpu", "cpu:0,cpu:0")], 2, "inference names cpu:0 twice"),
        (
            ["serve", "--model", "x", *on_devices("cpu", "cpu:0,gpu")],
            2,
            "'gpu' is not a device: write cpu, cpu:1, cuda:0",
        ),
        (["serve", "--model", "x", *on_devices("cpu", "cuda:0")], 2, "name only CPUs, or only GPUs"),
        (["serve", "--model", "x", *on_devices("cpu", "cpu:9999")], 1, "there is no cpu:9999: this machine has"),
        (["serve", "--model", "x", *on_devices("cpu", "cpu"), "--enable-sleep-mode"], 2, "sleep-mode needs a GPU"),
        (["serve", "--model", "x", *on_devices("cpu", "cpu"), "--no-offload"], 2, "--offload needs a GPU"),
        (["serve", "--engine", "verl", "--model", "x", "--offload"], 2, "--offload is for --engine local"),
        (["serve", "--engine", "echo", "--model", "x", "--dtype", "float32"], 2, "--engine local or verl, but this"),
        (["serve", "--engine", "echo", "--model", "x", "--enable-sleep-mode"], 2, "is for --engine local"),
        (["serve", "--engine", "echo", "--max-num-seqs", "9"], 2, "--max-num-seqs is for --engine local or verl"),
        (["serve", "--engine", "echo", "--model", "x", "--ray-address", "a"], 2, "--ray-address is for --engine verl"),
        (["serve", "--model", "x", "--port", "0", "--echo-tokens-per-s", "9"], 2, "is for --engine echo"),
        (
            ["serve", "--engine", "echo", "--model", "x", "--public-url", "ftp:x"],
            2,
            "--public-url: must be a URL such as",
        ),
        (["serve", "--engine", "echo", "--model", "x", "--echo-latency-s", "-1"], 2, "seconds, at least 0, got -1"),
        (["serve", "--engine", "echo", "--model", "x", "--echo-tokens-per-s", "0"], 2, "must be above 0"),
        (["serve"], 2, "--model is missing"),
        (["serve", "--engine", "echo", "--host", "192.0.2.1"], 1, "set SWARM_ADMIN_TOKEN"),
        (["serve", "--engine", "echo", "--port", "abc"], 2, "must be a whole number from 0 to 65535; got 'abc'"),
        (["models", "get", "smolm2-135m"], 1, "did you mean 'smollm2-135m'?"),
        (["try", "json:dumps", "--task", "x", "--metadata", f'{{"n": {LONG_NUMBER}}}'], 2, "--metadata is not JSON"),
        (["try", "json:dumps", "--task", f'{{"query": {DEEP}'], 2, "but is not JSON"),
        (
            ["episode", "end", "--reward", "1", "--metadata", f'{{"n": {LONG_NUMBER}}}', "-"],
            2,
            "--metadata is not JSON",
        ),
        (["episode", "end", "--reward", "1", "--metadata", DEEP, "-"], 2, "--metadata is not JSON"),
        (
            ["episode", "end", "--reward", "1", "--metadata", f'{{"n": {2**70}}}', "-"],
            2,
            f"--metadata is not JSON that a server accepts: {2**70} does not fit in a 64-bit integer",
        ),
    ],
)
def test_an_error_is_one_clear_line(
    arguments: list[str], code: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SWARM_URL", "SWARM_TOKEN", "SWARM_EPISODE", "SWARM_LEASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"episode_id": "ep-1", "lease": "l"})))
    assert swarm(*arguments) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-cache-gib", "2.5"], r"keys and values +2\.5 GiB"),
        (
            ["--kv-cache-gib", "2.5", "--max-num-seqs", "24"],
            r"side by side, 24 sequences[^:]*\n.*\n.*\n +keys and values +2\.5 GiB",
        ),
        (["--gpu-memory-utilization", "0.5"], r"keys and values +8\.\d GiB"),
        (
            ["--enable-sleep-mode", "--kv-cache-gib", "1"],
            r"inference sleeps during a step[^:]*\n.*\n.*\n +keys and values +1\.0 GiB",
        ),
        (["--offload"], r"all weights, offloaded: side by side"),
    ],
)
def test_a_plan_of_a_card_that_is_not_here_does_what_options_ask_for(
    options: list[str], said: str, tiny_llama: ModelFolder, capsys: Capture
) -> None:
    assert swarm("serve", "--model", str(tiny_llama.path), "--plan", "24", *options) == 0
    captured = capsys.readouterr()
    assert re.search(said, captured.out), captured.out
    assert captured.out.startswith(f"{tiny_llama.path.name} on a GPU of 24.0 GiB")
    assert captured.out.rstrip().endswith("s on an idle machine")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--kv-cache-gib", "30"], 1, "does not fit on this GPU of 24.0 GiB"),
        (["--kv-cache-gib", "0"], 2, "must be a number of GiB above 0, got 0"),
        (["--kv-cache-gib", "2", "--gpu-memory-utilization", "0.5"], 2, "both set the memory for inference"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    options: list[str], code: int, said: str, tiny_llama: ModelFolder, capsys: Capture
) -> None:
    assert swarm("serve", "--model", str(tiny_llama.path), "--plan", "24", *options) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "nearest"),
    [
        (["run", "start", "--set", "optimizer.learning_rat=1"], 2, "invalid_spec", ["optimizer.learning_rate"]),
        (["run", "start", "--set", "batch.rule=task"], 2, "invalid_spec", ["tasks"]),
        (["run", "start", "--set", "optimizer"], 2, "usage", []),
        (["run", "status", "--watsh"], 2, "usage", ["--watch"]),
        (["episode", "clam"], 2, "usage", ["claim"]),
        (["ledger", "--reason", "ecpired"], 2, "usage", ["expired"]),
        (["try", "json:dumps", "--task", '{"query": "q", "metdata": {}}'], 2, "usage", ["metadata"]),
        (["try", "json:dumpz", "--task", "x"], 1, "workflow_fault", ["dump"]),
        (["models", "get", "smolm2-135m"], 1, "model_unavailable", ["smollm2-135m"]),
        (["run", "status", "--url", "http://127.0.0.1:9"], 1, "server_unreachable", []),
    ],
)
def test_an_error_as_json_has_a_code_and_the_names_that_may_have_been_meant(
    arguments: list[str], exit_code: int, code: str, nearest: list[str], capsys: Capture
) -> None:
    assert swarm(*arguments, "--json") == exit_code
    said = json.loads(capsys.readouterr().err)
    assert said["error"]
    assert (said["code"], said["nearest"]) == (code, nearest)


def test_what_a_server_refuses_has_the_names_that_may_have_been_meant(server: ServerProcess, capsys: Capture) -> None:
    assert swarm("run", "start") == 0
    assert swarm("run", "patch", "--set", "optimizer.learning_rat=1", "--json") == 2
    said = json.loads(capsys.readouterr().err)
    assert (said["code"], said["nearest"]) == ("invalid_spec", ["optimizer.learning_rate"])


def test_options_of_a_claim_win_over_its_document(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"task_id": "t", "run_id": "r", "idle_limit_s": 6, "max_episode_s": 6, "wait_s": 6}
    for name in ("idle_limit_s", "max_episode_s", "wait_s"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(document)))
        assert swarm("episode", "claim", "-", f"--{name.replace('_', '-')}", "-1", "--url", "http://127.0.0.1:9") == 2
        assert f"{name}: should be greater than" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["wröng", "two\nlines"])
def test_what_cannot_be_a_token_is_said_to_be_none_without_showing_it(
    token: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(token, encoding="utf-8")
    monkeypatch.setenv("SWARM_TOKEN", token)
    for given in ((), ("--token-file", str(tmp_path / "token"))):
        assert swarm("run", "status", *given) == 2
        said = capsys.readouterr().err
        assert "a token must be one line of printable ASCII" in said
        assert ("SWARM_TOKEN" in said) == (not given)
        assert not any(word in said for word in token.split())


@pytest.mark.parametrize(
    ("grant", "options", "said"),
    [
        ({"lease": 5}, [], "no episode given"),
        ({"metrics": [1]}, ["--metric", "a=1"], "metrics must be an object"),
        ({"agent_rewards": 5}, ["--agent-reward", "a=1"], "agent_rewards must be an object"),
    ],
)
def test_a_grant_that_holds_nonsense_is_refused(
    grant: dict[str, Any], options: list[str], said: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "grant.json"
    file.write_text(json.dumps({"episode_id": "ep-1", "lease": "swl_1"} | grant))
    assert swarm("episode", "end", str(file), "--reward", "1", *options) == 2
    assert said in capsys.readouterr().err


def test_a_field_that_stands_twice_in_a_document_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"batch": {"tasks": 4, "group_size": 8, "tasks": 2}}'))
    assert swarm("run", "start", "-") == 2
    assert "'tasks' appears twice in one object" in capsys.readouterr().err


def test_standard_input_that_is_no_text_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe{}"), encoding="utf-8"))
    assert swarm("run", "start", "-") == 2
    assert "standard input is not text" in capsys.readouterr().err


def test_a_rollout_file_that_cannot_be_imported_shows_its_traceback(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "agent.py").write_text("import no_such_library\n")
    assert swarm("try", f"{tmp_path}/agent.py:f", "--task", "x") == 1
    assert "no_such_library" in capsys.readouterr().out


def test_a_rollout_that_failed_is_told_by_the_exit_code_when_nobody_reads_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("import no_such_library\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert swarm("try", f"{tmp_path}/agent.py:f", "--task", "x") == 1


def test_what_cannot_be_written_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "swarm.main", "models", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, "swarm models list: cannot write: No space left on device\n")


def test_a_command_whose_output_is_closed_does_its_work() -> None:
    command = f"'{sys.executable}' -m swarm.main models list >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_json_where_that_was_asked_for(capsys: Capture) -> None:
    assert swarm("run", "status", "--url", "http://127.0.0.1:9", "--json") == 1
    assert "swarm serve" in json.loads(capsys.readouterr().err)["error"]


def test_models_are_listed(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_MODELS", str(tmp_path))
    assert answer(capsys, "models", "list") == {"cached": [], "known": ["smollm2-135m", "smollm2-81m"]}


def test_a_server_that_is_told_to_stop_does_not_complain_of_it(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as idle, idle.client() as http:
        while http.get("/swarm/v1/status").json()["phase"] == "booting":
            continue
    assert "not ready" not in idle.log_path.read_text()


# -- with one ---------------------------------------------------------------------------------------------------------


SIZES = ("--set", "batch.tasks=1", "--set", "batch.group_size=2")


def start(capsys: Capture, *arguments: str) -> str:
    return str(answer(capsys, "run", "start", *SIZES, *arguments)["run_id"])


def ask(grant: dict[str, Any], text: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {grant['api_key']}"}
    reply = httpx.post(f"{grant['base_url']}/chat/completions", json=body, headers=headers, trust_env=False)
    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.usefixtures("server")
def test_a_run_is_started_changed_followed_and_stopped(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "spec.toml").write_text("seed = 7\n[optimizer]\nlearning_rate = 4e-5\n")
    run_id = start(capsys, str(tmp_path / "spec.toml"), "--key", "k")
    assert start(capsys, str(tmp_path / "spec.toml"), "--key", "k") == run_id
    status = answer(capsys, "run", "status")
    assert status["run"]["spec"]["optimizer"]["learning_rate"] == 4e-5
    assert status["server"]["run_id"] == run_id
    assert answer(capsys, "run", "patch", "--set", "optimizer.learning_rate=1e-5")["config_version"] == 2
    assert swarm("run", "patch", "--if-version", "1", "--set", "max_staleness=0") == 1
    assert swarm("run", "patch", "--set", "max_staleness=-1") == 2  # as in `run start`
    assert swarm("run", "start", "--set", "seed=8") == 1
    assert run_id in capsys.readouterr().err
    assert swarm("run", "status") == 0
    assert "no steps yet" in capsys.readouterr().out
    assert swarm("run", "stop") == 0
    assert swarm("run", "status", run_id, "--watch") == 1
    assert "stopped" in capsys.readouterr().out


def test_whoever_watches_a_run_sees_it_through_a_restart_of_the_server(
    server: ServerProcess, tmp_path: Path, capsys: Capture
) -> None:
    run_id = start(capsys)
    command = [sys.executable, "-m", "swarm.main", "run", "status", run_id, "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as watching:
        assert watching.stdout is not None
        assert "reward" in watching.stdout.readline()
        server.kill()
        with ServerProcess(server.state_dir, "--log-level", "warning", "--port", server.url.rpartition(":")[2]):
            assert swarm("run", "stop") == 0
            out, err = watching.communicate(timeout=60)
    assert (watching.returncode, f"run {run_id}  stopped" in out) == (1, True), err


@pytest.mark.usefixtures("server")
def test_whoever_waits_for_a_stop_reads_what_it_waits_for(capsys: Capture, tmp_path: Path) -> None:
    run_id = start(capsys)
    grant = tmp_path / "grant.json"
    assert swarm("episode", "claim", "--task", "t") == 0
    grant.write_text(capsys.readouterr().out)
    command = [sys.executable, "-m", "swarm.main", "run", "stop", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as stopping:
        assert stopping.stderr is not None
        line = stopping.stderr.readline()
        assert f"run {run_id} is stopping at step 0" in line
        assert "waiting for 1 open episodes, for at most 120 s" in line
        assert swarm("episode", "abort", str(grant), "--reason", "enough") == 0
        out, _ = stopping.communicate(timeout=60)
    assert (stopping.returncode, out) == (0, f"run {run_id} is over (stopped), at step 0\n")


@pytest.mark.usefixtures("server")
def test_a_key_whose_run_is_over_starts_nothing(capsys: Capture) -> None:
    run_id = start(capsys, "--key", "k")
    assert answer(capsys, "run", "stop", "--wait")["status"] == "stopped"
    assert swarm("run", "start", *SIZES, "--key", "k") == 1
    out, err = capsys.readouterr()
    assert f"{run_id} is stopped (on request), at step 0; start another with a new key" in err
    assert (out, err.count("\n")) == ("", 1)
    assert answer(capsys, "run", "status")["run"]["run_id"] == run_id


@pytest.mark.usefixtures("server")
def test_a_stopped_run_stays_in_sight_until_the_next(capsys: Capture) -> None:
    assert answer(capsys, "ledger", "--summary")["findings"][0].startswith("this server has had no run yet")
    assert swarm("episode", "claim", "--task", "t", "--json") == 1
    err = capsys.readouterr().err
    assert (json.loads(err)["code"], err.count("\n")) == ("not_found", 1)
    run_id = start(capsys)
    assert answer(capsys, "run", "stop", "--wait")["status"] == "stopped"
    shown = answer(capsys, "run", "status")
    assert (shown["server"]["run_id"], shown["server"]["newest_run_id"]) == (None, run_id)
    assert shown["run"]["status"] == "stopped"
    for command, said in (
        (("run", "status"), f"run {run_id}  stopped (on request)  step 0"),
        (("run", "stop"), f"run {run_id} is over (stopped), at step 0"),
        (("ledger", "--summary"), "the run was stopped at step 0; it will not train any further"),
        (("top", "--once"), f"run {run_id} stopped  step 0"),
    ):
        assert swarm(*command) == 0
        assert said in capsys.readouterr().out
    for words in ("claim --json --task t", "run --json --task t --scorer true -- true"):
        assert swarm("episode", *words.split()) == 3
        refused = json.loads(capsys.readouterr().err)
        assert (refused["code"], refused["error"]) == (
            "over_limit",
            f"run {run_id} is stopped and no longer served; start another",
        )
    assert swarm("run", "restore", "0") == 1
    assert f"`swarm run restore 0 --run-id {run_id}`" in capsys.readouterr().err
    newest = start(capsys)
    assert answer(capsys, "run", "status")["run"]["run_id"] == newest != run_id


@pytest.mark.usefixtures("server")
def test_joining_without_anybody_to_answer_fails_in_words(capsys: Capture) -> None:
    start(capsys)
    command = [sys.executable, "-m", "swarm.main", "join", "judge", "--task", "x"]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 1
    assert "swarm join: standard input ended; open episodes were given back" in ran.stderr


@pytest.mark.usefixtures("server")
def test_a_black_box_agent_is_trained_from_a_shell(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = start(capsys, "--set", "limits.steps=1")
    for number, reward in enumerate(["1.0", "0.0"]):
        assert swarm("episode", "claim", "--task", "t-1") == 0
        (tmp_path / "grant.json").write_text(capsys.readouterr().out)
        ask(json.loads((tmp_path / "grant.json").read_text()), f"Repeat w{number}")
        assert swarm("episode", "end", str(tmp_path / "grant.json"), "--reward", reward, "--metric", "turns=1") == 0
        assert json.loads(capsys.readouterr().out)["status"] == "pooled"
    assert swarm("run", "status", run_id, "--watch") == 0
    assert "complete" in capsys.readouterr().out
    assert swarm("ledger", "--run-id", run_id) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("trained at step 1" in line or "in_step at step 1" in line for line in lines)
    claim = {"task_id": "t-2", "kind": "eval"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(claim)))
    grant = answer(capsys, "episode", "claim", "-")
    monkeypatch.setenv("SWARM_EPISODE", grant["episode_id"])
    monkeypatch.setenv("SWARM_LEASE", grant["lease"])
    assert answer(capsys, "episode", "abort", "--reason", "had enough")["detail"] == "had enough"
    assert swarm("episode", "end", "--reward", "1") == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("server")
def test_what_a_claim_exports_to_the_agents_of_a_shell_ends_no_episode(capsys: Capture) -> None:
    start(capsys)
    assert swarm("episode", "claim", "--task", "t", "--kind", "eval", "--export") == 0
    lines = capsys.readouterr().out
    shown = "echo $SWARM_EPISODE; env"
    script = f"export SWARM_EPISODE=old SWARM_LEASE=old; {lines}\n{shown}"
    said = subprocess.run(
        ["sh", "-c", script], env={"PATH": os.defpath}, capture_output=True, text=True, check=True
    ).stdout
    held, *exported = said.splitlines()
    assert held.startswith("ep-")
    names = {line.partition("=")[0] for line in exported} - {"PATH", "PWD", "SHLVL", "_", "OLDPWD"}
    assert names == {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"}
    assert "swl_" not in said


ROLLOUTS = """
import httpx
from swarm.client import Outcome

async def good(episode, task):
    body = {"model": "policy", "messages": [{"role": "user", "content": task.query}], **episode.sampling}
    async with httpx.AsyncClient(base_url=episode.base_url, headers={"Authorization": f"Bearer {episode.api_key}"}) as http:
        answer = (await http.post("chat/completions", json=body)).raise_for_status().json()
    return Outcome(reward=0.25 if answer["choices"] else 0.0)

async def bad(episode, task):
    raise KeyError(task.metadata["name"])

async def stored(episode, task):
    await good(episode, task)
    await episode.end(reward=0.5)
    raise KeyError("after the end")

async def nothing(episode, task):
    pass

async def silent(episode, task):
    return 1.0

async def given_up(episode, task):
    episode.abort("the sandbox did not start")

async def half(episode, task):
    raise ValueError("no such tool: \\ud83d")

WORDS = "good"

def plain(episode, task):
    body = {"model": "policy", "messages": [{"role": "user", "content": task.query}]}
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    answer = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
    return 0.75 if answer.json()["choices"] else 0.0

def ended(episode, task):
    plain(episode, task)
    episode.end(reward=0.5)
"""


@pytest.mark.usefixtures("server")
def test_a_rollout_is_tried_without_training(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "agent.py").write_text(ROLLOUTS)
    run_id = start(capsys)
    assert swarm("try", f"{tmp_path}/agent.py:good", "--task", "Repeat hello", "--temperature", "0.5") == 0
    shown = capsys.readouterr().out
    assert "reward 0.25" in shown
    assert '"Repeat hello"' in shown
    assert "temperature 0.5" in shown
    assert swarm("try", f"{tmp_path}/agent.py:bad", "--task", "x", "--metadata", '{"name": "nemo"}') == 1
    shown = capsys.readouterr().out
    assert shown.count("Traceback") == 1
    assert shown.splitlines()[-1] == "KeyError: 'nemo'"
    assert "rolled_out" not in shown, "frames of ours"
    for name, said in (
        ("silent", "the episode does not count: no_calls"),
        ("given_up", "the sandbox did not start"),
        ("half", "no such tool: \\ud83d"),
    ):
        assert swarm("try", f"{tmp_path}/agent.py:{name}", "--task", "x") == 1
        assert said in capsys.readouterr().out
    assert swarm("try", f"{tmp_path}/agent.py:nothing", "--task", "x") == 1
    shown = capsys.readouterr().out
    assert (
        shown.splitlines()[-1] == "the rollout returned None without calling episode.end; return a number or an Outcome"
    )
    assert "Traceback" not in shown
    assert swarm("try", f"{tmp_path}/agent.py:stored", "--task", "x") == 0
    shown = capsys.readouterr().out
    assert "KeyError: 'after the end'\nthe rollout raised this error after it had ended the episode" in shown
    assert shown.splitlines()[-1] == "reward 0.5"
    assert swarm("try", f"{tmp_path}/agent.py:plain", "--task", "x") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "reward 0.75"
    assert swarm("try", f"{tmp_path}/agent.py:ended", "--task", "x") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "reward 0.5"
    assert swarm("try", f"{tmp_path}/agent.py:WORDS", "--task", "x") == 1
    assert "is not a function: a rollout is `def WORDS(episode, task)`" in capsys.readouterr().err
    tried = answer(capsys, "try", f"{tmp_path}/agent.py:good", "--task", "Repeat hi")
    assert tried["failure"] is None
    assert swarm("trace", tried["trace"]["entry"]["episode_id"]) == 0
    assert "call 0" in capsys.readouterr().out
    assert answer(capsys, "run", "status", run_id)["run"]["step"] == 0
    assert swarm("ledger", "--kind", "eval", "--reason", "aborted", "--json") == 0
    assert {json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()} == {"dropped"}
