"""The researcher's processes in a town with a clock of its own: `python -m tests.fakes.town PART ...`.

    plan                plan, freeze, hand over to the daemon; prints the study's id
    campaign            create a campaign and hand it over to the daemon; prints its id
    daemon              carry studies and campaigns on until none is left
    sit ID              work on one of them while its window is open, as the daemon has it done
    sit ID --host H     the same on another machine, as far as leases know

Everything is the product's own, put together with the town's clock and a copy of the records that can be taken away. The
folder of the town comes by the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundation import logs
from researcher.campaign.goal import CampaignGoal, aims_of
from researcher.campaign.records import joining
from researcher.cli.campaign_worker import work_on_campaign
from researcher.cli.worker import work_on
from researcher.executor.errors import ExecutorError
from researcher.executor.processes import child_environ
from researcher.home import Home
from researcher.instruments.catalogue import open_instrument
from researcher.models import StudyOptions
from researcher.ownership import owned_now
from researcher.schedule.daemon import Carrier
from researcher.schedule.timetable import Timetable
from researcher.store.errors import StoreError
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink
from researcher.store.store import Store
from researcher.view import PlainView
from swarm.protocol.errors import SwarmError
from tests.fakes.specs import planned
from tests.fakes.town_clock import TownClock

TOWN = "TOWN_FOLDER"
ROOT = Path(__file__).resolve().parents[2]
REPEAT = ROOT / "tests" / "instruments" / "repeat"
_DATABASE = "RESEARCHER_DATABASE_URL"
_LOOK_EVERY_S = 20.0


class Town:
    """What all parts share: a folder with the clock, the records, and the town's troubles."""

    def __init__(self, folder: Path, database: str = "") -> None:
        self.folder = folder
        self.clock = TownClock(folder / "clock")
        self.home = folder / "home"
        self.database = database or f"sqlite:///{self.home / 'researcher.db'}"

    @classmethod
    def of_environ(cls) -> Town:
        return cls(Path(os.environ[TOWN]), os.environ[_DATABASE])

    @property
    def facts(self) -> dict[str, Any]:
        """What the test has arranged: instrument, servers, windows, days, seeds, budget_s; a campaign's further instruments."""
        found: dict[str, Any] = json.loads((self.folder / "town.json").read_text())
        return found

    @property
    def copy_is_away(self) -> Path:
        """While this file is there, nothing can be copied."""
        return self.folder / "copy-is-away"

    @property
    def copied(self) -> Path:
        return self.folder / "copied.jsonl"

    def open_home(self) -> Home:
        self.home.mkdir(parents=True, exist_ok=True)
        return Home(self.home, Store.open(self.database, clock=self.clock))

    def environ(self) -> dict[str, str]:
        """For processes of the town."""
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("SWARM_", "RESEARCHER_LLM"))}
        own = {TOWN: str(self.folder), "RESEARCHER_HOME": str(self.home), _DATABASE: self.database}
        return child_environ({**keep, **own})

    def spawn(self, *arguments: str, log: str = "town.log") -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as opened:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.town", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=opened,
                stderr=subprocess.STDOUT,
                env=self.environ(),
                start_new_session=True,
            )


class Copy(CopySink):
    """The records' copy: a line per message, as long as it can be reached."""

    name = "mlflow"

    def __init__(self, town: Town, store: Store) -> None:
        super().__init__(store)
        self._town = town

    def _send(self, message: Message) -> None:
        if self._town.copy_is_away.exists():
            raise CopyFailed("no route to host")
        with self._town.copied.open("a") as lines:
            lines.write(json.dumps([message.seq, message.kind, message.ref]) + "\n")

    def place(self) -> str:
        return str(self._town.copied)


def plan(town: Town) -> None:
    home, facts = town.open_home(), town.facts
    made = planned(
        Path(facts["instrument"]),
        question="Does a learning rate of 1e-3 repeat words faster than 1e-5?",
        compare={"learning_rate": {"baseline": 1e-5, "levels": [1e-3]}},
        claim="increase",
        metric="auc_reward",
        seeds={"min": facts["seeds"], "max": facts["seeds"]},
        budget={"wall": facts["budget_s"]},
        servers=len(facts["servers"]),
    )
    timetable = Timetable.of(facts["windows"], facts["days"], town.clock.now(), zone="UTC")
    chosen = {"instrument": facts["instrument"], "servers": facts["servers"], "engine": "echo", "approve": "never"}
    study_id = home.store.studies.create(made.question, chosen)
    home.store.studies.save_schedule(study_id, {"timetable": timetable.model_dump(mode="json"), "carried": True})
    with owned_now(home.store, study_id) as store:
        store.plans.save(study_id, made)
    _say(study_id)


def campaign(town: Town) -> None:
    home, facts = town.open_home(), town.facts
    places = [facts["instrument"], *facts.get("further", [])]
    goal = CampaignGoal.model_validate(facts["goal"] | {"instruments": places, "strategist": "builtin"})
    aim, *others = aims_of(goal, [open_instrument(place).instrument for place in places])
    timetable = Timetable.of(goal.schedule.windows, goal.schedule.days, town.clock.now(), zone="UTC")
    options = StudyOptions(instrument=facts["instrument"], servers=tuple(facts["servers"]), engine="echo")
    schedule = {"timetable": timetable.model_dump(mode="json"), "carried": True}
    joined = [joining(each, place) for each, place in zip(others, places[1:], strict=True)]
    _say(home.store.campaigns.create(goal.document(), aim.model_dump(mode="json"), options, schedule, joined))


async def daemon(town: Town) -> None:
    store = town.open_home().store
    children: list[subprocess.Popen[bytes]] = []
    carrier = Carrier(store, lambda study_id: children.append(town.spawn("sit", study_id)), town.clock)
    while carrier.look():
        _say("the daemon looks")
        children = [child for child in children if child.poll() is None]
        change = carrier.next_change() or town.clock.now() + _LOOK_EVERY_S
        await town.clock.sleep(max(0.0, min(_LOOK_EVERY_S, change - town.clock.now())))


def sitting(town: Town, work_id: str) -> int:
    home, view = town.open_home(), PlainView(sys.stdout)
    view.say(f"{work_id}: process {os.getpid()} sits down to it")
    work: Callable[..., Any] = work_on_campaign if work_id.startswith("ca-") else work_on
    try:
        outcome = asyncio.run(
            work(home, work_id, view, wait=False, clock=town.clock, copy=lambda store: Copy(town, store))
        )
    except (StoreError, ExecutorError, SwarmError, ValueError) as error:
        view.say(f"{work_id}: {type(error).__name__}: {error}")
        return 1
    view.say(f"{work_id}: {outcome.status}: {outcome.reason}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the test reads it


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("plan", "campaign", "daemon", "sit"))
    parser.add_argument("what", nargs="?", default="")
    parser.add_argument("--host")
    given = parser.parse_args()
    logs.configure("WARNING")
    town = Town.of_environ()
    if given.host:
        socket.gethostname = lambda: str(given.host)
    if given.part == "plan":
        plan(town)
    elif given.part == "campaign":
        campaign(town)
    elif given.part == "daemon":
        asyncio.run(daemon(town))
    else:
        return sitting(town, given.what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
