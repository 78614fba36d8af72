"""Configures the LLM that repairs and writes instruments, and sets its limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from foundation.clock import Clock, SystemClock
from foundation.commandline import UsageError
from foundation.paths import visible_files
from researcher.campaign.goal import Aim, CampaignGoal, aim_beside
from researcher.campaign.new_instrument import InstrumentWriter, NewInstrument, NotWritten
from researcher.campaign.seen import Left
from researcher.campaign.strategist import StrategistAway
from researcher.cli.clients import NO_SANDBOX, on_ray
from researcher.environments import interpreter
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.asking import Asker, Keep, KeptAnswers, Purse
from researcher.llm.endpoint import Endpoint, LlmSettings, LlmSpent, LlmUnusable, OpenAIEndpoint, llm_settings
from researcher.models import LlmCall, StudyOptions
from researcher.refusals import PlanningRefused
from researcher.repair.asking import Llm
from researcher.repair.code import Unfit
from researcher.repair.repairs import Helpers, Repairer, RepairLimits
from researcher.repair.writing import write_instrument
from researcher.sandbox.launch import sandbox
from researcher.store.store import Store
from researcher.study.plan import Plan

_ANSWER_TOKENS = 16_384
"""Maximum answer length for a repaired version, in tokens; large because the answer holds whole files."""
_HURRY_S = 60.0
"""Time limit for an LLM's opinion on a failure."""

Tell = Callable[[str], None]


def repairer_of(
    home: Home, store: Store, study_id: str, plan: Plan, folder: InstrumentFolder, clock: Clock, tell: Tell
) -> Repairer:
    """Return the study's repairer, after adopting any repair that a person made.

    Raises: UsageError if that repair cannot be used; InstrumentChanged; PlanningRefused if the instrument's packages are missing.
    """
    options = store.studies.get(study_id).options
    repairer = Repairer(
        store,
        study_id,
        plan,
        folder,
        home.studies / study_id / "code",
        python=interpreter(folder, home.root),
        helpers=helpers(store, study_id, options, clock, tell, os.environ),
        limits=RepairLimits(per_study=options.repairs),
        tell=tell,
    )
    try:
        repairer.by_hand()
    except Unfit as error:
        raise UsageError(f"the repaired instrument cannot be used: {error}") from error
    return repairer


def helpers(
    store: Store, study_id: str, options: StudyOptions, clock: Clock, tell: Tell, environ: Mapping[str, str]
) -> Helpers:
    """Return the configured LLM for repairs, if the study permits them. Its tokens and cost count with those of planning the study."""
    if not options.repairs:
        return Helpers(why_none="the study permits no repairs (--repairs 0)")
    settings = llm_settings(environ)
    if settings is None:
        return Helpers()
    endpoint, purse = OpenAIEndpoint(settings), Purse.of(store.journal.llm_calls(study_id))

    def llm(own: LlmSettings) -> Llm:
        keep = partial(store.journal.record_llm_call, study_id)
        asker = Asker(endpoint, own, clock, keep=keep, tell=tell, purse=purse)
        return Llm(asker, own.model, own.answer_tokens)

    opinion = llm(settings.changed(patience_s=min(_HURRY_S, settings.patience_s)))
    if on_ray(options):
        return Helpers(opinion=opinion, why_none=NO_SANDBOX)
    return Helpers(
        mending=llm(_for_code(settings)),
        opinion=opinion,
    )


MODEL = "smollm2-135m"
"""Default model of a new instrument, unless the topic names another."""


def settings_for_writing() -> LlmSettings:
    """Return the LLM settings for writing an instrument.

    Raises: UsageError if no LLM is configured; PlanningRefused for an invalid setting.
    """
    settings = llm_settings(os.environ)
    if settings is None:
        raise UsageError(
            "--instrument new needs a planner LLM, and none is configured here; set RESEARCHER_LLM_MODEL, and RESEARCHER_LLM_API_KEY "
            "or RESEARCHER_LLM_BASE_URL; or name an existing instrument (see `researcher instruments`)"
        )
    return _for_code(settings)


async def new_instrument(
    topic: str,
    home: Home,
    settings: LlmSettings,
    calls: Sequence[LlmCall],
    keep: Keep,
    tell: Tell,
    *,
    endpoint: Endpoint | None = None,
    model: str = MODEL,
) -> InstrumentFolder:
    """Have an LLM write an instrument for the topic.

    `calls` are the LLM calls so far, which count toward the limits in `settings`. `keep` receives each new call.

    Raises: PlanningRefused.
    """
    purse = Purse.of(calls)
    asker = Asker(endpoint or OpenAIEndpoint(settings), settings, SystemClock(), keep=keep, tell=tell, purse=purse)
    tell(f"asking {settings.model} to write an instrument; its code runs {sandbox().words}")
    llm = Llm(asker, settings.model, settings.answer_tokens)
    found = await write_instrument(topic, llm, home.root / "instruments", model, tell)
    tell(f"wrote {found.instrument.name} to {found.path}; read it before you approve it")
    return found


def writer_of(
    home: Home, goal: CampaignGoal, settings: LlmSettings | None, tell: Tell, endpoint: Endpoint | None = None
) -> InstrumentWriter | None:
    """Return the instrument writer of a campaign; None without an LLM.

    `settings` belong to the LLM that leads the campaign, or None. `endpoint` defaults to the configured one.
    """
    if settings is None:
        return None
    # Imported here: LangGraph takes seconds to load, and studies never need it.
    from researcher.campaign.llm.strategist import within

    longer = _for_code(settings)

    async def write(words: str, aims: Sequence[Aim], left: Left, kept: Sequence[LlmCall], keep: Keep) -> NewInstrument:
        source, capped = KeptAnswers(endpoint or OpenAIEndpoint(longer), kept), within(longer, left, Purse.of(kept))

        def keep_new(call: LlmCall) -> None:
            if not source.gave(call):
                keep(call)

        try:
            made = await new_instrument(
                words, home, capped, (), keep_new, tell, endpoint=source, model=goal.model or MODEL
            )
            aim = aim_beside(goal, aims, made.instrument)
        except PlanningRefused as error:
            away = isinstance(error.__cause__, LlmUnusable) and not isinstance(error.__cause__, LlmSpent)
            raise (
                StrategistAway(f"{error}; then `researcher campaign resume`") if away else NotWritten(str(error))
            ) from error
        files = {name: file.read_bytes().decode("utf-8") for name, file in visible_files(made.path)}
        return NewInstrument(aim=aim, folder=str(made.path), author=capped.model, files=files)

    return write


def _for_code(settings: LlmSettings) -> LlmSettings:
    """Return the settings with a token limit large enough for a program."""
    return settings.changed(answer_tokens=max(_ANSWER_TOKENS, settings.answer_tokens))
