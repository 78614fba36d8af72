"""`swarm run status --watch`, of a server that is looked at now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from swarm.main import main
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import Phase, RunReport, StepMetrics

Made = list[tuple[int, int]]
"""Branch and number of steps."""
FIRST: Made = [(0, 1), (0, 2), (0, 3)]
BACK: Made = FIRST[:1]
AGAIN: Made = [*BACK, (1, 2)]
FARTHER: Made = [*AGAIN, (1, 3), (1, 4)]


@dataclass
class Server:
    """Each look finds the next of `moments`: the run's branch then, and its steps. With the last one it is complete."""

    moments: Sequence[tuple[int, Made]]
    now: int = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(latest_run_id="r", waiting_for=None, engine=SimpleNamespace(hang=None, replicas=[]))

    def statuses(self) -> Iterator[SimpleNamespace]:
        for moment in range(len(self.moments)):
            self.now = moment
            yield self.status()

    def run(self, run_id: str, since_step: int) -> RunReport:
        branch, made = self.moments[self.now]
        return RunReport(
            run_id=run_id,
            branch=branch,
            spec=RunSpec(),
            status="running" if self.now + 1 < len(self.moments) else "complete",
            phase=Phase.ROLLING,
            step=made[-1][1],
            config_version=1,
            changes=[],
            steps=[
                StepMetrics(step=step, branch=on, at=0.0, config_version=1, values={})
                for on, step in made
                if step > since_step
            ],
            started_at=0.0,
        )


@pytest.mark.parametrize(
    ("moments", "options", "shown"),
    [
        ([(0, BACK), (0, FIRST), (0, FIRST)], [], FIRST),
        ([(0, FIRST), (1, BACK), (1, AGAIN), (1, FARTHER)], [], [*FIRST, *FARTHER[1:]]),
        ([(0, FIRST), (1, AGAIN), (1, FARTHER)], [], [*FIRST, *FARTHER[1:]]),
        ([(0, FIRST), (1, FARTHER)], [], [*FIRST, *FARTHER[1:]]),
        ([(0, FIRST[:2]), (1, [*FIRST, (1, 4)])], [], [*FIRST, (1, 4)]),
        ([(0, BACK), (0, FIRST), (1, BACK), (1, FARTHER)], ["--since-step", "2"], [FIRST[2], *FARTHER[2:]]),
    ],
    ids=["onwards", "went back", "unseen", "unseen and farther", "made before it went back", "since a step"],
)
def test_steps_are_shown_once_and_those_made_again_after_a_restore_once_more(
    moments: list[tuple[int, Made]],
    options: list[str],
    shown: Made,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server(moments)
    monkeypatch.setattr("swarm.cli.runs.connect", lambda args, **fields: server)
    assert main(["run", "status", "--watch", "--json", *options]) == 0
    *steps, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(step["branch"], step["step"]) for step in steps] == shown
