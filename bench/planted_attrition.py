"""Plants lost attempts at episodes in null studies: losses at random, or of one arm's wrong answers.

Each trial needs as many rewards as a real one, and lost attempts are repeated: the losses of a trial are those that occur before
its last reward. If wrong answers are lost, the mean of the others rises; without the sentinel `attrition` that would look like an
effect.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from bench.made_up_studies import World, instrument, simulate
from foundation.ids import derived_seed
from researcher.design.planning import plan_of
from researcher.models import Attrition, EpisodeAttempts
from researcher.study.plan import Plan, Verdict
from researcher.study.spec import Compared, SeedRange, StudySpec
from swarm.protocol.episodes import Cause

TRAINED, HELD_OUT = 8 * 4 * 8, 2 * 12
"""Rewards of a trial: 8 steps of 4 tasks with 8 episodes each; 12 held-out tasks before and after."""
MOST_FALSE, MOST_FLAGGED, LEAST_CAUGHT = 0.05, 0.05, 0.95
BARS = {
    "null_supported_rate": (0.0, MOST_FALSE),
    "selective_caught": (LEAST_CAUGHT, 1.0),
    "random_flagged": (0.0, MOST_FLAGGED),
}
ERROR = 0.05
"""Joint error rate of the exact intervals of all judged rates."""
_LEVEL = 0.5
"""Mean reward without an effect; rewards are 0 or 1."""
_LEVELS = (2e-5, 4e-5, 8e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """background: share of all arms' attempts that is lost at random. spread: its correlation within a trial (0: equal in all
    trials). bursts: share of trials whose client loses another third of its attempts. selective: share of the last arm's attempts
    that is lost, all of them wrong answers. judged: whether `selective_caught` has to reach its bar."""

    background: float
    spread: float = 0.0
    bursts: float = 0.0
    selective: float = 0.0
    seeds: int = 6
    levels: int = 1
    looks: int = 1
    judged: bool = True


SETTINGS = (
    Setting(background=0.0),
    *(Setting(background=rate, spread=spread) for rate in (0.05, 0.1, 0.2, 0.3) for spread in (0.0, 0.05)),
    Setting(background=0.02, bursts=0.15),
    Setting(background=0.1, spread=0.05, seeds=3),
    Setting(background=0.1, spread=0.02, seeds=4),
    Setting(background=0.1, spread=0.02, levels=3),
    Setting(background=0.1, spread=0.02, looks=3, seeds=9),
    *(Setting(background=rate, selective=0.1) for rate in (0.0, 0.02, 0.05)),
    *(Setting(background=rate, spread=0.01, selective=0.1) for rate in (0.02, 0.05)),
    *(Setting(background=0.05, selective=0.1, seeds=seeds, judged=seeds > 3) for seeds in (3, 4)),
    Setting(background=0.05, selective=0.1, levels=3),
    *(Setting(background=0.05, spread=0.02, selective=share) for share in (0.2, 0.3)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyWorld(World):
    """A world whose trials lose attempts as the setting says. biased: the arm that loses wrong answers."""

    setting: Setting
    biased: str

    def reward(self, arm: str, seed: int) -> float:
        right = self._right(arm, seed)
        return right / (1 - self._selective(arm, right))

    def attrition(self, arm: str, seed: int) -> Attrition:
        draw = np.random.default_rng(derived_seed(self.seed, "lost", arm, seed))
        setting, selective = self.setting, self._selective(arm, self._right(arm, seed))
        background = _beta(draw, setting.background, setting.spread)
        burst = 1 / 3 if draw.random() < setting.bursts else 0.0
        kept = (1 - background) * (1 - burst) * (1 - selective)
        return Attrition(train=_lost(draw, TRAINED, kept, burst), eval=_lost(draw, HELD_OUT, kept, burst))

    def _right(self, arm: str, seed: int) -> float:
        """Share of right answers."""
        return float(np.clip(_LEVEL + World.reward(self, arm, seed), 0.05, 0.95))

    def _selective(self, arm: str, right: float) -> float:
        """Share of attempts lost because they were wrong; proportional to the share of wrong answers."""
        return self.setting.selective * (1 - right) / (1 - _LEVEL) if arm == self.biased else 0.0


def _beta(draw: np.random.Generator, mean: float, correlation: float) -> float:
    if not correlation or not mean:
        return mean
    size = 1 / correlation - 1
    return min(0.9, float(draw.beta(mean * size, (1 - mean) * size)))


def _lost(draw: np.random.Generator, rewards: int, kept: float, burst: float) -> EpisodeAttempts:
    count = int(draw.negative_binomial(rewards, kept)) if kept < 1 else 0
    cause = Cause.CLIENT if burst else Cause.ROLLOUT
    return EpisodeAttempts(attempts=rewards + count, lost={cause: count} if count else {})


@dataclass(slots=True)
class Losses:
    """Outcome counts of the studies of one setting."""

    studies: int = 0
    supported: int = 0
    flagged: int = 0
    """Studies flagged by the difference test although both sides lose attempts alike."""
    caught: int = 0
    """Studies caught by either rule, in the comparison with the arm that loses wrong answers."""
    over_limit: int = 0
    """Studies in which an arm lost more than the limit."""
    bare: int = 0
    """Studies that would be `supported` without the sentinel."""
    attempts: Counter[str] = field(default_factory=Counter)
    """Attempts of all trials by kind, and the number of trials."""


async def run_setting(setting: Setting, studies: int, draw: np.random.Generator) -> Losses:
    """Plan one study and run it in `studies` worlds."""
    spec = StudySpec(
        question="Does another learning rate give a higher final reward than 1e-5?",
        instrument="simulation",
        compare={"learning_rate": Compared(baseline=1e-5, levels=_LEVELS[: setting.levels])},
        metric="final_reward",
        claim="increase",
        seeds=SeedRange(min=setting.seeds, max=setting.seeds),
        looks=setting.looks,
    )
    plan = plan_of(spec, instrument(), allow_underpowered=True)
    tally = Losses()
    for _ in range(studies):
        sigma = float(np.exp(draw.uniform(np.log(0.03), np.log(0.10))))
        world = LossyWorld(
            means={},
            sigma=sigma,
            seed=int(draw.integers(2**31)),
            setting=setting,
            biased=plan.arms[-1].name if setting.selective else "",
        )
        _add(tally, plan, world)
    return tally


def _add(tally: Losses, plan: Plan, world: LossyWorld) -> None:
    ending = simulate(plan, world)
    biased = {one.id for one in plan.hypotheses if world.biased in one.sides}
    own = [finding for finding in ending.findings if finding.name == "attrition" and finding.severity == "invalid"]
    differs = [finding for finding in own if "more often" in finding.text]
    tally.studies += 1
    tally.supported += any(record.verdict is Verdict.SUPPORTED for record in ending.verdicts)
    tally.flagged += any(set(finding.hypotheses) - biased for finding in differs)
    tally.caught += any(set(finding.hypotheses) & biased for finding in own)
    tally.over_limit += len(own) > len(differs)
    for record in ending.records:
        counts = record.evidence.attrition if record.evidence is not None else None
        if counts is not None:
            tally.attempts.update(train=counts.train.attempts, eval=counts.eval.attempts, trials=1)
    if world.biased:
        watched = tuple(name for name in plan.sentinels if name != "attrition")
        bare = simulate(plan.model_copy(update={"sentinels": watched}), world)
        tally.bare += any(record.verdict is Verdict.SUPPORTED for record in bare.verdicts)


def line_of(setting: Setting, tally: Losses, seconds: float) -> dict[str, object]:
    trials = max(1, tally.attempts["trials"])
    return {
        "attrition": "selective" if setting.selective else "random",
        **{
            name: getattr(setting, name)
            for name in ("background", "spread", "bursts", "selective", "seeds", "levels", "looks")
        },
        "studies": tally.studies,
        "attempts_per_trial": {kind: round(tally.attempts[kind] / trials, 1) for kind in ("train", "eval")},
        **{name: round(hits / n, 4) for name, (hits, n) in rates_of(setting, tally).items()},
        "intervals": {
            name: [round(bound, 4) for bound in exact_interval(hits, n)]
            for name, (hits, n) in rates_of(setting, tally).items()
        },
        "pass": not _missed(setting, tally),
        "over_limit_rate": round(tally.over_limit / tally.studies, 4),
        **({"supported_without_sentinel": round(tally.bare / tally.studies, 4)} if setting.selective else {}),
        "seconds": round(seconds, 1),
    }


def rates_of(setting: Setting, tally: Losses) -> dict[str, tuple[int, int]]:
    """Hits and studies by name. With several levels, comparisons whose sides lose alike can be flagged in addition to a caught one."""
    found = {"null_supported_rate": (tally.supported, tally.studies)}
    if setting.selective:
        found["selective_caught"] = (tally.caught, tally.studies)
    if not setting.selective or setting.levels > 1:
        found["random_flagged"] = (tally.flagged, tally.studies)
    return found


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """Exact Clopper-Pearson interval of a rate, Bonferroni-adjusted so that all judged rates hold jointly at 1 - `ERROR`."""
    rates = sum(len(_judged(setting, Losses())) for setting in SETTINGS)
    found = stats.binomtest(hits, n).proportion_ci(1 - ERROR / rates, method="exact")
    return float(found.low), float(found.high)


def _judged(setting: Setting, tally: Losses) -> dict[str, tuple[int, int]]:
    rates = rates_of(setting, tally)
    return {name: rate for name, rate in rates.items() if setting.judged or name != "selective_caught"}


def _missed(setting: Setting, tally: Losses) -> list[str]:
    """Bars outside the exact interval of their rate."""
    missed = []
    for name, (hits, n) in _judged(setting, tally).items():
        bounds = exact_interval(hits, n)
        if bounds[1] < BARS[name][0] or bounds[0] > BARS[name][1]:
            missed.append(f"{name} of {setting}: {hits} of {n}, exact interval {bounds[0]:.4f} to {bounds[1]:.4f}")
    return missed


def judged(results: Sequence[tuple[Setting, Losses]]) -> tuple[dict[str, object], list[str]]:
    """The summary line, with the worst judged rate of each name, and the missed bars."""
    worst: dict[str, float] = {}
    for setting, tally in results:
        for name, (hits, n) in _judged(setting, tally).items():
            pick = min if BARS[name][0] else max
            worst[name] = pick(worst.get(name, hits / n), hits / n)
    missed = [each for setting, tally in results for each in _missed(setting, tally)]
    summary: dict[str, object] = {
        "bench": "false_positives",
        "part": "attrition",
        "studies": sum(tally.studies for _, tally in results),
        "worst": {name: round(rate, 4) for name, rate in worst.items()},
        "pass": not missed,
        "missed": missed,
    }
    return summary, missed


async def measure(studies: int, draw: np.random.Generator) -> int:
    """Print a line per setting and the summary; returns 1 when a bar was missed. studies: number per setting."""
    results: list[tuple[Setting, Losses]] = []
    for setting in SETTINGS:
        began = time.monotonic()
        results.append((setting, await run_setting(setting, studies, draw)))
        print(json.dumps(line_of(*results[-1], time.monotonic() - began)), flush=True)
    summary, missed = judged(results)
    print(json.dumps(summary), flush=True)
    return 1 if missed else 0
