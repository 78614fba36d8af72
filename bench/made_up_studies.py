"""Made-up studies with a known truth. The real planner plans them, the real statistics decide; there are two ways to run them.

`simulate` walks the plan as the conduct does, with random trials in place of servers. `Laboratory.carry_out` uses the whole
executor and its store, with a simulated server and a clock that only trials advance.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench.simulated_server import URL, SimulatedClients, SimulatedServer
from foundation.clock import ManualClock
from foundation.ids import derived_seed
from researcher.analysis.decide import decide
from researcher.analysis.metrics import finals
from researcher.analysis.race import due
from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.verdicts import conclude
from researcher.conduct import Conduct
from researcher.executor.blueprint import Setup
from researcher.executor.servers import ServerPool
from researcher.executor.trials import Executor
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.models import Attrition, StudyStatus, TrialEvidence, TrialRecord, TrialStatus, VerdictRecord
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.view import StudyPicture

METRIC = "final_reward"
INSTRUMENT = Path(__file__).parent / "simulation"


def instrument() -> InstrumentFolder:
    return read_instrument(INSTRUMENT)


def another(name: str, *, margin: float = 0.1, author: str | None = None) -> InstrumentFolder:
    """A copy of the instrument with another name and margin. author: the LLM that supposedly wrote it."""
    folder = instrument()
    metrics = tuple(
        metric.model_copy(update={"margin": margin}) if metric.name == METRIC else metric
        for metric in folder.instrument.metrics
    )
    changed = {"name": name, "metrics": metrics, "generated": author}
    return replace(folder, instrument=folder.instrument.model_copy(update=changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The truth behind a study. means: by arm, default 0. sigma: standard deviation between seeds. seed: of the noise."""

    means: Mapping[str, float]
    sigma: float
    seed: int

    def reward(self, arm: str, seed: int) -> float:
        noise = np.random.default_rng(derived_seed(self.seed, arm, seed)).normal(0.0, self.sigma)
        return self.means.get(arm, 0.0) + float(noise)

    def attrition(self, arm: str, seed: int) -> Attrition | None:
        """Attempts at the trial's episodes and causes of lost ones; None if not recorded."""
        return None

    def difference(self, baselines: Sequence[str], treatments: Sequence[str]) -> float:
        sides = [math.fsum(self.means.get(arm, 0.0) for arm in arms) / len(arms) for arms in (baselines, treatments)]
        return sides[1] - sides[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Result of a study."""

    verdicts: tuple[VerdictRecord, ...]
    action: str
    trials: int
    records: tuple[TrialRecord, ...] = ()
    """Records of made-up trials."""
    findings: tuple[SentinelFinding, ...] = ()
    """Findings of all sentinels on made-up trials."""


def simulate(plan: Plan, world: World) -> Ending:
    """Walk through the stages along the plan's branches."""
    stage, seeds = plan.stages[0], plan.stages[0].seeds
    trials: dict[tuple[str, int], TrialRecord] = {}
    while True:
        while new := [pair for pair in due(plan, stage, seeds, [*trials.values()]) if pair not in trials]:
            trials |= {(arm, seed): _trial(world, stage.id, arm, seed) for arm, seed in new}
        decision = decide(plan, stage.id, [*trials.values()])
        if decision.action != "stage":
            break
        stage = next(each for each in plan.stages if each.id == decision.to)
        seeds = decision.seeds or stage.seeds
    found = conclude(plan, [*trials.values()])
    return Ending(
        verdicts=found.verdicts,
        action=decision.action,
        trials=len(trials),
        records=tuple(trials.values()),
        findings=found.findings,
    )


class Laboratory:
    """Async context manager with store, pool, executor and conduct on a simulated server. store: holds the records."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._stack = AsyncExitStack()
        self._folder = instrument()

    async def __aenter__(self) -> Self:
        self._home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="false-positives-")))
        self.store = Store.open(f"sqlite:///{self._home / 'researcher.db'}", clock=self._clock)
        self._stack.callback(self.store.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def carry_out(self, plan: Plan, world: World) -> Ending:
        """Run a new study to its end. Raises: RuntimeError when it does not finish."""
        study_id = self.store.studies.create(plan.question, {})
        self.store.plans.save(study_id, plan)
        return await self.resume(study_id, world)

    async def resume(self, study_id: str, world: World) -> Ending:
        """Run the rest of a study. Raises: RuntimeError as `carry_out` does."""
        server = SimulatedServer(world.reward, self._clock, step_s=1.0)
        setup = Setup(
            instrument=self._folder.instrument,
            instrument_dir=self._folder.path,
            code_version=self._folder.code,
            finals=finals,
            studies=self._home,
        )
        transport = server.transport()
        async with ServerPool(
            self.store, f"study {study_id}", urls=[URL], clock=self._clock, transport=transport, environ={}
        ) as pool:
            executor = Executor(self.store, pool, setup, clients=SimulatedClients(server))
            conduct = Conduct(self.store, executor, _NoCopy(), _NoView(), self._clock, self._home)
            outcome = await conduct.carry_out(study_id)
        if outcome.status is not StudyStatus.DONE:
            raise RuntimeError(f"{study_id} ended as {outcome.status}: {outcome.reason}")
        decisions = self.store.journal.events(study_id, "decision")
        return Ending(
            verdicts=tuple(self.store.verdicts.all(study_id)),
            action=str(decisions[-1].detail["action"]),
            trials=len(self.store.trials.all(study_id)),
        )


class _NoCopy:
    def drain(self, study_id: str | None = None) -> int:
        return 0


class _NoView:
    def show(self, picture: StudyPicture) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


def _trial(world: World, stage: str, arm: str, seed: int) -> TrialRecord:
    lost = world.attrition(arm, seed)
    return TrialRecord.model_construct(
        key=f"{arm}/{seed}",
        study_id="made-up",
        stage=stage,
        arm=arm,
        seed=seed,
        status=TrialStatus.DONE,
        finals={METRIC: world.reward(arm, seed)},
        series={},
        evidence=None if lost is None else TrialEvidence(attrition=lost),
    )
