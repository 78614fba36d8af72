"""Turns the command line into a draft spec: a study file, a topic for the planner, or only options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from foundation.commandline import UsageError
from foundation.durations import duration_s
from foundation.nearest import MOST_NAMES
from researcher.cli import say
from researcher.design.pricing import Pace
from researcher.home import Home
from researcher.instruments.catalogue import available, open_instrument
from researcher.instruments.levels import level_text
from researcher.models import LONGEST_TOPIC, Finding, LlmCall
from researcher.paces import paces_on
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Planner, Proposed, TopicRequest
from researcher.refusals import PlanningRefused, SpecRefused
from researcher.study.draft import Draft, arms_of, edited, marked, paths_of, seeds_of, settings_of, study_text, vary_of
from researcher.study.file import Lines, read_study_file
from researcher.study.plan import PlanModel
from researcher.study.spec import DesignName, duration_text

if TYPE_CHECKING:
    from researcher.campaign.goal import CampaignGoal
    from researcher.llm.endpoint import LlmSettings

_CROSSED: DesignName = "factorial"
_OPTIONS = {
    "compare": "--vary",
    "arms": "--arm",
    "budget.wall": "--budget",
    "budget.tokens": "--tokens",
    "seeds.first": "--first-seed",
    "schedule.windows": "--window",
    "schedule.days": "--days",
}
"""Options whose names differ from the fields that they set."""
_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n\s*\n\s*")
_LEFT_AS_IT_IS = re.compile(
    r"\?\s*$|\b(?:not|never|no|cannot|\w+n['’]?t|without|avoid|rather|instead|unlike)\b", re.IGNORECASE
)
"""Matches questions and negations: they may mention the engine without asking for it."""
_ECHO = re.compile(
    r"""
    (?:
        (?: (?:^|\s*[,:(\n])\s*(?:(?:and|then|please)\s+)* | \s+(?:(?:and|then|please)\s+)+ )
        (?:use|run(?:\s+(?:it|this|that|them))?\s+(?:on|with))\s+     # a separate instruction
      | (?:^|\s*[,:(\n])\s*(?:on|with|using)\s+
      | (?<!\band)(?<!\bor)\s+(?:on|using)\s+                        # belongs to what precedes it
    )
    (?:the\s+)?echo[\s-]engine(?:\s+please)?\s*\)?(?=\s*(?:[.,;:!)]|\n|$))
  | (?:^|\s*[,:(]|\s)\s*(?:with\s+)?--engine[\s=]+echo\s*\)?(?=\s*(?:[.,;:!)]|\n|$))
    """,
    re.IGNORECASE | re.VERBOSE,
)
ECHO_APART = "The echo engine is chosen when the study is started, not in its file: use `--engine echo`, or `engine: echo` over MCP."
_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
Teller = Callable[[str], None]


class DraftToEdit(PlanningRefused):
    """Raised when the planner has a draft that a person must finish. `text` is the draft as a study file."""

    def __init__(
        self, draft: Draft, problems: tuple[str, ...], knowledge: Knowledge, *, servers: int, file: str | None
    ) -> None:
        """`servers` is the number of trials that run at the same time. `file` is the path for the draft; None if it is not written."""
        said = " ".join(f"{each.rstrip('.')}." for each in problems)
        then = "Save the draft to a file (`researcher draft ... -o study.yaml`), edit it, and start that file"
        if file is not None:
            then = f"The draft is in {file}: edit it, or start it as it is if these remarks change nothing"
        super().__init__(f"{said} {then}")
        self.text = study_text(draft, problems)
        self.fields = draft.fields
        self.problems = problems
        self.knowledge = knowledge
        self.servers = servers


class QuestionOpen(Exception):
    """Raised when the planner needs an answer before it can continue, and nobody is at the terminal."""

    def __init__(self, question: str) -> None:
        super().__init__(f"the planner asks: {question} Answer with --answer TEXT")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A draft, with the line numbers of its keys if it comes from a study file."""

    draft: Draft
    lines: Lines | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What planning needs from a home.

    `known` are findings of earlier studies. Findings on the echo engine, which trains nothing, are only used for studies on that
    engine. `paces` are durations of earlier trials on the servers of this request.
    """

    home: Home | None
    known: list[Finding]
    paces: list[Pace]

    @classmethod
    def of(cls, home: Home | None, servers: list[str], engine: str) -> Self:
        """Collect what a home knows. `home` is None if there is no database yet."""
        if home is None:
            return cls(None, [], [])
        on_echo = engine == "echo"
        known = [each for each in home.store.findings.all() if ("echo" in each.models) == on_echo]
        return cls(home, known, paces_on(home.store, servers, "echo" if on_echo else "local"))

    def kept(self, reference: str) -> PlanModel:
        """Return the model that the trial STUDY/TRIAL trained. Raises: SpecRefused."""
        if self.home is None:
            raise SpecRefused("start_from", f"there are no studies here yet, so there is no kept model {reference}")
        from researcher.kept_models import kept_model

        return kept_model(self.home, reference)


@dataclass(slots=True)
class Asking:
    """Turns one request into a draft. `calls` are the LLM calls so far; new ones are appended."""

    args: argparse.Namespace
    home: Home | None
    calls: list[LlmCall] = field(default_factory=list)
    knowledge: Knowledge = field(init=False)

    def __post_init__(self) -> None:
        servers, engine = getattr(self.args, "server", []), getattr(self.args, "engine", "local")
        self.knowledge = Knowledge.of(self.home, servers, engine)

    def wanted(self) -> Wanted:
        """Return the draft of the request. Raises: UsageError, PlanningRefused (DraftToEdit if there is a draft), QuestionOpen."""
        args, edits = self.args, edits_of(self.args)
        given = [bool(args.file), args.topic is not None, bool(edits.keys() & {"compare", "arms"} or _several(edits))]
        if args.file and args.topic is not None:
            raise UsageError("a study file and --topic both state the question: drop one of them")
        if args.file:
            fields, lines = read_study_file(Path(args.file))
            draft = edited(Draft(fields=fields, sources=marked(fields, "file"), author="file"), edits)
            return Wanted(draft, lines.overruled(_options_of(edits)))
        if args.topic is not None:
            draft = edited(self._planned(topic_of(args.topic), edits), edits)
            if edits.keys() & {"compare", "arms"} or _several(edits):
                said = "What the topic compares, if it differs: the options decide what is compared."
                draft = replace(draft, uncovered=(*draft.uncovered, said))
            return Wanted(draft)
        if args.answer:
            raise UsageError("--answer is for a planner's question about --topic; leave it out")
        if not any(given):
            raise UsageError(
                "no study requested: give a study file, --topic TEXT, or --instrument NAME --vary FACTOR=A,B"
            )
        if "instrument" not in edits:
            names = ", ".join(each.instrument.name for each in available())
            raise UsageError(f"--vary, --arm and --model also need --instrument NAME; choose one of: {names}")
        fields = {"question": question_of(edits), **edits}
        return Wanted(Draft(fields=fields, sources=marked(edits, "flag"), author="options"))

    def _planned(self, topic: str, edits: dict[str, Any]) -> Draft:
        """Return the planner's draft. Raises: UsageError if the topic asks for an engine but no option does."""
        asked = without_engine(topic)
        if asked == topic:
            return self._proposed(topic, edits)
        engine = getattr(self.args, "engine", None)
        if engine not in (None, "echo"):
            raise UsageError("the topic asks for the echo engine; choose it with --engine echo")
        draft = self._proposed(asked, edits)
        return draft if engine == "echo" else replace(draft, uncovered=(*draft.uncovered, ECHO_APART))

    def _proposed(self, topic: str, edits: dict[str, Any]) -> Draft:
        """Return the planner's draft of the topic, asking its questions at the terminal."""
        import asyncio

        name = edits.get("instrument")
        folders = [open_instrument(name)] if name is not None else available()
        given = edits if name is None else edits | {"instrument": folders[0].instrument.name}
        tell, answers = teller(self.args), list(self.args.answer)
        servers = max(1, len(getattr(self.args, "server", [])))
        planner = planner_of(self.args.planner, self.calls, tell, durable=self.home is not None)
        while True:
            request = TopicRequest(
                topic=topic,
                instruments=folders,
                given=given,
                known=self.knowledge.known,
                paces=self.knowledge.paces,
                servers=servers,
                kept=self.knowledge.kept,
                answers=answers,
            )
            outcome = asyncio.run(planner.propose(request))
            if isinstance(outcome, NeedsEdit):
                file = getattr(self.args, "output", None)
                raise DraftToEdit(outcome.draft, outcome.problems, self.knowledge, servers=servers, file=file)
            if not isinstance(outcome, Asked):
                return _draft_in(outcome)
            if not sys.stdin.isatty() or self.args.json:
                raise QuestionOpen(outcome.question)
            say(f"The planner asks: {outcome.question}")
            answers.append(input("> ").strip())


def planner_of(which: str | None, calls: list[LlmCall], tell: Teller, *, durable: bool) -> Planner:
    """Return the LLM planner if one is configured and wanted, else the matcher.

    `calls` receives new LLM calls. `durable`: keep the conversation's checkpoints in the database.

    Raises: PlanningRefused.
    """
    from researcher.llm.endpoint import llm_settings

    settings = None if which == "builtin" else llm_settings(os.environ)
    if settings is None and which == "llm":
        raise PlanningRefused(
            "--planner llm needs a planner LLM, and none is configured here; set RESEARCHER_LLM_MODEL and "
            "RESEARCHER_LLM_API_KEY or RESEARCHER_LLM_BASE_URL, or plan with --planner builtin"
        )
    if settings is None:
        from researcher.planner.matcher import Matcher

        return Matcher()
    from foundation.clock import SystemClock
    from foundation.ids import RandomIds
    from researcher.llm.asking import Asker, Purse
    from researcher.llm.endpoint import OpenAIEndpoint
    from researcher.planner.agent import LlmPlanner
    from researcher.store.database import default_url

    asker = Asker(
        OpenAIEndpoint(settings), settings, SystemClock(), keep=calls.append, tell=tell, purse=Purse.of(calls)
    )
    return LlmPlanner(asker, checkpoints=default_url() if durable else None, thread=RandomIds().new("plan"))


def _draft_in(outcome: Proposed | Declined) -> Draft:
    """Return the draft of a planner's outcome. Raises: PlanningRefused."""
    if isinstance(outcome, Proposed):
        return outcome.draft
    instead = f" Nearest: {', '.join(outcome.nearest[:MOST_NAMES])}." if outcome.nearest else ""
    raise PlanningRefused(f"{outcome.reason.rstrip('.')}.{instead}", outcome.nearest)


def campaign_llm(goal: CampaignGoal) -> LlmSettings | None:
    """Return the settings of the LLM that leads the campaign; None if the built-in strategist leads. Raises: PlanningRefused."""
    from researcher.llm.endpoint import llm_settings

    settings = None if goal.strategist == "builtin" else llm_settings(os.environ)
    if settings is None and goal.strategist == "llm":
        raise PlanningRefused(
            "strategist: llm needs an LLM, and none is configured here; set RESEARCHER_LLM_MODEL and RESEARCHER_LLM_API_KEY or "
            "RESEARCHER_LLM_BASE_URL, or start with strategist: builtin"
        )
    unpriced = settings is not None and settings.price_in is None and settings.price_out is None
    if unpriced and goal.budget.money is not None:
        raise PlanningRefused(
            "budget.money needs the LLM's prices: set RESEARCHER_LLM_PRICE_IN and RESEARCHER_LLM_PRICE_OUT (per million tokens), "
            "or limit llm_tokens instead"
        )
    return settings


def teller(args: argparse.Namespace) -> Teller:
    """Return a function that prints progress, or one that prints nothing if the output is JSON."""
    return (lambda _: None) if args.json else say


def edits_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the spec fields that options set, by name. Raises: UsageError."""
    edits: dict[str, Any] = {
        "instrument": args.instrument,
        "model": (args.model[0] if len(args.model) == 1 else list(args.model)) if args.model else None,
        "compare": vary_of(args.vary) or None,
        "arms": arms_of(args.arm) or None,
        "design": args.design,
        "set": settings_of("--set", args.set) or None,
        "metric": args.metric,
        "secondary": args.secondary or None,
        "evaluate_on": args.evaluate_on or None,
        "claim": args.claim,
        "margin": args.margin,
        "steps": args.steps,
        "heldout_every": args.heldout_every,
        "looks": args.looks,
        "fine": args.fine,
        "approve": args.approve,
    }
    seeds = {} if args.seeds is None else seeds_of(args.seeds)
    if args.first_seed is not None:
        seeds["first"] = args.first_seed
    budget = {"wall": None if args.budget is None else duration_text(seconds(args.budget)), "tokens": args.tokens}
    schedule = {"windows": args.window, "days": args.days}
    edits |= {
        "seeds": seeds or None,
        "budget": {name: value for name, value in budget.items() if value is not None} or None,
        "schedule": {name: value for name, value in schedule.items() if value} or None,
    }
    edits = {name: value for name, value in edits.items() if value is not None}
    if len(edits.get("compare", {})) + _several(edits) > 1 and "design" not in edits:
        edits["design"] = _CROSSED
    return edits


def _options_of(edits: dict[str, Any]) -> dict[str, str]:
    """Map each dotted path to the option that set it."""
    return {
        path: _OPTIONS.get(path.partition(".")[0], _OPTIONS.get(path, f"--{path.partition('.')[0].replace('_', '-')}"))
        for path in paths_of(edits)
    }


def _several(edits: dict[str, Any]) -> bool:
    """True if several models are compared."""
    return isinstance(edits.get("model"), list)


def question_of(edits: dict[str, Any]) -> str:
    """Phrase the question of a study described by options."""
    parts = [
        f"{name} {', '.join(map(level_text, [*([each['baseline']] if 'baseline' in each else []), *each['levels']]))}"
        for name, each in edits.get("compare", {}).items()
    ]
    parts += [f"the arms {', '.join(edits['arms'])}"] if "arms" in edits else []
    parts += [f"the models {', '.join(edits['model'])}"] if _several(edits) else []
    return f"Compare {' and '.join(parts)} on {edits['instrument']}."


def topic_of(given: str) -> str:
    """Return the topic itself, or the content of FILE for `@FILE`. Raises: UsageError."""
    if given.startswith("@"):
        file = Path(given[1:])
        try:
            given = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the topic file {str(file)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"the topic file {str(file)!r} is not UTF-8 text") from error
    return checked_topic(given)


def without_engine(topic: str) -> str:
    """Remove phrases that ask for the echo engine, which is an option of `start` and not a setting of the study."""
    given = _SENTENCES.split(topic.strip())
    kept = [each if _LEFT_AS_IT_IS.search(each) else _ECHO.sub("", each) for each in given]
    if kept == given:
        return topic
    kept = [each.lstrip(" \t\n,:") for each in kept]
    return " ".join(each for each in kept if each.strip(" .!;,")) or topic


def checked_topic(given: str) -> str:
    """Strip the topic and check it. Raises: UsageError."""
    if not given.strip():
        raise UsageError("the topic is empty; ask a question; `researcher instruments` shows what can be asked about")
    if len(given.strip()) > LONGEST_TOPIC:
        raise UsageError(f"the topic has {len(given.strip())} characters; the maximum is {LONGEST_TOPIC}")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the topic is not UTF-8 text") from error
    return given.strip()


def seconds(text: str) -> float:
    """Parse a time such as `8h`, `90m`, `1h30m`, `2d` or `90s`. A bare number is refused as ambiguous. Raises: UsageError."""
    total = duration_s(text)
    if total is None and _BARE.fullmatch(text) and float(text):
        raise UsageError(
            f"{text!r} has no unit: write {text}s, {text}m or {text}h (in files, a bare number means seconds)"
        )
    if total is None:
        raise UsageError(f"{text!r} is not a time; write 8h, 90m, 1h30m or 90s")
    if not 0 < total < float("inf"):
        raise UsageError(f"{text!r} is not a positive, finite time; write 8h, 90m, 1h30m or 90s")
    return total


def check_addresses(urls: list[str]) -> None:
    """Check the addresses given with `--server`. Raises: UsageError."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--server {url!r} is not an address; write it as http://host:8642")
