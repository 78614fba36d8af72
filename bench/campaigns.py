"""Do campaigns claim only what is true, and do they find the effects that exist?

Simulated campaigns with a known truth. The real code plans, judges, ranks and decides; random trials take the place of servers.
Eight factors of the simulation instrument, each with its levels; rewards are in margins.

    null       no factor does anything: every claim is false
    null_twin  the same with two instruments in one campaign
    planted    two of the eight matter, each best at one of its levels, with an interaction between them; the best setting is three
               steps of search away from the default

Strategists: `builtin`; `llm`, which asks an LLM simulated by `bench.hasty_llm`; `chaser`, which immediately confirms whatever looks
best, again and again, as often as the budget allows; `random`, which draws settings at random and confirms the best; `oneshot`, one
frozen plan: a screen, then one comparison. Bars: `false_claims` at most 5 % (a rate fails only when its exact binomial interval excludes the bar);
`found`, the best setting or one within a margin of it, confirmed or named best, in at least 80 % of planted worlds; the mean regret at
equal cost below those of `random` and `oneshot`. Seeds are drawn at run time and printed; `--seed` repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.command import run
from bench.false_positives import exact_interval
from bench.hasty_llm import HastyLlm
from bench.made_up_studies import World, another, instrument, simulate
from foundation.arguments import count, whole
from foundation.clock import ManualClock
from foundation.ids import derived_seed
from researcher.campaign.builtin import BuiltinStrategist, arm_name, proposals, words_of
from researcher.campaign.deciding import written
from researcher.campaign.goal import Aim, CampaignBudget, CampaignGoal, Objective, aims_of, changed, default_levels
from researcher.campaign.graph import decide
from researcher.campaign.llm.strategist import LlmStrategist
from researcher.campaign.proposals import NewHypothesis, Proposal
from researcher.campaign.records import JOINED, joining, seen_of
from researcher.campaign.seen import Levels, Seen, StudySeen, View, study_seen
from researcher.campaign.strategist import Strategist, StrategistFailed
from researcher.design.planning import plan_of
from researcher.design.pricing import Price, price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Instrument
from researcher.llm.endpoint import LlmSettings
from researcher.models import (
    CampaignEvent,
    CampaignRecord,
    CampaignStatus,
    DecisionRecord,
    Finding,
    HypothesisRecord,
    LlmCall,
    Role,
    SampledEpisode,
    StudyStatus,
    TrialRecord,
)
from researcher.study.plan import ALPHA, Plan
from researcher.study.spec import StudySpec

FACTORS = ("learning_rate", "group_size", "tasks_per_step", "temperature", "max_tokens", "entropy", "kl", "epochs")
TRIALS, MARGIN = 240, 0.1
MOST_FALSE, LEAST_FOUND = 0.05, 0.80
IN_NULL = {"null": ("builtin", "llm", "chaser"), "null_twin": ("builtin", "chaser")}
IN_PLANTED = ("builtin", "llm", "random", "oneshot")
"""Strategists that run in each world."""
STRATEGISTS = sorted({*IN_PLANTED, *itertools.chain(*IN_NULL.values())})


@dataclass(frozen=True, slots=True)
class Truth:
    """True value of every setting, in margins above the default. best: by factor, signed offset of its best level from the default, in steps."""

    aim: Aim
    best: Mapping[str, int]
    sigma: float
    seed: int

    def worth(self, levels: Levels) -> float:
        """Value of a setting; 0 at the default. Each factor that matters peaks at its best level; both together are worth more."""
        found, shares = 0.0, []
        for name, target in self.best.items():
            factor = self.aim.factor(name)
            step = factor.levels.index(levels.get(name, factor.default)) - factor.place
            shares.append(max(-1.0, 1 - abs(step - target) / max(1, abs(target))))
            found += 1.5 * shares[-1]
        if len(shares) > 1:  # the interaction: half of the gain needs both factors at their best
            found += 2.0 * max(0.0, shares[0]) * max(0.0, shares[1])
        return found

    def peak(self) -> float:
        names = list(self.best)
        ladders = [self.aim.factor(name).levels for name in names]
        return max(
            (self.worth(dict(zip(names, levels, strict=True))) for levels in itertools.product(*ladders)), default=0.0
        )


def truth_of(kind: str, aim: Aim, draw: np.random.Generator) -> Truth:
    sigma = MARGIN * float(draw.uniform(0.5, 1.0))
    if kind in IN_NULL:
        return Truth(aim, {}, sigma, int(draw.integers(2**31)))
    names = [
        str(name)
        for name in draw.choice([f.name for f in aim.factors if f.ordered and len(f.levels) > 3], 2, replace=False)
    ]
    best = {}
    for name in names:
        factor = aim.factor(name)
        reach = [step - factor.place for step in range(len(factor.levels)) if step != factor.place]
        best[name] = int(draw.choice(reach))
    return Truth(aim, best, sigma, int(draw.integers(2**31)))


class Bench:
    """Plans simulated studies with the real planner, on the simulation instrument and others. folders: instruments by name, in order."""

    def __init__(self, *further: InstrumentFolder) -> None:
        self.folders = {folder.instrument.name: folder for folder in (instrument(), *further)}

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        folder = self.folders[spec.instrument]
        plan = plan_of(spec, folder, alpha=ALPHA if alpha is None else alpha, planned_effect=expects)
        return plan, price_of(plan, folder.instrument, servers=1)


@dataclass(slots=True)
class DrawnEvidence:
    """`Evidence` with random trials for a simulated campaign. ran: trials by study."""

    planner: Bench
    ran: dict[str, list[TrialRecord]] = field(default_factory=dict)

    def instrument(self, name: str) -> Instrument:
        return self.planner.folders[name].instrument

    def trials(self, study: str) -> list[TrialRecord]:
        return self.ran[study]

    def samples(self, study: str) -> dict[str, list[SampledEpisode]]:
        return {}

    def findings(self) -> Sequence[Finding]:
        return ()


class Chaser:
    """Immediately confirms whatever looks best on any instrument, and retries failed confirmations. Honesty rules exist to stop this."""

    name = "chaser"

    def __init__(self) -> None:
        self._screens: list[Proposal] = []

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        if not seen.studies:
            self._screens = proposals(seen)
        for view in seen.views:
            if not view.studies:
                return [each.model_copy(update={"instrument": view.instrument}) for each in self._screens]
        looks = [
            (seen.aim.sign * mean, view, levels)
            for view in seen.views
            for levels, _, mean in view.measured().values()
            if levels != view.incumbent
        ]
        if not looks:
            return [Proposal(action="conclude", because="nothing is left", words="nothing is left")]
        _, view, levels = max(looks, key=lambda look: look[0])
        return [_confirm(view, levels), Proposal(action="conclude", because="the budget is spent", words="done")]

    def calls(self) -> list[LlmCall]:
        return []


class Random:
    """Draws settings at random, then confirms the best of them."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        end = Proposal(action="conclude", because="the budget is spent", words="done")
        if any(study.confirms for study in seen.studies):
            return [end]
        arms: dict[str, dict[str, object]] = {"default": {}}
        for _ in range(7):
            levels = {f.name: f.levels[int(self._draw.integers(len(f.levels)))] for f in seen.aim.factors}
            arms[arm_name(seen.aim, levels)] = dict(changed(seen.aim, levels))
        explore = Proposal(
            action="explore",
            because="settings drawn at random",
            spec={"design": "screen", "arms": arms, "seeds": {"min": 2}},
            hypothesis=NewHypothesis(claim="one is better", prediction="one is better", kill_if="none is"),
        )
        ranked = sorted(seen.on().measured().values(), key=lambda each: -each[2])
        if len(seen.studies) < 6:
            return [explore, end]
        return [_confirm(seen.on(), ranked[0][0]), end]

    def calls(self) -> list[LlmCall]:
        return []


class OneShot:
    """A single frozen plan: one screen, then the setting that it points to, compared with the default."""

    name = "oneshot"

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        end = Proposal(action="conclude", because="one plan", words="done")
        if not seen.studies:
            return proposals(seen)
        if len(seen.studies) > 1:
            return [end]
        screen = seen.studies[0]
        levels = {
            effect.factor: next(arm.levels[effect.factor] for arm in screen.arms if effect.factor in arm.levels)
            for effect in screen.effects
            if effect.low > 0
        }
        return [_confirm(seen.on(), levels), end] if levels else [end]

    def calls(self) -> list[LlmCall]:
        return []


def _confirm(view: View, levels: Levels) -> Proposal:
    return Proposal(
        action="confirm",
        because=f"{words_of(dict(levels))} looks best",
        instrument=view.instrument,
        spec={
            "design": "compare",
            "arms": {"default": {}, arm_name(view.aim, {**default_levels(view.aim), **levels}): dict(levels)},
            "seeds": {"min": 3, "max": 60},
        },
        hypothesis=NewHypothesis(claim="it is better", prediction="it is", kill_if="it is not"),
    )


@dataclass(slots=True)
class Campaign:
    """One simulated campaign and its result."""

    record: CampaignRecord
    truth: Truth
    joined: Sequence[CampaignEvent]
    evidence: DrawnEvidence
    failure: str = ""
    """Why the strategist failed; empty if the campaign was concluded."""
    decisions: list[DecisionRecord] = field(default_factory=list)
    hypotheses: dict[str, HypothesisRecord] = field(default_factory=dict)
    studies: list[StudySeen] = field(default_factory=list)

    @property
    def seen(self) -> Seen:
        hypotheses = list(self.hypotheses.values())
        return seen_of(self.record, len(self.decisions) + 1, self.studies, hypotheses, self.joined, self.decisions)

    async def run(self, strategist: Strategist, planner: Bench) -> None:
        """Run the campaign until it concludes or the strategist fails."""
        while True:
            seen = self.seen
            try:
                decided = await decide(seen, strategist, planner)
            except StrategistFailed as error:
                self.failure = str(error)
                return
            if decided.step is None:
                raise RuntimeError("; ".join(decided.problems))
            calls, shipped = strategist.calls(), dict.fromkeys(planner.folders)
            add = written(self.record, seen, decided, strategist.name, calls, list(self.hypotheses.values()), shipped)
            decision = add.decision.model_copy(update={"study_id": None if add.study is None else f"s{seen.seq}"})
            self.decisions.append(decision)
            self.hypotheses |= {each.id: each for each in add.hypotheses}
            if decision.plan is None:
                return
            self.studies.append(self._carried_out(decision, Plan.model_validate_json(decision.plan), seen))

    def _carried_out(self, decision: DecisionRecord, plan: Plan, seen: Seen) -> StudySeen:
        factors = {factor.name for factor in self.truth.aim.factors}
        means = {
            arm.name: MARGIN * self.truth.worth({n: level for n, level in arm.levels.items() if n in factors})
            for arm in plan.arms
        }
        world = World(means=means, sigma=self.truth.sigma, seed=derived_seed(self.truth.seed, decision.seq))
        ending = simulate(plan, world)
        self.evidence.ran[f"s{decision.seq}"] = list(ending.records)
        spent = {"wall_s": float(len(ending.records))}
        return study_seen(
            decision,
            seen.on(plan.instrument).aim,
            plan,
            ending.records,
            ending.verdicts,
            status=StudyStatus.DONE,
            reason="all trials have ended",
            spent=spent,
            instrument=seen.on(plan.instrument).key,
        )

    @property
    def claims(self) -> list[StudySeen]:
        return [study for study in self.studies if study.supports]

    def is_false(self) -> bool:
        """Whether it claims an improvement that does not exist."""
        return any(
            self.truth.worth(study.arm(study.effects[0].treatment).levels)
            <= self.truth.worth(study.arm(study.effects[0].baseline).levels)
            for study in self.claims
        )

    def chosen(self) -> Levels:
        """The recommended setting: the incumbent."""
        return self.seen.on().incumbent

    def regret(self) -> float:
        """Distance of the recommendation from the best setting, in margins."""
        return self.truth.peak() - self.truth.worth(self.chosen())


def goal(instruments: Sequence[str]) -> CampaignGoal:
    return CampaignGoal(
        goal="Find what makes the reward highest",
        instruments=tuple(instruments),
        objective=Objective(metric="final_reward", direction="increase", margin=MARGIN),
        factors=dict.fromkeys(FACTORS, ()),
        budget=CampaignBudget(trials=TRIALS),
    )


async def campaign(kind: str, name: str, seed: int, planner: Bench) -> Campaign:
    asked = goal(list(planner.folders))
    aim, *others = aims_of(asked, [folder.instrument for folder in planner.folders.values()])
    truth = truth_of(kind, aim, np.random.default_rng(seed))
    record = CampaignRecord(
        id=f"ca-{seed}",
        goal=asked.document(),
        aim=aim.model_dump(mode="json"),
        status=CampaignStatus.RUNNING,
        created_at=0.0,
        updated_at=0.0,
    )
    joined = [
        CampaignEvent(seq=n, campaign_id=record.id, at=0.0, kind=JOINED, detail=joining(other, None))
        for n, other in enumerate(others, 1)
    ]
    found = Campaign(record, truth, joined, DrawnEvidence(planner))
    await found.run(_strategist(name, seed, planner, found.evidence), planner)
    return found


def _strategist(name: str, seed: int, planner: Bench, evidence: DrawnEvidence) -> Strategist:
    if name == "llm":
        settings, llm = LlmSettings(model="hasty"), HastyLlm(derived_seed(seed, "llm"))
        return LlmStrategist(llm, settings, ManualClock(), planner=planner, evidence=evidence, checkpoints=None)
    if name == "random":
        return Random(seed)
    made: dict[str, Callable[[], Strategist]] = {"builtin": BuiltinStrategist, "chaser": Chaser, "oneshot": OneShot}
    return made[name]()


def say(**fields: object) -> None:
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.campaigns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--null", type=whole(0), default=300, metavar="N", help="campaigns in null worlds, by strategist"
    )
    parser.add_argument(
        "--planted", type=whole(0), default=100, metavar="N", help="campaigns in planted worlds, by strategist"
    )
    parser.add_argument(
        "--strategist",
        action="append",
        choices=STRATEGISTS,
        help="only this one; repeatable (default: all)",
    )
    parser.add_argument("--seed", type=count, default=None)
    args = parser.parse_args()
    seed = args.seed or secrets.randbelow(10**9)
    wanted = args.strategist or STRATEGISTS
    planner, failed = Bench(), list[str]()
    planners = {"null": planner, "null_twin": Bench(another("twin"))}
    false: dict[str, float] = {}
    for kind, name in [
        (kind, name) for kind, names in IN_NULL.items() for name in names if name in wanted and args.null
    ]:
        ran, took_s = played(kind, name, seed, args.null, planners[kind])
        hits = sum(each.is_false() for each in ran)
        low, high = exact_interval(hits, len(ran))
        false[f"{kind} {name}"] = hits / len(ran)
        failed += [f"false claims of {name} in {kind}"] if low > MOST_FALSE else []
        confirmations = sum(sum(s.confirms for s in each.studies) for each in ran) / len(ran)
        say(
            world=kind, strategist=name, campaigns=len(ran), false_claims=hits / len(ran), low=low, high=high, confirmations=confirmations,
            given_up=sum(bool(each.failure) for each in ran), s=took_s,
        )  # fmt: skip
    regrets: dict[str, float] = {}
    found: dict[str, float] = {}
    for name in [each for each in IN_PLANTED if each in wanted and args.planted]:
        ran, took_s = played("planted", name, seed, args.planted, planner)
        regrets[name] = float(np.mean([each.regret() for each in ran]))
        hits = sum(each.regret() <= 1.0 for each in ran)
        low, high = exact_interval(hits, len(ran))
        found[name] = hits / len(ran)
        trials = float(np.mean([sum(s.trials for s in each.studies) for each in ran]))
        say(
            world="planted", strategist=name, campaigns=len(ran), found=hits / len(ran), low=low, high=high, regret=regrets[name],
            trials=trials, false_claims=sum(each.is_false() for each in ran) / len(ran),
            given_up=sum(bool(each.failure) for each in ran), s=took_s,
        )  # fmt: skip
        failed += ["found"] if name == "builtin" and high < LEAST_FOUND else []
    own, others = (
        regrets.get("builtin", math.nan),
        {name: regrets.get(name, math.nan) for name in ("random", "oneshot")},
    )
    failed += [f"regret against {name}" for name, regret in others.items() if own >= regret]
    say(
        bench="campaigns",
        seed=seed,
        false_claims=max(false.values(), default=math.nan),
        found=found.get("builtin", math.nan),
        regret_vs_random=own / others["random"],
        regret_vs_oneshot=own / others["oneshot"],
        failed=failed,
    )
    return 1 if failed else 0


def played(kind: str, name: str, seed: int, count: int, planner: Bench) -> tuple[list[Campaign], float]:
    """Run `count` campaigns; returns them and the mean seconds per campaign."""
    began = time.perf_counter()
    ran = [asyncio.run(campaign(kind, name, derived_seed(seed, kind, n), planner)) for n in range(count)]
    return ran, (time.perf_counter() - began) / count


if __name__ == "__main__":
    sys.exit(run(main))
