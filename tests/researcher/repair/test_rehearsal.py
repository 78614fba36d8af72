"""Episodes without a server, in both kinds of sandbox."""

from __future__ import annotations

import sys
import sysconfig
import tracemalloc
import venv
from pathlib import Path

import pytest

from foundation.confinement import landlock_version
from researcher.executor.diagnosis import Cause, Diagnosis
from researcher.repair.code import Unfit
from researcher.repair.rehearsal import (
    Played,
    Rehearsal,
    RehearsalRequest,
    check,
    check_comparable,
    compare,
    rehearse,
)
from researcher.sandbox.launch import Mode, sandbox
from tests.fakes.repeat_study import FOLDER

pytestmark = pytest.mark.anyio

WORKFLOW = (FOLDER / "workflow.py").read_text()


def request(folder: Path, **changes: object) -> RehearsalRequest:
    fields = {"folder": str(folder), "workflow": "workflow.py", "heldout": 4, **changes}
    return RehearsalRequest.model_validate(fields)


def instrument(tmp_path: Path, text: str) -> Path:
    (tmp_path / "workflow.py").write_text(text)
    return tmp_path


def linked(place: Path) -> str:
    """The Python beneath this one, by a link."""
    place.parent.mkdir()
    place.symlink_to(Path(sys.executable).resolve())
    return str(place)


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LIMITS])
async def test_every_task_is_played_with_every_answer_and_comes_to_its_reward(mode: Mode) -> None:
    if mode is Mode.BUBBLEWRAP and sandbox().mode is not Mode.BUBBLEWRAP:
        pytest.skip(sandbox().words)
    found = await rehearse(request(FOLDER, answers=["", "@echo"], parameters={"syllables": 2}), mode=mode)
    check(found)
    assert [len(line) for line in found.tasks.values()] == [3, 3]
    assert len(found.played) == 2 * 3 * 2
    assert {(each.reward, each.success, len(each.asked)) for each in found.played} == {(0.0, False, 1)}


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LIMITS])
async def test_it_is_played_under_the_python_that_clients_have(tmp_path: Path, mode: Mode) -> None:
    if mode is Mode.BUBBLEWRAP and sandbox().mode is not Mode.BUBBLEWRAP:
        pytest.skip(sandbox().words)
    environment, code = tmp_path / "environment", tmp_path / "code"
    venv.EnvBuilder(symlinks=True).create(environment)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "beneath.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (site / "word_maker.py").write_text("WORD = 'wombat'\n")
    code.mkdir()
    needy = request(instrument(code, f"{WORKFLOW}\nimport word_maker\n"))
    check(await rehearse(needy, python=str(environment / "bin" / "python"), mode=mode))
    with pytest.raises(Unfit, match="No module named 'word_maker'"):
        check(await rehearse(needy, mode=mode))


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LIMITS])
async def test_nothing_is_read_of_a_home_whose_bin_holds_the_python(
    tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode is Mode.BUBBLEWRAP and sandbox().mode is not Mode.BUBBLEWRAP:
        pytest.skip(sandbox().words)
    if mode is Mode.LIMITS and landlock_version() < 1:
        pytest.skip("this kernel shuts no files")
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_path("purelib"))
    python, secret, code = linked(tmp_path / "bin" / "python"), tmp_path / "secret", tmp_path / "code"
    secret.write_text("a private key")
    code.mkdir()
    check(await rehearse(request(instrument(code, WORKFLOW)), python=python, mode=mode))
    reaching = request(instrument(code, f"{WORKFLOW}\nopen({str(secret)!r})\n"))
    with pytest.raises(Unfit, match=r"cannot be played: [\s\S]*(No such file|Permission denied)"):
        check(await rehearse(reaching, python=python, mode=mode))


async def test_tasks_that_were_named_are_played_too(tmp_path: Path) -> None:
    all_of_them = await rehearse(request(FOLDER, answers=["x"], listed=60, plays=False))
    wanted = all_of_them.tasks["train"][50]
    found = await rehearse(request(FOLDER, answers=["x"], tasks=[wanted]))
    assert [each.task for each in found.played if each.split == "train"][3:] == [wanted]
    assert compare(found, found).startswith("7 episodes were rehearsed")


async def test_code_that_cannot_be_loaded_or_never_ends_is_said_to(tmp_path: Path) -> None:
    broken = await rehearse(request(instrument(tmp_path, "import nothing_of_that_name\n")))
    with pytest.raises(Unfit, match="nothing_of_that_name"):
        check(broken)
    with pytest.raises(Unfit, match="took longer than 3 s"):
        await rehearse(request(instrument(tmp_path, "while True:\n    pass\n")), limit_s=3)
    with pytest.raises(Unfit, match="no result"):
        await rehearse(request(instrument(tmp_path, "import os\nos._exit(3)\n")))


@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LIMITS])
async def test_code_that_never_stops_talking_fills_no_memory_and_is_told_by_its_last_words(
    tmp_path: Path, mode: Mode
) -> None:
    if mode is Mode.BUBBLEWRAP and sandbox().mode is not Mode.BUBBLEWRAP:
        pytest.skip(sandbox().words)
    endless = "import os\nwhile True:\n    assert os.write(2, b'and so on, ' * 6000) == 66_000\n"
    tracemalloc.start()
    try:
        spoken = await rehearse(request(instrument(tmp_path, endless)), mode=mode, limit_s=60)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(Unfit, match=r"cannot be played: [\s\S]*(AssertionError|File too large)"):
        check(spoken)
    long = instrument(tmp_path, "import os\nos.write(2, b'and so on, ' * 6000 + b'quite done')\nos._exit(3)\n")
    with pytest.raises(Unfit, match=r"no result; its last output: [\s\S]*and so on, quite done$") as refused:
        await rehearse(request(long), mode=mode)
    assert len(str(refused.value)) < 3000


def test_what_changed_and_was_no_failure_is_found() -> None:
    def rehearsal(reward: float | None = 1.0, asked: str = "a", task: str = "t") -> Rehearsal:
        played = Played(split="train", task=task, answer=0, reward=reward, asked=[asked], error="" if reward else "no")
        return Rehearsal(tasks={"train": [task], "heldout": ["h"]}, played=[played])

    assert "1 of them had ended before too" in compare(rehearsal(), rehearsal())
    assert "none ended before" in compare(rehearsal(None), rehearsal())
    for other, why in (
        (rehearsal(0.5), "keep all rewards"),
        (rehearsal(asked="b"), "the prompts of"),
        (rehearsal(task="u"), "train tasks differ"),
    ):
        with pytest.raises(Unfit, match=why):
            compare(rehearsal(), other)


def test_an_episode_that_failed_may_not_be_worth_more_than_the_worst_that_ended() -> None:
    def rehearsal(*rewards: float | None) -> Rehearsal:
        """Two answers to each of two tasks; None: it failed."""
        places = [("t", 0), ("t", 1), ("u", 0), ("u", 1)]
        played = [
            Played(split="train", task=task, answer=answer, reward=reward, error="" if reward is not None else "no")
            for (task, answer), reward in zip(places, rewards, strict=True)
        ]
        return Rehearsal(tasks={"train": ["t", "u"], "heldout": ["h"]}, played=played)

    half = rehearsal(0.5, None, 0.1, 1.0)
    assert "the 1 that had failed" in compare(half, rehearsal(0.5, 0.5, 0.1, 1.0))
    with pytest.raises(Unfit, match=r"task 't' failed before and now gets the reward 1; .* more than 0\.5"):
        compare(half, rehearsal(0.5, 1.0, 0.1, 1.0))
    whole_task = rehearsal(0.5, 0.2, None, None)
    compare(whole_task, rehearsal(0.5, 0.2, 0.2, 0.0))
    with pytest.raises(Unfit, match=r"task 'u' failed before and now gets the reward 0\.5; .* more than 0\.2"):
        compare(whole_task, rehearsal(0.5, 0.2, 0.5, 0.0))
    assert "none ended before" in compare(rehearsal(None, None, None, None), rehearsal(1.0, 0.0, 1.0, 0.0))


FAULT = Diagnosis(cause=Cause.CODE, why="its own", error="KeyError: 'wrod'", place="workflow.py:66")


def failed(kind: str, place: str, *, by_system: bool = False) -> Played:
    error = f"Traceback ...\n{kind}: no"
    return Played(split="train", task="t", answer=3, error=error, kind=kind, place=place, by_system=by_system)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Rehearsal(error="Traceback ...\nBadSource: it cannot be read"), "be played: BadSource: it cannot be read"),
        (failed("KeyError", "workflow.py:67"), "train task 't' fails differently than the client did: KeyError: no"),
        (failed("PermissionError", "workflow.py:66", by_system=True), "differently than the client did"),
        (failed("KeyError", ""), "differently than the client did"),
        (Played(split="train", task="t", answer=3), "differently than the client did: no reward"),
    ],
)
def test_with_what_fails_otherwise_nothing_can_be_compared(found: Rehearsal | Played, why: str) -> None:
    before = found if isinstance(found, Rehearsal) else Rehearsal(played=[found])
    with pytest.raises(Unfit, match=why):
        check_comparable(before, FAULT)


def test_the_fault_itself_may_show_in_a_rehearsal() -> None:
    ended = Played(split="train", task="t", answer=1, reward=0.0)
    for each in (failed("KeyError", "workflow.py:66"), failed("ValueError", "workflow.py:66")):
        check_comparable(Rehearsal(played=[ended, each]), FAULT)
        check_comparable(Rehearsal(played=[each]), FAULT)
