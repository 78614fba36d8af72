"""The tools: their arguments, and the command that each one runs.

An answer holds what the command prints, and what its `--json` prints as a document. Nothing here knows the protocol.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from foundation.addresses import is_loopback
from foundation.commandline import UsageError
from foundation.nearest import nearest
from foundation.strict import StrictModel
from researcher.attendance import carrier
from researcher.campaign import people
from researcher.cli import campaign, decisions, findings, instruments, report, status
from researcher.cli.drafting import Ready, TextDrafting
from researcher.cli.request import seconds
from researcher.cli.start import campaign_offer, priced, same_json, same_lines, schema_of_study_files
from researcher.describe import engine_lines, plan_lines
from researcher.home import Home
from researcher.models import StudyRecord, TrialRecord
from researcher.report.samples import shown_samples
from researcher.store.errors import LeaseHeld
from researcher.study.file import checked_spec, read_study_text
from researcher.view import duration
from researcher.web.drafting import Places

_LOOK_EVERY_S = 1.0
LONGEST_WAIT_S = 50
"""Maximum wait of a call, in seconds. Clients give up on a call after a minute."""
_MOST_POINTS = 60
_LEAST_HASH, _SHOWN_HASH = 8, 16


@dataclass(frozen=True, slots=True)
class Research:
    """What the tools work on.

    `limit` is the largest wall-time budget of a study that may start without `approve`, such as 1h. `person` is recorded as the
    author of answers and messages. `closing` is set when the server shuts down, so that waiting calls return.

    Raises: UsageError for a limit that is not a duration.
    """

    home: Home
    drafting: TextDrafting
    limit: str
    person: str
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        seconds(self.limit)

    def study(self, reference: str) -> StudyRecord:
        """Look up a study. Raises: NotFound, Ambiguous."""
        return self.home.store.studies.get(self.home.store.studies.resolve(reference))


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a tool: `text` for people, and the same as data in `document`. `hints` say what to do next; they contain only
    our own words, never a model's."""

    text: str
    document: dict[str, Any]
    hints: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool. `work` raises the errors in `researcher.cli.DELIBERATE`. `effect` is its effect on the records and on running work."""

    name: str
    description: str
    arguments: type[StrictModel]
    work: Callable[[Research, Any], Answer]
    effect: Literal["none", "adds", "ends"] = "none"


# -- arguments -------------------------------------------------------------------------------------------------------------


class Nothing(StrictModel):
    """No arguments."""


class OneInstrument(StrictModel):
    name: str | None = Field(
        None, description="only this instrument, with its own factors (default: all instruments, in brief)"
    )


class Topic(StrictModel):
    topic: str = Field(description="the question in words, with bounds such as seeds or hours")
    instrument: str | None = Field(None, description="the instrument, if the topic should not choose it")
    answers: list[str] = Field([], description="answers to the planner's earlier questions, in order")


class StudyText(StrictModel):
    study: str = Field(
        description="a study file in YAML: the text itself, as `draft` writes it or `schema` describes it"
    )
    servers: list[str] = Field(
        [], description="addresses of swarm servers (default: start one on this machine for the study)"
    )
    engine: Literal["local", "echo"] = Field(
        "local",
        description="engine of a server started here; echo trains nothing and only shows that a study would run",
    )


class Start(StudyText):
    again: bool = Field(False, description="start the study even if the same one is already running")
    approve: str | None = Field(
        None, description="the hash that `price` gave for this study; needed if `price` says so, after a person agreed"
    )


_STUDY = "a study's id, a prefix of it, or latest"


class OneStudy(StrictModel):
    study: str = Field("latest", description=_STUDY)


class Status(OneStudy):
    wait_s: int = Field(
        0, ge=0, le=LONGEST_WAIT_S, description="answer once something has changed, or after this many seconds"
    )


class Curves(OneStudy):
    metrics: list[str] = Field([], description="names of step metrics (default: training and held-out reward)")


class Stop(StrictModel):
    study: str = Field(description=_STUDY)
    confirm: str = Field(description="the complete id of the study, to confirm which one to stop")


class About(StrictModel):
    instrument: str | None = Field(None, description="of this instrument only")
    factor: str | None = Field(None, description="on this factor only")
    model: str | None = Field(None, description="with this model only")


_CAMPAIGN = "a campaign's id, a prefix of it, or latest"


class OneCampaign(StrictModel):
    campaign: str = Field("latest", description=_CAMPAIGN)


class Tell(OneCampaign):
    words: str = Field(
        description="message that the next decision quotes; if an LLM leads the campaign, it also reads the message"
    )
    leave: list[str] | None = Field(
        None,
        description="complete list of factors to keep fixed from now on; empty: every factor may vary again",
    )


class Approve(OneCampaign):
    decision: int = Field(description="the number of the waiting decision, as `campaign_status` shows it")
    words: str = Field("", description="the person's reason")


# -- before a study -------------------------------------------------------------------------------------------------------


def _instruments(research: Research, given: OneInstrument) -> Answer:
    if given.name is not None and research.drafting.folder is None:
        research.drafting.check_installed(given.name)
    found, lines = instruments.shown(given.name)
    if given.name is not None:
        return Answer("\n".join(lines), found[0].model_dump(mode="json"))
    short = [{"name": each.name, "title": each.title, "model": each.model} for each in found]
    *text, hint = lines
    return Answer("\n".join(text), {"instruments": short, "text": "\n".join([*text, hint])}, [hint])


def _places(research: Research, given: StudyText) -> Places:
    """Return where trials run.

    Raises: UsageError for a server elsewhere if the caller may be remote, because we would send that server this machine's token.
    """
    for url in given.servers if research.drafting.folder is None else ():
        if not is_loopback(urlsplit(url).hostname or ""):
            raise UsageError(
                f"{url} is not on this machine: over HTTP, only servers on this machine can be used; "
                "`researcher start --server` takes others"
            )
    return Places(servers=tuple(dict.fromkeys(given.servers)), engine=given.engine)


def _schema(research: Research, given: Nothing) -> Answer:
    schema = schema_of_study_files()
    return Answer(json.dumps(schema), schema)


def _draft(research: Research, given: Topic) -> Answer:
    drafted = research.drafting.draft(given.topic, given.instrument, given.answers)
    if drafted.asks:
        text = f"the planner asks: {drafted.asks} Call `draft` again with the answer in `answers`"
        return Answer(text, {"asks": drafted.asks})
    if drafted.problems:
        said = ["This draft is incomplete: edit it, then price it."]
    else:
        spec, _ = checked_spec(read_study_text(drafted.text, Path())[0])
        said = [
            "Read the draft: its comments say what it leaves out of the topic. If it has no budget, give it one: with up to "
            f"budget: {{wall: {research.limit}}} it starts without approval. Then price it.",
            *([] if spec is None else filter(None, [campaign_offer(given.topic, spec)])),
        ]
    document = {"study": drafted.text, "problems": list(drafted.problems), "said": said}
    return Answer("\n".join([drafted.text, *said]), document)


def _price(research: Research, given: StudyText) -> Answer:
    ready = research.drafting.ready(given.study, _places(research, given), runs=False)
    lines, asks = [*engine_lines(ready.plan, given.engine), *plan_lines(ready.plan)], _needs_approval(research, ready)
    same = research.drafting.same(ready)
    document = priced(ready.draft, ready.spec, ready.plan, ready.price)
    document |= {"plan": lines, "budget": ready.plan.budget.model_dump(mode="json"), "needs_approval": asks is not None}
    then = asks or f"no approval is needed, because its budget is {research.limit} or less; `start` begins it"
    return Answer(
        "\n".join([*lines, *same_lines(same), then]), {**document, "engine": given.engine, "same_spec": same_json(same)}
    )


def _needs_approval(research: Research, ready: Ready) -> str | None:
    """Say how to get approval, if the study's wall-time budget is above the limit; else return None."""
    if ready.plan.budget.wall_s <= seconds(research.limit):
        return None
    return (
        f"this study may spend {duration(ready.plan.budget.wall_s)}, but the limit without approval is {research.limit}: write "
        f"budget: {{wall: {research.limit}}} into it (it should take at most {duration(ready.price.wall_s[1])}), or show this "
        f"price to a person and, if they agree, start it with approve: {ready.plan.digest()[:_SHOWN_HASH]}"
    )


# -- a study --------------------------------------------------------------------------------------------------------------


def _start(research: Research, given: Start) -> Answer:
    ready = research.drafting.ready(given.study, _places(research, given), runs=True)
    digest = ready.plan.digest()
    if given.approve is not None:
        _check_approved(given.approve, digest)
    elif asks := _needs_approval(research, ready):
        raise UsageError(asks)
    same = research.drafting.same(ready)
    study_id = research.drafting.begin(ready, None if given.again else "again: true starts another one")
    text = f"{study_id}: {carrier()}; `status` follows it, `report` has the answer when it is done"
    uncovered = [f"not covered: {each}" for each in ready.draft.uncovered]
    document = {"study": study_id, "hash": digest, "uncovered": ready.draft.uncovered, "same_spec": same_json(same)}
    return Answer("\n".join([text, *uncovered, *same_lines(same)]), document)


def _check_approved(approved: str, digest: str) -> None:
    """Raise UsageError unless `approved` is this plan's hash, or a long enough prefix of it."""
    if len(approved) < _LEAST_HASH or not digest.startswith(approved):
        raise UsageError(
            f"approve: {approved!r} is not the hash of this plan, which is now {digest[:_SHOWN_HASH]}. The hash covers what was "
            "known and how long trials took when it was priced, so a study that has ended since or a changed text gives a new hash. "
            "Price it again, and show that price to the person"
        )


def _studies(research: Research, given: Nothing) -> Answer:
    found = research.home.store.studies.all()
    rows = [
        {name: row[name] for name in ("id", "status", "reason", "topic", "created_at", "worker", "unattended")}
        for row in status.list_json(research.home, found)
    ]
    lines = list(status.list_lines(research.home, found))
    return Answer("\n".join(lines), {"studies": rows}) if found else Answer("", {"studies": rows}, lines)


def _status(research: Research, given: Status) -> Answer:
    study = _changed(research, research.study(given.study), given.wait_s)
    document = status.status_json(research.home, study)
    for trial in document["trials"]:
        del trial["curves"]  # the tool `curves` returns them
    document["exit_code"] = status.exit_code(research.home, study)
    lines = status.status_lines(research.home, study)
    if document["unattended"] is None:
        return Answer("\n".join(lines), document)
    return Answer("\n".join(lines[:-1]), document, lines[-1:])


def _changed(research: Research, study: StudyRecord, wait_s: float) -> StudyRecord:
    """Wait until the status of the study or of one of its trials has changed, at most `wait_s` seconds, and return the study."""
    store, until = research.home.store, time.monotonic() + wait_s

    def seen() -> tuple[object, ...]:
        now = store.studies.get(study.id)
        return (now.status, now.reason, *(trial.status for trial in store.trials.all(study.id, series=())))

    before = seen()
    while not study.status.ended and time.monotonic() < until and seen() == before:
        if research.closing.wait(_LOOK_EVERY_S):
            break
    return store.studies.get(study.id)


def _curves(research: Research, given: Curves) -> Answer:
    study = research.study(given.study)
    trials = research.home.store.trials.all(study.id)
    known = sorted({name for trial in trials for name in trial.series})
    for name in given.metrics:
        if known and name not in known:
            guess = nearest(name, known)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(known)}"
            raise UsageError(f"no trial of {study.id} has a step metric {name!r}; {hint}")
    rows, lines = [], []
    for trial in trials:
        shown = {name: _thinned(line) for name, line in _lines_of(trial, given.metrics).items()}
        rows.append({"trial": trial.key, "arm": trial.arm, "seed": trial.seed, "status": trial.status, "curves": shown})
        lines.append(f"{trial.key}  {trial.arm} seed {trial.seed}: {trial.status}")
        lines += [
            f"  {name}: {', '.join(f'{step}: {value:.3g}' for step, value in line)}" for name, line in shown.items()
        ]
    document = {"study": study.id, "trials": rows, "metrics": known}
    return Answer("\n".join(lines) or f"{study.id} has no trials yet; `status` says what the study waits for", document)


def _lines_of(trial: TrialRecord, metrics: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    chosen = {name: trial.series[name] for name in metrics if name in trial.series}
    return chosen if metrics else status.curves_of(trial)


def _thinned(line: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most _MOST_POINTS evenly spaced points of the line, including the first and the last."""
    if len(line) <= _MOST_POINTS:
        return list(line)
    return [line[round(number * (len(line) - 1) / (_MOST_POINTS - 1))] for number in range(_MOST_POINTS)]


def _samples(research: Research, given: OneStudy) -> Answer:
    study, store = research.study(given.study), research.home.store
    found = shown_samples(store.plans.get(study.id), store.trials.all(study.id), store.trials.samples(study.id))
    lines = [
        f"{each.arm} seed {each.seed}, {each.when} (step {each.step}), reward {each.reward}, success {each.success}\n"
        f"  asked     {each.question}\n  answered  {each.answer}"
        for each in found
    ]
    text = "\n".join(lines) or f"{study.id} has no answers yet; `status` says how far the study is"
    return Answer(text, {"study": study.id, "samples": [asdict(each) for each in found]})


def _findings(research: Research, given: About) -> Answer:
    asked = findings.About(instrument=given.instrument, factor=given.factor, model=given.model)
    document, lines = findings.listed(research.home.store, asked)
    return Answer("\n".join(lines), document)


def _report(research: Research, given: OneStudy) -> Answer:
    study = research.study(given.study)
    try:
        files = report.write(research.home, study.id)
    except LeaseHeld:  # its worker has written the report and is still copying records
        files = report.files_of(research.home.studies / study.id)
        if not study.status.ended or not Path(files["markdown"]).is_file():
            raise
    return Answer(Path(files["markdown"]).read_text(encoding="utf-8"), {"study": study.id, **files})


def _verify(research: Research, given: OneStudy) -> Answer:
    document, lines = report.verified(research.home, research.study(given.study).id)
    return Answer("\n".join(lines), document)


def _stop(research: Research, given: Stop) -> Answer:
    study = research.study(given.study)
    if given.confirm != study.id:
        raise UsageError(f"this would stop {study.id}, {study.topic!r}; to confirm, pass confirm: {study.id}")
    said = decisions.stop(research.home, study)
    return Answer(f"{study.id}: {said}", {"study": study.id, "told": said})


# -- campaigns ------------------------------------------------------------------------------------------------------------


def _campaign_status(research: Research, given: OneCampaign) -> Answer:
    store = research.home.store
    document = campaign.status_json(research.home, store.campaigns.get(store.campaigns.resolve(given.campaign)))
    return Answer("\n".join(campaign.status_lines(document)), document)


def _campaign_tell(research: Research, given: Tell) -> Answer:
    store = research.home.store
    campaign_id = store.campaigns.resolve(given.campaign)
    if not given.words.strip():
        raise UsageError("words: is empty; write what the next decision should quote")
    people.tell(store, campaign_id, given.words, research.person, leave=given.leave)
    instead = "`leave` names factors to keep fixed"
    text = people.telling_text(store, campaign_id, given.leave, instead)
    return Answer(f"{campaign_id}: {text}", {"campaign": campaign_id, "told": given.words, "leave": given.leave})


def _campaign_approve(research: Research, given: Approve) -> Answer:
    store = research.home.store
    campaign_id = store.campaigns.resolve(given.campaign)
    newest = store.campaigns.decisions(campaign_id)[-1:]
    if any(each.seq == given.decision and each.action == "new_instrument" for each in newest):
        raise UsageError(
            f"decision {given.decision} is an instrument that an LLM wrote, and only a person who has read it may approve it: "
            f"`researcher campaign approve {campaign_id}` in the terminal, or on the campaign's page"
        )
    number = people.approve(store, campaign_id, given.words, research.person, decision=given.decision)
    return Answer(f"{campaign_id}: decision {number} is approved", {"campaign": campaign_id, "decision": number})


def _tool(
    name: str,
    arguments: type[StrictModel],
    work: Callable[[Research, Any], Answer],
    description: str,
    effect: Literal["none", "adds", "ends"] = "none",
) -> Tool:
    return Tool(name=name, description=description, arguments=arguments, work=work, effect=effect)


TOOLS = (
    _tool(
        *("instruments", OneInstrument, _instruments),
        "List what a study can ask: instruments, the factors that it may vary, and the metrics that may decide.",
    ),
    _tool("schema", Nothing, _schema, "The JSON Schema of a study file."),
    _tool(
        *("draft", Topic, _draft),
        "Turn a question in words into a study file in YAML. Its comments say where each setting came from and what part of the "
        "topic is left out. Runs nothing. The planner may ask a question: then answer it in `answers`. If an LLM plans, this "
        "spends its tokens.",
        "adds",
    ),
    _tool(
        *("price", StudyText, _price),
        "Plan a study and price it: arms, seeds, stages, trials, time, the plan's hash, and whether a person has to approve it. "
        "Runs and records nothing.",
    ),
    _tool(
        *("start", Start, _start),
        "Start a study and return its id immediately; a daemon runs it. A study that may take longer than the limit is "
        "refused unless `approve` holds the hash that `price` gave: ask a person first.",
        "adds",
    ),
    _tool("studies", Nothing, _studies, "List every study, newest first, and who continues it."),
    _tool(
        *("status", Status, _status),
        "Show how a study is doing: status, trials, decisions, verdicts, budget, and what it waits for. exit_code is that of "
        "`researcher status`: 0 done or continuing by itself, 1 failed, 3 a person has to do something, "
        "4 out of budget. `wait_s` waits for a change.",
    ),
    _tool(
        *("curves", Curves, _curves), "Return the learning curves of a study's trials by step, also while they train."
    ),
    _tool(
        *("samples", OneStudy, _samples),
        "Show what each arm's model was asked, what it answered and which reward that got, before, during and after training.",
    ),
    _tool(
        *("findings", About, _findings),
        "List what earlier studies found, including null results, and which findings contradict each other. "
        "Look here before asking again.",
    ),
    _tool(
        *("report", OneStudy, _report),
        "Rewrite and return a study's report from its records: the answer first, then what was run and what the answer rests on.",
        "adds",
    ),
    _tool("verify", OneStudy, _verify, "Recompute every number of a study's report from the records."),
    _tool(
        *("stop", Stop, _stop),
        "Stop a study at the next safe point. `confirm` is its complete id.",
        "ends",
    ),
    _tool(
        *("campaign_status", OneCampaign, _campaign_status),
        "Show a campaign: its decisions, hypotheses, what is confirmed, what is left of the budget, and what it waits for.",
    ),
    _tool(
        *("campaign_tell", Tell, _campaign_tell),
        "Send a message to a campaign's next decision, which quotes it.",
        "adds",
    ),
    _tool(
        *("campaign_approve", Approve, _campaign_approve),
        "Approve the study at which a campaign waits. Do this only if a person told you to. An instrument that an LLM wrote "
        "is refused here: a person reads and approves it in the terminal or on the page.",
        "adds",
    ),
)
