"""The instrument of repositories: what is broken in them, what mending is worth, and agents that work in them."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serving import ServerProcess
from foundation.confinement import PORTS, landlock_version
from studies.repo_tasks import workflow
from studies.repo_tasks.agent import put_in_place
from studies.repo_tasks.defects import KINDS
from studies.repo_tasks.functions import FUNCTIONS
from studies.repo_tasks.grading import MOST_FILES, Grade, graded, left_behind
from studies.repo_tasks.repositories import Repository, repository, result, same
from studies.repo_tasks.reward import score
from swarm.client import RunSpec, SwarmClient, Task
from swarm.client.workflow import Workflow
from tests.studies.declarations import assert_declaration_fits_the_code, declared
from tests.studies.playing import SPEC, played, take

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(landlock_version() < PORTS, reason="this kernel cannot confine an agent"),
]


def made(task: Task) -> Repository:
    return repository(task.metadata["defect"], task.metadata["modules"], task.metadata["number"])


def mended(found: Repository) -> dict[str, str]:
    """The package's files with the defective function as it should be."""
    whole = found.defect.partition(":")[0]
    (function,) = [each for each in FUNCTIONS if f"{each.module}.{each.name}" == whole]
    failing = [case for case in found.hidden if case.fails]
    for draw in range(500):
        source = function.written(random.Random(draw))
        if all(same(result(source, function.name, _json(case.arguments)), case.expected) for case in failing):
            return {f"{found.package}/{function.module}.py": source}
    raise AssertionError(f"no draw of {function.name} mends {found.defect}")


def _json(value: object) -> str:
    return json.dumps(value)


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("repo_tasks")


def test_no_defect_is_both_trained_and_held_out() -> None:
    train = {made(task).defect for task in take(workflow.tasks("train", 0, None, modules=1), 60)}
    held_out = {made(task).defect for task in take(workflow.tasks("heldout", 0, None, modules=1), 15)}
    assert train.isdisjoint(held_out)
    assert len(train) > 30
    assert len(held_out) > 8


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 10)
    assert once == take(workflow.tasks("train", 1, 10), 20)
    assert once != take(workflow.tasks("train", 2, None), 10)
    assert list(workflow.tasks("heldout", 1, 4)) == list(workflow.tasks("heldout", 2, 4))
    assert [made(task) for task in once] == [made(task) for task in once]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("modules", [1, 3, 9])
def test_every_kind_of_defect_shows_in_the_test_that_is_said_to_fail(kind: str, modules: int, tmp_path: Path) -> None:
    found = repository(kind, modules, 7)
    assert f":{kind}:" in found.defect
    assert len([path for path in found.files if path.startswith(found.package)]) == modules + 1
    found.write(tmp_path)
    runs = [
        subprocess.run([sys.executable, "-m", "unittest", *name], cwd=tmp_path, capture_output=True, check=False)
        for name in ([], [found.failing])
    ]
    assert all(run.returncode == 1 for run in runs)
    assert b"FAILED" in runs[0].stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"defect": "typo"}, "defect must"), ({"modules": 0}, "modules must"), ({"turns": 0}, "turns must"), ({"agent": " "}, "agent must")],
)  # fmt: skip
def test_what_cannot_be_played_is_refused(changes: dict[str, str | int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        workflow.tasks("train", 0, 1, **changes)  # type: ignore[arg-type]


def test_what_a_test_shows_is_not_hidden_and_does_not_suffice() -> None:
    for number in range(60):
        found = repository("any", 2, number)
        shown = "".join(text for path, text in found.files.items() if path.startswith("tests/"))
        assert sum(case.fails for case in found.hidden) >= 2
        for case in found.hidden:
            given = ", ".join(map(repr, case.arguments))
            assert f"{case.module}.{case.function}({given})," not in shown


def test_a_package_that_is_a_link_or_full_of_files_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret.py").write_text("x")
    (tmp_path / "kit").symlink_to(tmp_path / "other")
    assert left_behind(tmp_path, "kit") == {}
    for number in range(MOST_FILES + 10):
        (tmp_path / "other" / f"{number}.py").write_text("x")
    assert len(left_behind(tmp_path, "other")) == MOST_FILES


def test_mending_is_worth_more_than_trying_and_trying_more_than_nothing() -> None:
    worth = [score(*shares, changed=True) for shares in ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (0.0, 0.9))]
    assert worth == sorted(worth, reverse=True)
    assert (worth[0], worth[-1]) == (1.0, 0.0)
    assert max(worth[1:]) < 1.0
    assert score(0.0, 1.0, changed=False) == 0.0


# -- hidden tests --------------------------------------------------------------------------------------------------------


async def test_what_is_mended_passes_and_what_is_left_does_not(tmp_path: Path) -> None:
    found = repository("operator", 2, 3)
    found.write(tmp_path)
    assert await graded(tmp_path, found) == Grade(fixed=0.0, kept=1.0, changed=False)
    for path, source in mended(found).items():
        before = (tmp_path / path).read_text()
        put = tmp_path / path
        put.write_text(f"{before}\n\n{source}")  # a later definition stands for the earlier one
    grade = await graded(tmp_path, found)
    assert (grade.fixed, grade.changed) == (1.0, True)


async def test_tests_that_are_deleted_or_rewritten_change_nothing(tmp_path: Path) -> None:
    found = repository("any", 2, 3)
    found.write(tmp_path)
    for path in (tmp_path / "tests").glob("test_*.py"):
        path.write_text("")
    assert await graded(tmp_path, found) == Grade(fixed=0.0, kept=1.0, changed=False)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "print('{\"value\": 1}' * 100)\nimport os\nfor n in range(3, 20):\n    try: os.write(n, b'ready\\n' * 100)\n    except OSError: pass",
        "class A:\n    def __eq__(self, other): return True\ndef __getattr__(name): return lambda *given: A()",
        "while True: pass",
        "x = 'x' * (1 << 40)",
        "this is no Python",
    ],
)
async def test_code_that_plays_tricks_fails_its_tests(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.repo_tasks.grading.LIMIT_S", 3.0)
    found = repository("any", 1, 3)
    found.write(tmp_path)
    for path in (tmp_path / found.package).glob("*.py"):
        path.write_text(code)
    grade = await graded(tmp_path, found)
    assert (grade.fixed, grade.kept) == (0.0, 0.0)


async def test_the_code_that_is_graded_reaches_neither_files_nor_network(tmp_path: Path) -> None:
    found = repository("any", 1, 3)
    (tmp_path / "secret").write_text("42")
    found.write(tmp_path / "work")
    for path in (tmp_path / "work" / found.package).glob("[a-z]*.py"):
        path.write_text(f"open({str(tmp_path / 'secret')!r}).read()\n{path.read_text()}")
    grade = await graded(tmp_path / "work", found)
    assert (grade.fixed, grade.kept) == (0.0, 0.0)


# -- agents --------------------------------------------------------------------------------------------------------------


def test_a_function_in_an_answer_takes_the_place_of_its_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "numbers.py").write_text("def one():\n    return 2\n\n\ndef two():\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    put_in_place("It should be:\n```python\ndef one():\n    return 1\n```\nNow it is.")
    assert (tmp_path / "kit" / "numbers.py").read_text() == "def one():\n    return 1\n\n\ndef two():\n    return 2\n"


async def test_the_built_in_agent_plays_an_episode(echo_server: ServerProcess) -> None:
    _, loaded = declared("repo_tasks")
    report, entries = await played(echo_server.url, loaded, loaded.tasks("heldout", 0, 2, modules=1))  # type: ignore[arg-type]
    assert (report.ended, report.crashed) == (2, 0)
    assert all(entry.reward == 0.0 and entry.calls == 1 for entry in entries)
    assert all(entry.metrics == {"fixed": 0.0, "kept": 1.0, "changed": 0.0} for entry in entries)


MENDS = """
import json, os, pathlib, sys, urllib.request
body = {{"model": "policy", "messages": [{{"role": "user", "content": "hi"}}], "temperature": 0.7}}
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request).read()
for path in {places!r}:
    try: open(path).close()
    except PermissionError: continue
    sys.exit(path + " can be read")
for path, source in {mended!r}.items():
    with open(path, "a") as file: file.write(chr(10) * 2 + source)
for path in pathlib.Path("tests").glob("test_*.py"): path.unlink()
"""


async def test_any_command_is_an_agent_and_sees_nothing_of_the_hidden_tests(
    echo_server: ServerProcess, tmp_path: Path
) -> None:
    _, loaded = declared("repo_tasks")
    (task,) = workflow.tasks("train", 3, 1, modules=1, defect="constant")
    places = [Path(workflow.__file__), Path(workflow.__file__).with_name("repositories.py")]
    script = tmp_path / "agent.py"
    script.write_text(MENDS.format(mended=mended(made(task)), places=[str(place) for place in places]))
    command = shlex.join([sys.executable, str(script)])
    (task,) = workflow.tasks("train", 3, 1, modules=1, defect="constant", agent=command)
    entry, call = await _one(echo_server.url, loaded, task)
    assert (entry.reward, entry.success) == (1.0, True)
    assert call.sampling.temperature == 0.25  # the evaluation's, whatever the agent asks for


@pytest.mark.parametrize(
    ("agent", "cause", "words"),
    [
        ("sh -c 'echo no idea >&2; exit 3'", "rollout", "its last output: no idea"),
        ("no-such-program", "rollout", "program 'no-such-program' not found"),
    ],
)
async def test_an_agent_that_fails_earns_nothing(
    echo_server: ServerProcess, agent: str, cause: str, words: str
) -> None:
    (task,) = workflow.tasks("train", 0, 1, agent=agent)
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(RunSpec.model_validate(SPEC))
        await swarm.run_tasks([task], workflow.rollout, kind="eval", retries=0, progress=False)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id, kind="eval")]
    assert [(entry.reward, entry.cause) for entry in entries] == [(None, cause)]
    assert words in (entries[0].detail or "")


async def _one(url: str, loaded: Workflow, task: Task):  # type: ignore[no-untyped-def]
    """An episode's entry in the ledger, and its first call."""
    async with SwarmClient(url) as swarm:
        run = await swarm.start_run(RunSpec.model_validate(SPEC))
        await swarm.run_tasks([task], loaded.rollout, kind="eval", sampling={"temperature": 0.25}, progress=False)
        (entry,) = [entry async for entry in swarm.ledger(run_id=run.run_id, kind="eval")]
        trace = await swarm.trace(entry.episode_id)
    return entry, trace.calls[0]
