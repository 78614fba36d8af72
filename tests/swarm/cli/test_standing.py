"""What stands still, in the words of `swarm top` and `swarm run status`."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.cli.top import standing_lines
from swarm.protocol.status import EngineStatus, Hang, Phase, PoolStatus, ReplicaStatus, ServerStatus, WaitingFor

AT = 1_700_000_000.0


def status(
    waiting: WaitingFor | None = None,
    hang: Hang | None = None,
    *,
    warm: bool = False,
    replicas: Sequence[ReplicaStatus] = (),
) -> ServerStatus:
    engine = EngineStatus(backend="local", device="cpu", hang=hang, warm=warm, replicas=list(replicas))
    return ServerStatus(
        server_id="s",
        revision=1,
        phase=Phase.UPDATING,
        model="m",
        pool=PoolStatus(),
        waiting_for=waiting,
        engine=engine,
    )


def test_a_task_that_is_waited_for_is_named_with_who_plays_it() -> None:
    assert standing_lines(status()) == []
    played = WaitingFor(task_id="t-1", client_id="c-1", since=AT)
    assert standing_lines(status(played)) == ["waiting for task t-1 (client c-1) since 22:13:20 UTC"]
    free = WaitingFor(task_id="t-1", since=AT)
    assert standing_lines(status(free)) == ["waiting for task t-1 (no client plays it) since 22:13:20 UTC"]


def test_a_hang_is_trouble_until_it_is_over_and_is_told_afterwards_too() -> None:
    hang = Hang(reason="the trainer has not answered", phase=Phase.UPDATING, since=AT, found_at=AT + 31)
    assert status(hang=hang).trouble == "the trainer has not answered"
    over = status(hang=hang.model_copy(update={"over_at": AT + 40}))
    assert over.trouble is None
    (line,) = standing_lines(over)
    assert line == "hung since 22:13:20 UTC while updating, over at 22:14:00 UTC: the trainer has not answered"


def test_a_replica_that_is_away_is_named_while_others_serve() -> None:
    well = ReplicaStatus(device="cuda:1", ready=True)
    ill = ReplicaStatus(device="cuda:2", ready=False, failures=1, reason="was ended by SIGKILL; last lines:\nx")
    gone = ReplicaStatus(device="cuda:3", ready=False, failed_for_good=True)
    assert standing_lines(status(warm=True, replicas=[well, ill, gone])) == [
        "replica cuda:2 is down and restarting: was ended by SIGKILL; last lines: x",
        "replica cuda:3 is down for good: no reason given",
    ]
    assert standing_lines(status(replicas=[ill])) == []  # the engine as a whole is down, which is said elsewhere


def test_a_hang_of_one_replica_is_no_trouble_while_others_serve() -> None:
    hang = Hang(reason="a replica hangs", phase=Phase.ROLLING, since=AT, found_at=AT + 31)
    assert status(hang=hang, warm=True).trouble is None
