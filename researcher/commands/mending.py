"""The workshop of a study as this machine has it: which LLM may mend, and what that may cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from foundation.clock import Clock
from foundation.commandline import UsageError
from researcher.commands.clients import NO_SANDBOX, on_ray
from researcher.commands.home import Home
from researcher.environments import interpreter
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.asking import Asker, Purse
from researcher.llm.endpoint import OpenAIEndpoint
from researcher.llm.settings import LlmSettings, llm_settings
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.workshop.asking import Llm
from researcher.workshop.checks import Unfit
from researcher.workshop.repairs import Helpers, RepairLimits, Workshop

_ANSWER_TOKENS = 16_384
"""Of a mended version: whole files."""
_HURRY_S = 60.0
"""How long an opinion is worth waiting for."""

Tell = Callable[[str], None]


def workshop_of(
    home: Home, store: Store, study_id: str, plan: Plan, folder: InstrumentFolder, clock: Clock, tell: Tell
) -> Workshop:
    """With what a person mended by hand taken up.

    Raises: UsageError when that cannot be used; InstrumentChanged; PlanningRefused where the instrument's packages are not there.
    """
    choices = store.study(study_id).options
    most = int(choices.get("repairs", 0))
    workshop = Workshop(
        store,
        study_id,
        plan,
        folder,
        home.studies / study_id / "code",
        python=interpreter(folder, home.root),
        helpers=helpers(store, study_id, choices, clock, tell, os.environ),
        limits=RepairLimits(per_study=most),
        tell=tell,
    )
    try:
        workshop.by_hand()
    except Unfit as error:
        raise UsageError(f"the mended instrument cannot be used: {error}") from error
    return workshop


def helpers(
    store: Store, study_id: str, choices: Mapping[str, Any], clock: Clock, tell: Tell, environ: Mapping[str, str]
) -> Helpers:
    """The LLM that is configured, where the study permits it. Tokens and cost count with those of its planning."""
    if not choices.get("repairs"):
        return Helpers(why_none="the study permits no repairs (--repairs 0)")
    settings = llm_settings(environ)
    if settings is None:
        return Helpers()
    endpoint, purse = OpenAIEndpoint(settings), Purse.of(store.llm_calls(study_id))

    def llm(own: LlmSettings) -> Llm:
        keep = partial(store.record_llm_call, study_id)
        asker = Asker(endpoint, own, clock, keep=keep, tell=tell, purse=purse)
        return Llm(asker, own.model, own.answer_tokens)

    opinion = llm(replace(settings, patience_s=min(_HURRY_S, settings.patience_s)))
    if on_ray(choices):
        return Helpers(opinion=opinion, why_none=NO_SANDBOX)
    return Helpers(
        mending=llm(replace(settings, answer_tokens=max(_ANSWER_TOKENS, settings.answer_tokens))), opinion=opinion
    )
