"""`--instrument new`: an instrument that the planner LLM writes for the topic, before the study is planned."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from foundation.clock import SystemClock
from foundation.commandline import UsageError
from researcher.commands.home import Home
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.asking import Asker, Purse
from researcher.llm.endpoint import Endpoint, OpenAIEndpoint
from researcher.llm.settings import LlmSettings, llm_settings
from researcher.models import LlmCall
from researcher.sandbox.launch import sandbox
from researcher.workshop.asking import Llm
from researcher.workshop.writing import write_instrument

_ANSWER_TOKENS = 16_384
MODEL = "smollm2-135m"
"""That a new instrument trains, unless the topic names another."""

Tell = Callable[[str], None]


def settings_for_writing() -> LlmSettings:
    """Raises: UsageError where no LLM is configured; PlanningRefused for a setting that is wrong."""
    settings = llm_settings(os.environ)
    if settings is None:
        raise UsageError(
            "--instrument new needs a planner LLM to write one, and none is configured here; set RESEARCHER_LLM_MODEL and "
            "RESEARCHER_LLM_API_KEY or RESEARCHER_LLM_BASE_URL, or name an instrument of `researcher instruments`"
        )
    return replace(settings, answer_tokens=max(_ANSWER_TOKENS, settings.answer_tokens))


async def new_instrument(
    topic: str,
    home: Home,
    settings: LlmSettings,
    calls: list[LlmCall],
    tell: Tell,
    *,
    endpoint: Endpoint | None = None,
    model: str = MODEL,
) -> InstrumentFolder:
    """calls: what was asked and answered is put there; what it holds already was paid by the same study. Raises: PlanningRefused."""
    purse = Purse.of(calls)
    asker = Asker(
        endpoint or OpenAIEndpoint(settings), settings, SystemClock(), keep=calls.append, tell=tell, purse=purse
    )
    tell(f"asking {settings.model} to write an instrument; what it writes runs {sandbox().words}")
    llm = Llm(asker, settings.model, settings.answer_tokens)
    found = await write_instrument(topic, llm, home.root / "instruments", model, tell)
    tell(f"{found.instrument.name} was written to {found.path}; read it before you approve the plan")
    return found
