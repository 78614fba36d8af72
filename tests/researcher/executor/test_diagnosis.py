"""Infrastructure or code: what the rules tell, and what they leave open."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest

from researcher.executor.diagnosis import Cause, Symptoms, diagnose
from swarm.protocol.status import Phase

FOLDER = Path("/studies/words")


def trace(error: str, *, own: bool = True, function: str = "rollout") -> str:
    frames = '  File "/lib/swarm/client/rollouts.py", line 7, in _play\n    await it\n'
    if own:
        frames += (
            f'  File "{FOLDER}/workflow.py", line 41, in {function}\n    total = answer["totl"]\n            ~~~~\n'
        )
    return f"some words before\nTraceback (most recent call last):\n{frames}{error}\n"


def seen(said: str = "", **changes: object) -> Symptoms:
    fields: dict[str, object] = {"folder": FOLDER, "exit_code": 1, "said": said, "phase": Phase.ROLLING, **changes}
    return Symptoms(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        "KeyError: 'totl'",
        "TypeError: unsupported operand type(s)",
        "json.decoder.JSONDecodeError: Expecting value",
        "FileNotFoundError: [Errno 2] No such file or directory: 'words.txt'",
        "httpx.HTTPStatusError: Client error '400 Bad Request' for url 'http://x'",
        "openai.BadRequestError: Error code: 400",
        "AssertionError",
    ],
)
def test_what_the_instrument_raised_is_its_code(error: str) -> None:
    found = diagnose(seen(trace(error)))
    assert (found.cause, found.place, found.by) == (Cause.CODE, "workflow.py:41", "rules")
    assert found.error == error


@pytest.mark.parametrize(
    "error",
    [
        "swarm.client.errors.ServerUnreachable: nothing answers at http://x",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "OSError: [Errno 28] No space left on device",
        "MemoryError",
        "openai.APITimeoutError: Request timed out.",
        "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url 'http://x'",
        "httpx.HTTPStatusError: Client error '410 Gone' for url 'http://x'",
        "swarm.client.errors.StorageFull: the disk is full",
    ],
)
def test_what_gave_way_under_the_instrument_is_infrastructure(error: str) -> None:
    assert diagnose(seen(trace(error))).cause is Cause.INFRASTRUCTURE


async def _in_a_group(error: Exception) -> None:
    async def fail() -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())


@pytest.mark.parametrize(
    ("error", "cause"),
    [(KeyError("total"), Cause.CODE), (ConnectionResetError(104, "away"), Cause.INFRASTRUCTURE)],
)
def test_of_an_exception_group_its_member_is_judged(error: Exception, cause: Cause) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(_in_a_group(error))
    told = "".join(traceback.format_exception(raised.value))
    found = diagnose(seen(told, folder=Path(__file__).parent))
    assert (found.cause, found.kind) == (cause, type(error).__name__)
    assert found.place.startswith("test_diagnosis.py:")


def test_how_the_process_ended_and_how_the_server_is_come_first() -> None:
    own = trace("KeyError: 'totl'")
    assert diagnose(seen(own, exit_code=-9)).cause is Cause.INFRASTRUCTURE
    assert diagnose(seen(own, exit_code=137)).why == "the client was killed by signal 9"
    assert diagnose(seen(own, exit_code=2)).cause is Cause.INFRASTRUCTURE
    assert diagnose(seen(own, phase=Phase.FAILED)).cause is Cause.INFRASTRUCTURE
    assert diagnose(seen(own, phase=None)).cause is Cause.INFRASTRUCTURE
    assert diagnose(seen(own, exit_code=None)).cause is Cause.CODE


def test_a_workflow_that_does_not_load_is_code_wherever_it_is_found_out() -> None:
    syntax = (
        f'Traceback (most recent call last):\n  File "/lib/swarm/client/workflow.py", line 9, in load\n    exec(it)\n'
        f'  File "{FOLDER}/workflow.py", line 3\n    def tasks(:\n              ^\nSyntaxError: invalid syntax\n'
    )
    assert (diagnose(seen(syntax)).cause, diagnose(seen(syntax)).place) == (Cause.CODE, "workflow.py:3")
    fault = trace("swarm.client.errors.WorkflowFault: workflow.py defines no function 'tasks'", own=False)
    assert diagnose(seen(fault)).cause is Cause.CODE


def test_rollouts_that_failed_are_judged_by_what_most_of_them_told_the_server() -> None:
    failing = trace("swarm.client.errors.RolloutsFailing: 8 episodes in a row crashed", own=False)
    lost, wrong = trace("ConnectionError: away"), trace("KeyError: 'totl'")
    assert diagnose(seen(failing, aborted=[wrong, lost, lost])).cause is Cause.INFRASTRUCTURE
    found = diagnose(seen(failing, aborted=[lost, wrong, wrong]))
    assert (found.cause, found.place, found.error) == (Cause.CODE, "workflow.py:41", "KeyError: 'totl'")
    assert diagnose(seen(wrong + failing)).cause is Cause.CODE
    assert diagnose(seen(failing)).cause is Cause.UNKNOWN


def test_what_no_rule_tells_is_left_open() -> None:
    assert diagnose(seen("goodbye", exit_code=0)).cause is Cause.UNKNOWN
    for killed in (None, -9):
        assert diagnose(seen("", exit_code=killed, stalled=True)).cause is Cause.UNKNOWN
    outside = trace("swarm.client.trial.TrialFailed: the training tasks ran out", own=False)
    assert diagnose(seen(outside)).cause is Cause.UNKNOWN
