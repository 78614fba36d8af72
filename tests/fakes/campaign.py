"""Campaigns on a real store, with drawn trials in place of servers: a runner that records what a simulated study found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from bench.campaigns import Bench, goal
from bench.made_up_studies import METRIC, World, another, simulate
from foundation.clock import Clock, ManualClock
from foundation.ids import derived_seed
from researcher.campaign.builtin import BuiltinStrategist
from researcher.campaign.goal import CampaignGoal, aims_of
from researcher.campaign.loop import CampaignLoop, CampaignOutcome, Rest
from researcher.campaign.new_instrument import InstrumentWriter
from researcher.campaign.records import joining
from researcher.campaign.seen import Levels
from researcher.campaign.strategist import Strategist
from researcher.instruments.instrument import Scalar
from researcher.models import HostedModel, Notice, SampledEpisode, StudyOptions, StudyStatus, TrialEvidence
from researcher.ownership import owned_now
from researcher.schedule.timetable import Timetable
from researcher.store.store import Store
from researcher.study.plan import Plan, Verdict
from tests.fakes.sampled import an_episode

TRIAL_S = 10.0
Worth = Callable[[Levels], float]


def steep(levels: Levels) -> float:
    """A learning rate 16 times the default's is best: three steps up, and nothing else matters."""
    ladder: dict[Scalar, float] = {2.5e-6: -0.3, 1e-5: 0.0, 4e-5: 0.25, 1.6e-4: 0.5}
    return ladder[levels.get("learning_rate", 1e-5)]


def flat(levels: Levels) -> float:
    return 0.0


class RecordedStudies:
    """Runs a study by recording what its trials would have found. worth: of an arm, by the factors' levels; elsewhere: the same
    on instruments of these names."""

    def __init__(self, store: Store, worth: Worth, clock: Clock, *, sigma: float = 0.06, engine: str = "local") -> None:
        self._store = store
        self._worth = worth
        self.elsewhere: dict[str, Worth] = {}
        self._clock = clock
        self._sigma = sigma
        self._engine = engine
        self.ran: list[str] = []
        self.wound_up: list[str] = []
        self.before: Callable[[str], None] = lambda study_id: None
        """Called before each study: a test may do there what people do meanwhile."""
        self.solves: Mapping[str, Worth] = {}
        """Held-out score of an arm, by series (`eval_success_after`); each trial has two episodes around it."""
        self.says: Callable[[str], str] | None = None
        """What an arm's model answered at the end, kept as a sampled episode of each trial."""

    async def __call__(self, study_id: str, plan: Plan) -> Rest:
        store = self._store
        asked = store.studies.get(study_id)
        if asked.pause_requested and not asked.stop_requested:
            store.studies.set_status(study_id, StudyStatus.WAITING, "paused on request")
            return Rest(ended=False, reason="paused on request")
        self.before(study_id)
        if store.studies.get(study_id).plan_version is None:
            store.plans.save(study_id, plan)
        if store.studies.get(study_id).stop_requested:
            store.studies.set_status(study_id, StudyStatus.STOPPED, "stopped on request")
            return Rest(ended=True, reason="stopped on request")
        store.studies.set_status(study_id, StudyStatus.RUNNING)
        self.ran.append(study_id)
        worth = self.elsewhere.get(plan.instrument, self._worth)
        means = {arm.name: worth(arm.levels) for arm in plan.arms}
        ending = simulate(plan, World(means=means, sigma=self._sigma, seed=derived_seed(plan.digest())))
        evidence = TrialEvidence(model=HostedModel(name=plan.model.name, engine=self._engine))
        store.budgets.set(study_id, "wall_s", plan.budget.wall_s)
        for made in ending.records:
            [trial] = store.trials.ensure(study_id, made.stage, [(made.arm, made.seed)])
            store.trials.record_intent(study_id, trial.key, 1, "http://made.up", f"{study_id}/{trial.key}#1", {})
            final = made.finals[METRIC]
            curve = [(step, final * step / 20) for step in range(21)]
            levels = plan.arm(made.arm).levels
            scores = {
                name: [(0, score(levels) - 0.125), (1, score(levels) + 0.125)] for name, score in self.solves.items()
            }
            kept = [] if self.says is None else [answered(self.says(made.arm), trial.key)]
            store.trials.finish(
                study_id, trial.key, made.finals, {"reward_mean": curve, **scores}, evidence=evidence, episodes=kept
            )
        for record in ending.verdicts:
            ruled = record.model_copy(update={"verdict": self.verdict(record.verdict)})
            store.verdicts.record(study_id, plan.stages[-1].id, ruled)
        store.budgets.spend(study_id, "wall_s", "all", TRIAL_S * len(ending.records))
        store.studies.set_status(study_id, StudyStatus.DONE, "all trials have ended")
        return Rest(ended=True, reason="done")

    async def wind_up(self, study_id: str) -> None:
        """Free the study, as whoever finishes what its worker left."""
        with owned_now(self._store, study_id):
            self.wound_up.append(study_id)

    def verdict(self, found: Verdict) -> Verdict:
        return found


def answered(text: str, key: str) -> SampledEpisode:
    """A sampled episode with one call that answers this."""
    [first, *_] = an_episode().sampled
    call = first.model_copy(update={"answer": {"role": "assistant", "content": text}})
    return an_episode(f"ep-{key}", kind="eval", step=20, calls=1, sampled=(call,))


class MadeUpCampaign:
    """A campaign on the simulation instrument, its store and its loop. further: other instruments, and what arms are worth there;
    written: those of them that an LLM wrote."""

    def __init__(
        self,
        folder: Path,
        worth: Worth = steep,
        *,
        strategist: Strategist | None = None,
        url: str | None = None,
        clock: ManualClock | None = None,
        engine: str = "local",
        further: Mapping[str, Worth] | None = None,
        written: Collection[str] = (),
        sigma: float = 0.06,
        **fields: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.folder = folder
        self.store = Store.open(url or f"sqlite:///{folder}/records.sqlite", clock=self.clock)
        self.planner = Bench(*(another(name, author="some-llm" if name in written else None) for name in further or {}))
        self.strategist = strategist or BuiltinStrategist()
        self.runner = RecordedStudies(self.store, worth, self.clock, sigma=sigma, engine=engine)
        self.runner.elsewhere = dict(further or {})
        asked = CampaignGoal.model_validate(
            {
                **goal(list(self.planner.folders)).document(),
                "factors": ["learning_rate", "temperature"],
                **fields,
            }
        )
        aim, *others = aims_of(asked, [folder.instrument for folder in self.planner.folders.values()])
        timetable = Timetable.of(asked.schedule.windows, asked.schedule.days, self.clock.now(), zone="UTC")
        schedule: Mapping[str, Any] = {"timetable": timetable.model_dump(mode="json"), "carried": True}
        self.id = self.store.campaigns.create(
            asked.document(),
            aim.model_dump(mode="json"),
            StudyOptions(engine=engine),
            schedule,
            [joining(each, None) for each in others],
        )
        self.write: InstrumentWriter | None = None
        self.told: list[str] = []
        self.notices: list[Notice] = []

    async def carry_out(self) -> CampaignOutcome:
        """What is left of it."""
        loop = CampaignLoop(
            self.store,
            self.strategist,
            self.planner,
            self.runner,
            self.runner.wind_up,
            self.clock,
            self.folder,
            self.told.append,
            self.notices.append,
            self.write,
        )
        return await loop.carry_out(self.id)
