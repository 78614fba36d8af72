"""Rehearses an instrument's episodes without a server: its code runs in a sandbox against an endpoint with fixed answers.

A rehearsal shows that the code runs and gives a reward. It also shows that a repair makes the same calls and gives the same rewards
as the old code in every episode that the old code finished. It cannot show how a model will answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel

from foundation.confinement import Bounds
from foundation.logs import redact
from foundation.paths import last_bytes
from researcher.executor.diagnosis import Diagnosis
from researcher.instruments.instrument import Scalar
from researcher.repair.code import Unfit
from researcher.sandbox.launch import SPEC, Mode, confined, sandbox

ECHO = "@echo"
"""Placeholder for an answer that repeats the last message."""
ANSWERS = ("", "0", "7", "I think the answer is 42.", '```json\n{"answer": 1}\n```', "x" * 2000, ECHO)
"""The endpoint's answers: nothing, numbers, prose, a code fence, a very long text, the question itself."""
TASKS = 3
"""Number of tasks to rehearse per split, in addition to those that failed."""
LIMIT_S = 240.0
_BOUNDS = Bounds(cpu_s=120, address_bytes=4 << 30, file_bytes=16 << 20)
_WORDS_BYTES = 64 << 10


class RehearsalRequest(BaseModel):
    """Input of the rehearsal process.

    `tasks` are ids of further tasks to play. With `plays` false, the process only lists tasks.
    """

    folder: str
    workflow: str
    parameters: dict[str, Scalar] = {}
    seed: int = 0
    heldout: int = TASKS
    tasks: list[str] = []
    answers: list[str] = list(ANSWERS)
    listed: int = TASKS
    """Number of tasks to list per split; only the first few are played."""
    plays: bool = True
    examples: bool = False
    """Whether to also give the answers of the workflow's own `examples(task)`."""


class Played(BaseModel):
    """One rehearsed episode.

    Args:
        answer: index into the request's answers, or the name of one of the workflow's examples.
        asked: hashes of the episode's calls.
        error: end of the traceback, if the episode failed.
        kind: class name of the exception.
        place: last line of the instrument's code that ran, such as `workflow.py:41`.
        by_system: whether the operating system refused something, or time ran out.
    """

    split: str
    task: str
    answer: int | str
    reward: float | None = None
    success: bool | None = None
    metrics: list[str] = []
    """Names of the metrics that the episode reported (`Outcome.metrics`)."""
    asked: list[str] = []
    error: str = ""
    kind: str = ""
    place: str = ""
    by_system: bool = False

    @property
    def ended(self) -> bool:
        return not self.error and self.reward is not None

    def failed_by(self, fault: Diagnosis) -> bool:
        """Return whether this fault made the episode fail, not the sandbox or another fault.

        A different exception at the same line counts as this fault, because the line may fail differently on another answer.
        """
        if not self.kind or self.place != fault.place:
            return False
        return self.kind == fault.kind or (self.place != "" and not self.by_system)

    @property
    def name(self) -> tuple[str, str, int | str]:
        return self.split, self.task, self.answer


class Rehearsal(BaseModel):
    """The result of a rehearsal. `error` says why nothing could be played."""

    error: str = ""
    tasks: dict[str, list[str]] = {}
    played: list[Played] = []


async def rehearse(
    request: RehearsalRequest, *, python: str = sys.executable, mode: Mode | None = None, limit_s: float = LIMIT_S
) -> Rehearsal:
    """Run the rehearsal in a separate process, in the sandbox. `python` is the interpreter that runs the instrument's clients.

    Raises: Unfit when it takes too long, or ends without a result.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as place:
        command, environ = _command(request, python, place, mode or sandbox().mode)
        with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as said:
            code = await _run(command, environ, result, said, limit_s)
            found, words = last_bytes(result, _BOUNDS.file_bytes), last_bytes(said, _WORDS_BYTES)
    with suppress(ValueError):
        return Rehearsal.model_validate_json(found)
    last = redact(words.decode(errors="replace"))[-2000:].strip()
    raise Unfit(f"the rehearsal ended with code {code} and no result; its last output: {last or 'nothing'}")


def check(after: Rehearsal) -> None:
    """Check that every episode ended with a reward. Raises: Unfit."""
    if after.error:
        raise Unfit(f"the instrument cannot be played: {after.error}")
    for split in ("train", "heldout"):
        if not after.tasks.get(split):
            raise Unfit(f"tasks({split!r}, …) yields no tasks")
    for each in after.played:
        if not each.ended:
            raise Unfit(f"the rehearsed episode of {each.split} task {each.task!r} failed: {each.error or 'no reward'}")


def check_comparable(before: Rehearsal, fault: Diagnosis) -> None:
    """Check that a repair can be compared with the old code, whose client failed because of `fault`.

    Raises: Unfit when the tasks cannot be listed, or an episode fails differently than the client did. The sandbox may cause
    either.
    """
    if before.error:
        raise Unfit(f"the instrument cannot be played: {_last_line(before.error)}")
    for each in before.played:
        if not each.ended and not each.failed_by(fault):
            raise Unfit(
                f"the episode of {each.split} task {each.task!r} fails differently than the client did: "
                f"{_last_line(each.error) or 'no reward'}"
            )


def compare(before: Rehearsal, after: Rehearsal) -> str:
    """Compare the rehearsals of the old and the repaired code. Return a summary in words.

    Raises: Unfit when the repair changed anything but the failure, or rewards a formerly failed episode too much: more than the
    lowest reward that the old code gave for its task (for any task, if it gave none for that one).
    """
    for split, tasks in before.tasks.items():
        if tasks and tasks != after.tasks.get(split):
            raise Unfit(f"its {split} tasks differ from before; fix the fault and change nothing else")
    now = {each.name: each for each in after.played}
    same = 0
    for old in before.played:
        new = now.get(old.name)
        if not old.ended:
            _check_worth(before, old, new)
            continue
        if new is None or (new.reward, new.success) != (old.reward, old.success):
            raise Unfit(
                f"{old.split} task {old.task!r} now gets the reward {new.reward if new else None}; the old code gave "
                f"{old.reward}; fix the fault and keep all rewards"
            )
        if new.asked != old.asked:
            raise Unfit(f"the prompts of {old.split} task {old.task!r} differ from before; fix only the fault")
        same += 1
    failed = len(before.played) - same
    kept = f"{same} of them had ended before too, with the same calls and rewards" if same else "none ended before"
    worth = f"; the {failed} that had failed get no more reward than the worst of these" if same and failed else ""
    return f"{len(after.played)} episodes were rehearsed against fixed answers and ended with a reward; {kept}{worth}"


def _check_worth(before: Rehearsal, failed: Played, now: Played | None) -> None:
    """Check the reward that the repair gives a formerly failed episode. Raises: Unfit if it is too high."""
    ended = [each for each in before.played if each.ended]
    rewards = [each.reward for each in ended if (each.split, each.task) == (failed.split, failed.task)]
    rewards = rewards or [each.reward for each in ended]
    least = min((reward for reward in rewards if reward is not None), default=None)
    if least is not None and now is not None and now.reward is not None and now.reward > least:
        raise Unfit(
            f"{failed.split} task {failed.task!r} failed before and now gets the reward {now.reward:g}; an answer that could not be scored "
            f"may not get more than {least:g}, the lowest reward that the old code gave"
        )


def _last_line(error: str) -> str:
    return redact(error.strip().rpartition("\n")[2])[:300]


async def _run(
    command: list[str], environ: dict[str, str], result: BinaryIO, said: BinaryIO, limit_s: float
) -> int | None:
    """Run the process and return its exit code.

    Its output goes to files, whose size the sandbox limits; a pipe would have to be read meanwhile. Raises: Unfit when the process
    takes too long.
    """
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=result, stderr=said, start_new_session=True
    )
    try:
        async with asyncio.timeout(limit_s):
            return await process.wait()
    except TimeoutError as error:
        raise Unfit(f"the rehearsal took longer than {limit_s:.0f} s") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _command(request: RehearsalRequest, python: str, place: str, mode: Mode) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of the process.

    Bubblewrap confines it from outside. Otherwise it confines itself once it has its port.
    """
    folder = Path(place).resolve()
    file = folder / "request.json"
    file.write_text(request.model_dump_json())
    command = [python, "-m", "researcher.repair.rehearse", str(file), str(folder / SPEC)]
    reads = [Path(request.folder), file, Path(sys.prefix)]
    wrapped, environ = confined(command, os.environ, folder, reads=reads, mode=mode, bounds=_BOUNDS)
    return (wrapped if mode is Mode.BUBBLEWRAP else command), environ
