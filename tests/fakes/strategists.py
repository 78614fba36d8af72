"""What tests of strategists share: an LLM that answers with given proposals, its strategist, and states of a campaign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.made_up_studies import instrument
from foundation.clock import Clock, ManualClock
from researcher.campaign.builtin import proposals
from researcher.campaign.llm.evidence import StoreEvidence
from researcher.campaign.llm.strategist import LlmStrategist
from researcher.campaign.proposals import Proposal
from researcher.campaign.records import keep_call, kept_calls, observe
from researcher.campaign.seen import Seen
from researcher.llm.endpoint import Endpoint, LlmSettings
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.scripted_llm import ScriptedLlm, called

LOOK: dict[str, Any] = {
    "design": "screen",
    "compare": {"learning_rate": {"levels": [4e-5]}, "temperature": {"levels": [1.5]}},
}
NEW: dict[str, Any] = {"claim": "it is better", "prediction": "it rises", "kill_if": "it does not"}
EXPLORE: dict[str, Any] = {"action": "explore", "because": "a look", "spec": LOOK, "hypothesis": NEW}
CONFIRM: dict[str, Any] = {
    "action": "confirm",
    "because": "it looks best",
    "spec": {
        "design": "compare",
        "arms": {"default": {}, "fast": {"learning_rate": 1.6e-4}},
        "seeds": {"min": 4, "max": 20},
    },
    "hypothesis": NEW,
}
CONCLUDE: dict[str, Any] = {"action": "conclude", "because": "nothing is left", "words": "That is all."}


class Jumping(ManualClock):
    """A clock on which whoever sleeps has slept at once."""

    async def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))


def proposing(*each: dict[str, Any] | Proposal, **usage: Any) -> dict[str, Any]:
    """A chat completion that ends with these proposals."""
    made = [one.model_dump(mode="json") if isinstance(one, Proposal) else one for one in each]
    return called(("propose", {"proposals": made}), **usage)


def strategist(
    endpoint: Endpoint, made: MadeUpCampaign, *, clock: Clock | None = None, kept: bool = True, **settings: Any
) -> LlmStrategist:
    return LlmStrategist(
        endpoint,
        LlmSettings(model="some-llm", **settings),
        clock or Jumping(),
        planner=made.planner,
        evidence=StoreEvidence(made.store, lambda name: instrument().instrument, on_echo=False),
        checkpoints=made.store.url if kept else None,
        tell=made.told.append,
        keep=lambda seen, call: keep_call(made.store, made.id, seen, call),
        kept=lambda seen: kept_calls(made.store, made.id, seen),
    )


def as_builtin(seen: Callable[[], Seen]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An LLM with good sense: it proposes what the built-in strategist would."""
    return lambda request: proposing(*proposals(seen())[:5])


def texts(request: dict[str, Any]) -> str:
    """Everything that an LLM was sent in a request."""
    return "\n".join(str(message.get("content")) for message in request["messages"])


def steps(decisions: Sequence[Any]) -> list[str]:
    return [each.action for each in decisions]


_seen: dict[str, str] = {}
"""What decisions 2 and 3 of a campaign saw, once it has run: one for all tests of a process."""


async def campaign_at(folder: Path, when: str) -> tuple[MadeUpCampaign, Seen]:
    """A campaign in its fresh state; and what a campaign saw that was `fresh`, `screened`, `confirmed`, or had nothing left (`spent`)."""
    made = MadeUpCampaign(folder)
    if when == "fresh":
        return made, observe(made.store, made.id)
    if not _seen:
        ran = MadeUpCampaign(folder, url=f"sqlite:///{folder}/ran.sqlite")
        ran.strategist = strategist(ScriptedLlm(*(proposing(each) for each in (EXPLORE, CONFIRM, CONCLUDE))), ran)
        await ran.carry_out()
        _seen["screened"] = observe(ran.store, ran.id, 2).canonical()
        _seen["confirmed"] = observe(ran.store, ran.id, 3).canonical()
    seen = Seen.model_validate_json(_seen["screened" if when == "screened" else "confirmed"])
    if when == "spent":
        left = seen.left.model_copy(update={"trials": 0, "reserved_trials": 0.0})
        seen = seen.model_copy(update={"left": left})
    return made, seen
