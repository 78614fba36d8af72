"""The honesty rules, each with somebody who tries to cheat."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from researcher.campaign.honesty import ALPHA, alpha_of, limits, problems_of
from researcher.campaign.judging import judged
from researcher.campaign.proposals import NewHypothesis, Proposal
from researcher.campaign.records import observe
from researcher.campaign.report import campaign_page
from researcher.campaign.seen import Seen
from researcher.campaign.verify import verify_campaign
from researcher.gates import Amendment, amend
from researcher.models import CampaignStatus, LlmCall
from researcher.store.errors import WrongState
from researcher.study.plan import Plan, Verdict
from tests.fakes.campaign import MadeUpCampaign, flat

pytestmark = pytest.mark.anyio

_NEW = NewHypothesis(claim="it is better", prediction="it rises", kill_if="it does not")
_BETTER = {"default": {}, "fast": {"learning_rate": 1.6e-4}}


class Cheat:
    """Proposes what it is told to, in order, and then concludes."""

    name = "cheat"

    def __init__(self, *proposals: Proposal) -> None:
        self._left = list(proposals)

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        end = Proposal(action="conclude", because="no more", words="It is proven beyond doubt.")
        return [self._left.pop(0)] if self._left else [end]

    def calls(self) -> list[LlmCall]:
        return []


def explore(**spec: Any) -> Proposal:
    given = {"design": "screen", "compare": {"learning_rate": {"levels": [4e-5]}, "temperature": {"levels": [1.5]}}}
    return Proposal(action="explore", because="a look", spec=given | spec, hypothesis=_NEW)


def confirm(action: Any = "confirm", **spec: Any) -> Proposal:
    given = {"design": "compare", "arms": _BETTER, "seeds": {"min": 4, "max": 20}}
    return Proposal(action=action, because="sure of it", spec=given | spec, hypothesis=_NEW)


async def test_all_confirmations_together_spend_five_percent_and_no_more() -> None:
    assert math.fsum(alpha_of(k) for k in range(1, 200_000)) == pytest.approx(ALPHA, rel=1e-4)
    assert all(alpha_of(k) > alpha_of(k + 1) for k in range(1, 50))


async def test_an_exploration_is_shown_and_never_claimed(tmp_path: Path) -> None:
    """Rule 1: however large its effect is."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert seen.studies[0].effects
    assert all(effect.verdict is None for effect in seen.studies[0].effects)
    assert seen.on().incumbent == {}
    page = campaign_page(made.store, made.id)
    assert page.answer[0] == "Nothing was confirmed, so no claim is made."
    assert [branch.fate for branch in page.tree] == ["explored"]


@pytest.mark.parametrize(
    ("cheating", "words"),
    [
        (confirm(seeds={"first": 0, "min": 4}), "seeds.first"),
        (confirm(metric="wall_s"), "metric"),
        (confirm(margin=0.0001), "margin"),
        (confirm(claim="equal"), "claim"),
        (confirm(budget={"trials": 10_000}), "budget"),
        (confirm(arms={**_BETTER, "again": {"learning_rate": 4e-5}}), "needs two"),
        (confirm(design="screen"), "plain comparison"),
        (confirm("replicate"), "nothing was confirmed yet"),
        (explore(question="ignore the rules"), "question"),
    ],
)
async def test_what_is_codes_cannot_be_set(tmp_path: Path, cheating: Proposal, words: str) -> None:
    """Rules 2 and 4: seeds, metric, margin and budget are not the strategist's."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    found = judged(cheating, observe(made.store, made.id), made.planner)
    assert found.plan is None
    assert words in " ".join(found.problems)


async def test_a_claim_needs_a_look_first_and_a_registered_hypothesis(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    seen = observe(made.store, made.id)
    assert "explore first" in " ".join(problems_of(confirm(), seen))
    assert "needs a hypothesis" in " ".join(problems_of(confirm().model_copy(update={"hypothesis": None}), seen))
    assert "no hypothesis 'H7'" in " ".join(problems_of(confirm().model_copy(update={"hypothesis": "H7"}), seen))


async def test_every_confirmation_counts_whether_it_succeeds_or_not(tmp_path: Path) -> None:
    """Rule 3: one who asks again and again is heard at a smaller alpha each time, on fresh seeds."""
    made = MadeUpCampaign(tmp_path, flat, strategist=Cheat(explore(), confirm(), confirm(), confirm()))
    await made.carry_out()
    decisions = made.store.campaigns.decisions(made.id)
    spent = [each.alpha for each in decisions if each.alpha is not None]
    assert spent == pytest.approx([alpha_of(1), alpha_of(2), alpha_of(3)])
    plans = [Plan.model_validate_json(each.plan) for each in decisions if each.plan]
    assert [hypothesis.alpha for plan in plans[1:] for hypothesis in plan.hypotheses] == pytest.approx(spent)
    used = [{trial.seed for trial in made.store.trials.all(each.study_id)} for each in decisions if each.study_id]
    assert sum(map(len, used)) == len(set().union(*used))
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_another_baseline_is_labelled(tmp_path: Path) -> None:
    """Rule 5: a straw man is easy to beat."""
    straw = {"slow": {"learning_rate": 2.5e-6}, "fast": {"learning_rate": 4e-5}}
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm(arms=straw)))
    await made.carry_out()
    [offer] = made.store.campaigns.decisions(made.id)[1].proposals
    assert offer["baseline"] == "other"
    [study] = [each for each in observe(made.store, made.id).studies if each.confirms]
    assert study.verdict is Verdict.SUPPORTED
    assert not study.supports
    assert observe(made.store, made.id).on().incumbent == {}


async def test_results_of_the_echo_engine_support_nothing(tmp_path: Path) -> None:
    """Rule 6."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm()), engine="echo")
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert seen.studies[1].verdict is Verdict.SUPPORTED
    assert "echo engine" in seen.studies[1].unfit
    assert seen.on().incumbent == {}
    assert "Nothing was confirmed" in campaign_page(made.store, made.id).answer[0]


async def test_invalid_results_support_nothing(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm()))
    made.runner.verdict = lambda found: Verdict.INVALID  # type: ignore[method-assign]
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert seen.studies[1].unfit == "a sentinel fired"
    assert [each.status for each in seen.hypotheses] == ["invalid", "invalid"]


async def test_rewards_that_an_llm_wrote_support_nothing(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm()))
    with made.store._db.engine.begin() as connection:
        aim = json.loads(connection.execute(text("SELECT aim FROM campaigns")).scalar_one())
        connection.execute(text("UPDATE campaigns SET aim = :aim"), {"aim": json.dumps({**aim, "generated": True})})
    await made.carry_out()
    assert "LLM wrote" in observe(made.store, made.id).studies[1].unfit
    assert observe(made.store, made.id).on().incumbent == {}


async def test_the_report_names_every_hypothesis(tmp_path: Path) -> None:
    """Rule 7: also those that were dropped."""
    end = Proposal(action="conclude", because="no more", words="done", drops={"H1": "it bores me"})
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), explore(), end))
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE
    assert outcome.report is not None
    told = (outcome.report / "report.md").read_text()
    assert "H1" in told
    assert "dropped" in told
    assert "it bores me" in told
    assert "H2" in told


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("UPDATE decisions SET saw = replace(saw, 'highest', 'lowest')", "no longer matches the hash"),
        ("UPDATE trial_metrics SET value = value + 1 WHERE step IS NULL", "give another input"),
        ("UPDATE decisions SET alpha = 0.04 WHERE alpha IS NOT NULL", "the rule gives"),
        ("UPDATE campaign_hypotheses SET claim = 'it was always so'", "give another input"),
        (
            "UPDATE campaign_events SET detail = '{\"words\": \"what a good idea\"}' WHERE kind = 'told'",
            "give another input",
        ),
    ],
)
async def test_verify_sees_what_was_changed_afterwards(tmp_path: Path, tampering: str, words: str) -> None:
    """Rule 8: the input of every decision is made again from the records before it."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm()))
    made.store.campaigns.record(made.id, "told", {"words": "try a higher rate", "by": "ada"})
    await made.carry_out()
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []
    with made.store._db.engine.begin() as connection:
        connection.execute(text(tampering))
    assert words in "; ".join(verify_campaign(made.store, made.id, made.folder / made.id))


async def test_one_study_gets_a_quarter_of_what_is_left_and_explorations_leave_the_reserve(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, budget={"trials": 100, "wall": 1000})
    seen = observe(made.store, made.id)
    assert limits("explore", seen) == {"wall": 250.0, "trials": 25}
    spent = seen.model_copy(update={"left": seen.left.model_copy(update={"trials": 35, "wall_s": 310.0})})
    assert limits("explore", spent) == {"wall": 10.0, "trials": 5}
    assert limits("confirm", spent) == {"wall": 77.5, "trials": 8}


async def test_a_confirmation_differs_from_the_defaults_in_its_arms_alone(tmp_path: Path) -> None:
    """Settings beside the arms, or factors that the goal does not have, would be claimed under a wrong name."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert "set: not a field" in " ".join(problems_of(confirm(set={"learning_rate": 1.6e-4}), seen))
    assert "steps: not a field" in " ".join(problems_of(confirm(steps=50), seen))
    foreign = {"default": {}, "better": {"max_tokens": 64}}
    assert "max_tokens is not one of the goal's factors" in " ".join(problems_of(confirm(arms=foreign), seen))


async def test_what_ran_with_other_settings_stands_for_none_of_the_goals(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), explore(set={"max_tokens": 64})))
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert [study.apart for study in seen.studies] == [False, True]
    assert all(n == 2 for _, n, _ in seen.on().measured().values())


async def test_a_study_of_a_campaign_is_not_amended_behind_its_back(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, approve="study")
    await made.carry_out()
    [decision] = made.store.campaigns.decisions(made.id)
    study = decision.study_id
    assert study is not None
    made.store.plans.save(study, Plan.model_validate_json(decision.plan or ""))
    with pytest.raises(WrongState, match="veto it there"):
        amend(made.store, study, Amendment(seeds=9), because="more", by="ada")


@pytest.mark.parametrize("spec", [{"seeds": 6}, {"seeds": "5..9"}, {"set": ["a"]}, {"arms": 3}, {"arms": None}])
async def test_a_badly_typed_spec_is_refused_and_breaks_nothing(tmp_path: Path, spec: dict[str, Any]) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    found = judged(confirm(**spec), observe(made.store, made.id), made.planner)
    assert found.plan is None
    assert found.problems


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ({"default": {}, "wild": {"learning_rate": 0.009}}, "not one of the goal's levels"),
        ({"one": {}, "other": {}}, "nothing to confirm"),
    ],
)
async def test_a_confirmation_keeps_to_the_goals_levels(tmp_path: Path, arms: dict[str, Any], words: str) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    assert words in " ".join(judged(confirm(arms=arms), observe(made.store, made.id), made.planner).problems)


@pytest.mark.parametrize(
    "cheating",
    [
        explore(),
        explore(compare={"kl": {"levels": [0.1]}, "epochs": {"levels": [2]}}, set={"temperature": 1.5}),
        explore(design="compare", compare={}, arms={"default": {}, "warm": {"temperature": 1.5, "kl": 0.1}}),
        confirm(arms={"default": {}, "warm": {"temperature": 1.5}}),
        explore(compare={"temperature": {"baseline": 1.5, "levels": [1.0]}, "learning_rate": {"levels": [4e-5]}}),
    ],
)
async def test_what_a_person_wants_left_alone_is_varied_by_no_study(tmp_path: Path, cheating: Proposal) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore()))
    await made.carry_out()
    seen = observe(made.store, made.id)
    alone = seen.model_copy(update={"aim": seen.aim.leaving(["temperature"])})
    problem = "temperature: a person wants it to stay as it is; leave it out"
    assert problem not in judged(cheating, seen, made.planner).problems
    assert problem in judged(cheating, alone, made.planner).problems
