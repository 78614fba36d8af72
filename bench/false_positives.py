"""How often does a study claim an effect that does not exist, miss one that does, or report an interval without the truth?

Studies with a known truth. The built-in planner plans them from topics and the real statistics decide them; 200 of 2,000 also go
through the whole executor (with a simulated server and an injected clock). Seeds are drawn at run time and printed; `--seed` repeats.

    two        two arms
    several    four levels of one factor, Holm's adjustment
    race       eight levels: successive halving, the best confirmed on fresh seeds
    looks      two arms, looked at twice, alpha spent over the looks
    fine       two arms, and then Optuna between them, the best confirmed on fresh seeds
    then       four levels of one factor, then three of another at the level that goes on, on fresh seeds
    border     two arms that differ by exactly the margin: called equivalent in at most 5 %

Then, with `--lossy` studies of each setting (bench/planted_attrition.py), null studies of which attempts at episodes are lost: at
random, in all arms alike (`random_flagged`: how often the sentinel's difference test takes a verdict; its limit on the share that an
arm may lose is scored apart), or the wrong answers of one arm (`selective_caught`). Bars: `null_supported_rate` at most 5 % in each setting,
`random_flagged` at most 5 %, a tenth of one arm's attempts over a background of up to 5 % caught at least 95 %.

The noise differs from study to study. Bars: null studies `supported` at most 5 %; studies with the planned effect `supported`
at least 80 %, those refused as underpowered counted as missed; 95 % intervals cover the truth 93 to 97 %. A rate fails its bar only when its
exact binomial interval excludes it. Exit code 1 when one does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from bench import planted_attrition
from bench.command import run
from bench.made_up_studies import Ending, Laboratory, World, instrument, simulate
from foundation.arguments import count, whole
from researcher.design.planning import plan_of
from researcher.study.plan import Plan, Verdict
from researcher.study.spec import Compared, StudySpec

CONFIDENCE = 0.99
"""Confidence level of each rate's exact binomial interval."""
RACE_FROM = 4
"""A design with at least this many treatments against one baseline is a race."""
MOST_FALSE, LEAST_POWER, COVERAGE = 0.05, 0.80, (0.93, 0.97)
_LEVELS = ("2e-5", "4e-5", "8e-5", "1.6e-4", "3.2e-4", "6.4e-4", "0.001")


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One kind of study. effect: of the last level, in margins; 0 for null studies. share: of all studies.

    then: levels of a second factor, the last of which has the same effect. Power refers to the first comparison.
    """

    name: str
    levels: tuple[str, ...]
    effect: float
    share: float
    sigma: tuple[float, float] = (0.03, 0.10)
    looks: int = 1
    fine: int = 0
    then: tuple[str, ...] = ()
    whole: float = 0.02
    """Share of these studies that go through the whole executor."""


DESIGNS = (
    Design(name="two", levels=_LEVELS[:1], effect=0.0, share=0.20, whole=0.22),
    Design(name="two", levels=_LEVELS[:1], effect=1.5, share=0.20, whole=0.22),
    Design(name="border", levels=_LEVELS[:1], effect=1.0, share=0.10),
    Design(name="several", levels=_LEVELS[:3], effect=0.0, share=0.08),
    Design(name="several", levels=_LEVELS[:3], effect=1.5, share=0.08),
    Design(name="race", levels=_LEVELS, effect=0.0, share=0.06, sigma=(0.03, 0.06)),
    Design(name="race", levels=_LEVELS, effect=1.5, share=0.06, sigma=(0.03, 0.06)),
    Design(name="looks", levels=_LEVELS[:1], effect=0.0, share=0.05, looks=2),
    Design(name="looks", levels=_LEVELS[:1], effect=1.5, share=0.05, looks=2),
    Design(name="then", levels=_LEVELS[:3], effect=0.0, share=0.05, then=("0.7", "1.0", "1.3")),
    Design(name="then", levels=_LEVELS[:3], effect=1.5, share=0.05, then=("0.7", "1.0", "1.3")),
    Design(name="fine", levels=("0.001",), effect=0.0, share=0.02, sigma=(0.03, 0.06), fine=3),
)


@dataclass(slots=True)
class Tally:
    """Outcome counts for one kind of study."""

    studies: int = 0
    whole: int = 0
    supported: int = 0
    equivalent: int = 0
    underpowered: int = 0
    trials: int = 0
    intervals: int = 0
    covered: int = 0
    methods: Counter[str] = field(default_factory=Counter)

    def add(self, plan: Plan, world: World, ending: Ending, target: str | None) -> None:
        """Count one study. target: the treatment that has the effect; None in null studies, where every treatment counts."""
        self.studies += 1
        self.trials += ending.trials
        self.underpowered += ending.action == "underpowered"
        treatments = {hypothesis.id: hypothesis for hypothesis in plan.hypotheses}
        found = {
            kind: [
                record
                for record in ending.verdicts
                if record.verdict is kind and target in (None, treatments[record.hypothesis].treatment)
            ]
            for kind in (Verdict.SUPPORTED, Verdict.EQUIVALENT)
        }
        self.supported += bool(found[Verdict.SUPPORTED])
        self.equivalent += bool(found[Verdict.EQUIVALENT])
        for record in ending.verdicts:
            effect, hypothesis = record.effect, treatments[record.hypothesis]
            if effect is not None and math.isclose(effect.level, 0.95):
                truth = world.difference(hypothesis.baselines, hypothesis.treatments)
                self.intervals += 1
                self.covered += effect.low <= truth <= effect.high
                self.methods[effect.method] += 1


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """Exact interval of a rate, by Clopper and Pearson."""
    found = stats.binomtest(hits, n).proportion_ci(CONFIDENCE, method="exact")
    return float(found.low), float(found.high)


def spec_of(design: Design) -> StudySpec:
    """Compare a learning rate of 1e-5 with the design's levels. Many levels race; a second factor follows in sequence."""
    compare = {"learning_rate": Compared(baseline=1e-5, levels=tuple(map(float, design.levels)))}
    if design.then:
        compare["temperature"] = Compared(levels=tuple(map(float, design.then)))
    return StudySpec(
        question="Does another learning rate give a higher final reward than 1e-5?",
        instrument="simulation",
        compare=compare,
        design="sequence" if design.then else "race" if len(design.levels) >= RACE_FROM else "compare",
        metric="final_reward",
        claim="increase",
        looks=design.looks,
        fine=design.fine,
    )


async def run_design(design: Design, studies: int, draw: np.random.Generator, laboratory: Laboratory) -> Tally:
    """Plan and carry out `studies` studies of a design."""
    tally = Tally()
    spec, folder = spec_of(design), instrument()
    for number in range(studies):
        plan = plan_of(spec, folder)
        best = f"learning_rate={design.levels[-1]}" + (",temperature=1" if design.then else "")
        if best not in {arm.name for arm in plan.arms}:
            raise RuntimeError(f"the plan has no arm {best!r}, but {[arm.name for arm in plan.arms]}")
        good = {
            "learning_rate": float(design.levels[-1]),
            "temperature": float(design.then[-1]) if design.then else None,
        }
        low, high = design.sigma
        sigma = math.exp(draw.uniform(math.log(low), math.log(high)))
        margin = plan.hypotheses[0].margin
        means = {
            arm.name: design.effect * margin * sum(level == good[factor] for factor, level in arm.levels.items())
            for arm in plan.arms
        }
        world = World(means=means, sigma=sigma, seed=int(draw.integers(2**31)))
        whole = number < math.ceil(design.whole * studies)
        ending = await laboratory.carry_out(plan, world) if whole else simulate(plan, world)
        tally.whole += whole
        tally.add(plan, world, ending, best if design.effect else None)
    return tally


def line_of(design: Design, tally: Tally, seconds: float) -> dict[str, object]:
    hits = tally.equivalent if design.name == "border" else tally.supported
    return {
        "design": design.name,
        "effect_margins": design.effect,
        "studies": tally.studies,
        "whole_executor": tally.whole,
        "equivalent_rate" if design.name == "border" else "supported_rate": round(hits / tally.studies, 4),
        "interval": [round(bound, 4) for bound in exact_interval(hits, tally.studies)],
        "underpowered": tally.underpowered,
        "trials_mean": round(tally.trials / tally.studies, 1),
        "covered": [tally.covered, tally.intervals],
        "methods": dict(tally.methods),
        "seconds": round(seconds, 1),
    }


def judged(results: Sequence[tuple[Design, Tally]]) -> tuple[dict[str, object], list[str]]:
    """The summary line, and the missed bars."""
    missed: list[str] = []

    def rate(name: str, hits: int, n: int, low: float, high: float) -> float:
        bounds = exact_interval(hits, n)
        if bounds[1] < low or bounds[0] > high:
            missed.append(f"{name}: {hits} of {n}, exact interval {bounds[0]:.4f} to {bounds[1]:.4f}")
        return round(hits / n, 4)

    nulls = [(design, tally) for design, tally in results if not design.effect]
    planned = [(design, tally) for design, tally in results if design.effect == 1.5]
    borders = [tally for design, tally in results if design.name == "border"]
    for design, tally in nulls:
        rate(f"{design.name}: false support", tally.supported, tally.studies, 0.0, MOST_FALSE)
    for design, tally in planned:
        rate(f"{design.name}: power", tally.supported, tally.studies, LEAST_POWER, 1.0)
    tallies = [tally for _, tally in results]
    summary: dict[str, object] = {
        "bench": "false_positives",
        "studies": sum(tally.studies for tally in tallies),
        "null_supported_rate": rate("false support", *_sums(nulls), 0.0, MOST_FALSE),
        "power": rate("power", *_sums(planned), LEAST_POWER, 1.0),
        "coverage": rate("coverage", sum(t.covered for t in tallies), sum(t.intervals for t in tallies), *COVERAGE),
        "false_equivalence_rate": rate(
            "false equivalence", sum(t.equivalent for t in borders), sum(t.studies for t in borders), 0.0, 0.05
        ),
    }
    return {**summary, "missed": missed}, missed


def _sums(results: Sequence[tuple[Design, Tally]]) -> tuple[int, int]:
    return sum(tally.supported for _, tally in results), sum(tally.studies for _, tally in results)


async def measure(studies: int, seed: int) -> int:
    """Print a line per design and the summary; returns 1 when a bar was missed."""
    draw = np.random.default_rng(seed)
    results: list[tuple[Design, Tally]] = []
    async with Laboratory() as laboratory:
        for design in DESIGNS:
            began = time.monotonic()
            tally = await run_design(design, max(1, round(design.share * studies)), draw, laboratory)
            results.append((design, tally))
            print(json.dumps(line_of(design, tally, time.monotonic() - began)), flush=True)
    summary, missed = judged(results)
    whole = sum(tally.whole for _, tally in results)
    print(json.dumps({**summary, "whole_executor": whole, "seed": seed}), flush=True)
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=count, default=2000, help="default %(default)s; one of each kind at least")
    parser.add_argument("--lossy", type=count, default=300, help="of each setting; default %(default)s")
    parser.add_argument("--only", choices=("designs", "attrition"), default=None, help="by default both")
    parser.add_argument("--seed", type=whole(0), default=None, help="drawn when not given, and printed")
    args = parser.parse_args()
    seed = secrets.randbits(31) if args.seed is None else args.seed
    print(json.dumps({"seed": seed, "studies": args.studies, "lossy": args.lossy}), flush=True)
    missed = 0
    if args.only != "attrition":
        missed += asyncio.run(measure(args.studies, seed))
    if args.only != "designs":
        missed += asyncio.run(planted_attrition.measure(args.lossy, np.random.default_rng(seed)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
