"""How many topics become the study that they ask for, and how many silently become a wrong one?

`python -m bench.topics [--planner builtin|llm|replay] [--file FILE] [--verbose]` prints JSON lines. `expect` of a topic is a
partial study spec of which only the stated fields count, `decline`, or `{"any_of": [...]}`. Levels are `{"any_order": [...]}`, or `{}` where any do; arms
may have any names. right: the spec, or a refusal where one is expected; draft: handed to a person; wrong_silently: a proposal
that differs from what is expected, or where none should be; unanswered: the LLM, or the transcripts of a replay, gave
nothing that could be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.command import run
from researcher.instruments.catalogue import InstrumentFolder, available
from researcher.planner.matcher import Matcher
from researcher.planner.outcome import Asked, Declined, Outcome, Planner, Proposed, TopicRequest
from researcher.refusals import PlanningRefused
from researcher.study.spec import StudySpec

TOPICS = Path(__file__).with_name("topics.jsonl")
VERDICTS = ("right", "draft", "declined", "wrong_silently", "crash", "unanswered")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.topics", description=__doc__)
    parser.add_argument("--planner", choices=["builtin", "llm", "replay"], default="builtin")
    parser.add_argument("--file", type=Path, default=TOPICS)
    parser.add_argument("--transcripts", type=Path, help="a folder, for --planner replay")
    parser.add_argument("--verbose", action="store_true", help="one line for each topic too")
    options = parser.parse_args(arguments)
    folders, planner = available(), planner_of(options.planner, options.transcripts)
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for case in read_cases(options.file):
        verdict, shown = asyncio.run(tried(planner, case, folders))
        counts[verdict] += 1
        if options.verbose:
            print(
                json.dumps(
                    {"topic": case["topic"], "verdict": verdict, "expect": case["expect"], "got": shown},
                    ensure_ascii=False,
                )
            )
    figures = {verdict: counts[verdict] for verdict in VERDICTS}
    seconds = round(time.perf_counter() - started, 2)
    print(json.dumps({"bench": "topics", "planner": planner.name, "n": counts.total(), **figures, "seconds": seconds}))
    return 0


def read_cases(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


async def tried(planner: Planner, case: dict[str, Any], folders: Sequence[InstrumentFolder]) -> tuple[str, Any]:
    """The verdict on one topic, and the planner's answer."""
    try:
        outcome = await planner.propose(TopicRequest(topic=case["topic"], instruments=folders))
    except PlanningRefused as error:  # a replay has no transcript for it, or the LLM gave no readable answer
        return "unanswered", str(error)
    except Exception as error:  # noqa: BLE001 - anything else that a planner raises counts as a crash
        return "crash", repr(error)
    return scored(outcome, case["expect"], folders), _shown(outcome)


def scored(outcome: Outcome, expect: Any, folders: Sequence[InstrumentFolder]) -> str:
    allowed = expect["any_of"] if isinstance(expect, dict) and "any_of" in expect else [expect]
    if isinstance(outcome, Declined):
        return "right" if "decline" in allowed else "declined"
    if not isinstance(outcome, Proposed):
        return "draft"
    spec = StudySpec.model_validate(outcome.draft.fields)
    defaults = _defaults(spec, folders)
    return "right" if any(each != "decline" and fits(spec, each, defaults) for each in allowed) else "wrong_silently"


def fits(spec: StudySpec, expect: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Whether the spec has every expected field. defaults: of the instrument's factors."""
    got = spec.model_dump(mode="json")
    got["metric"] = got["metric"] or defaults["metric"]
    for name, value in expect.items():
        if name == "compare":
            if not _same_compared(_compared(got), value, defaults):
                return False
        elif name == "arms":
            if not _same_arms(_arms(got, defaults), list(value.values()), {**defaults, **got["set"]}):
                return False
        elif name == "set":
            settings = {**defaults, **({"steps": got["steps"]} if got["steps"] else {}), **got["set"]}
            if not all(_same(settings.get(each), wanted) for each, wanted in value.items()):
                return False
        elif isinstance(value, dict):
            if not all(_same(got[name][each], wanted) for each, wanted in value.items()):
                return False
        elif not _same(got[name], value):
            return False
    return True


def planner_of(name: str, transcripts: Path | None) -> Planner:
    """The planner by name. transcripts: a folder with a replay's answers. Raises: SystemExit if the planner is not configured."""
    if name == "builtin":
        return Matcher()
    from bench.replay import ReplayEndpoint
    from foundation.clock import SystemClock
    from researcher.llm.asking import Asker
    from researcher.llm.endpoint import Endpoint, LlmSettings, OpenAIEndpoint, llm_settings

    settings = LlmSettings(model="replay") if name == "replay" else llm_settings(os.environ)
    if settings is None:
        raise SystemExit(
            "--planner llm needs a planner LLM: set RESEARCHER_LLM_MODEL, and RESEARCHER_LLM_BASE_URL or _API_KEY"
        )
    if name == "replay" and (transcripts is None or not transcripts.is_dir()):
        raise SystemExit("--planner replay needs --transcripts FOLDER, with the transcripts of these topics")
    from researcher.planner.agent import LlmPlanner

    endpoint: Endpoint = OpenAIEndpoint(settings) if transcripts is None else ReplayEndpoint([transcripts])
    return LlmPlanner(Asker(endpoint, settings, SystemClock()))


def _shown(outcome: Outcome) -> Any:
    if isinstance(outcome, Declined):
        return {"declined": outcome.reason}
    if isinstance(outcome, Asked):
        return {"asked": outcome.question}
    fields = {name: value for name, value in outcome.draft.fields.items() if name != "question"}
    return fields if isinstance(outcome, Proposed) else {"draft": fields, "problems": list(outcome.problems)}


def _defaults(spec: StudySpec, folders: Iterable[InstrumentFolder]) -> dict[str, Any]:
    chosen = next(each.instrument for each in folders if each.instrument.name == spec.instrument)
    return {each.name: each.default for each in chosen.factors} | {"metric": chosen.defaults.metric}


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(_same, got, wanted))
    numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (got, wanted))
    return math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-12) if numeric else bool(got == wanted)


def _same_compared(got: dict[str, Any], wanted: dict[str, Any], defaults: dict[str, Any]) -> bool:
    if got.keys() != wanted.keys():
        return False
    for name, want in wanted.items():
        baseline = got[name]["baseline"]
        baseline = defaults.get(name) if baseline is None else baseline
        if "any_order" in want and not _same_set([baseline, *got[name]["levels"]], want["any_order"]):
            return False
        if "levels" in want and not _same_set(got[name]["levels"], want["levels"]):
            return False
        if "baseline" in want and not _same(baseline, want["baseline"]):
            return False
    return True


def _same_set(got: list[Any], wanted: list[Any]) -> bool:
    return len(got) == len(wanted) and all(any(_same(each, other) for other in got) for each in wanted)


def _same_arms(got: list[dict[str, Any]], wanted: list[dict[str, Any]], defaults: dict[str, Any]) -> bool:
    """Whether the arms match one to one. A factor that an arm does not set has its default."""
    if len(got) != len(wanted):
        return False
    left = list(got)
    for want in sorted(wanted, key=len, reverse=True):
        arm = next(
            (
                each
                for each in left
                if all(_same(each.get(name, defaults.get(name)), value) for name, value in want.items())
            ),
            None,
        )
        if arm is None:
            return False
        left.remove(arm)
    return True


def _compared(got: dict[str, Any]) -> dict[str, Any]:
    """The comparison of a spec; also recognises arms that differ in a single factor."""
    names = {name for arm in got["arms"].values() for name in arm}
    if len(names) == 1 and not got["compare"]:
        levels = [next(iter(arm.values()), None) for arm in got["arms"].values()]
        return {names.pop(): {"baseline": levels[0], "levels": levels[1:]}}
    if isinstance(got["model"], list) and not got["compare"]:
        return {"model_size": {"baseline": got["model"][0], "levels": got["model"][1:]}}
    return dict(got["compare"])


def _arms(got: dict[str, Any], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    if got["arms"] or len(got["compare"]) != 1:
        return list(got["arms"].values())
    name, factor = next(iter(got["compare"].items()))
    return [{name: defaults.get(name) if level is None else level} for level in (factor["baseline"], *factor["levels"])]


if __name__ == "__main__":
    run(main)
