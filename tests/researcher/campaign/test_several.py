"""Campaigns over several instruments: what carries over from one to another, what never does, and who tries to have it so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import text

from bench.campaigns import FACTORS
from bench.made_up_studies import instrument
from researcher.campaign.builtin import proposals
from researcher.campaign.goal import CampaignGoal, aims_of
from researcher.campaign.honesty import alpha_of, problems_of
from researcher.campaign.judging import judged
from researcher.campaign.llm.prompt import MOST_TOKENS
from researcher.campaign.llm.tools import ENDINGS, NextStep, tool_schemas
from researcher.campaign.people import request_study, veto
from researcher.campaign.proposals import Proposal
from researcher.campaign.records import observe
from researcher.campaign.report import campaign_page
from researcher.campaign.seen import Seen
from researcher.campaign.verify import verify_campaign
from researcher.cli.campaign import status_json, status_lines
from researcher.home import Home
from researcher.llm.asking import tokens_of
from researcher.llm.replies import FORMS, Call, form_fields
from researcher.refusals import SpecRefused
from researcher.study.plan import Plan
from tests.fakes.campaign import MadeUpCampaign, flat, steep
from tests.fakes.scripted_llm import ScriptedLlm
from tests.fakes.strategists import strategist, texts
from tests.researcher.campaign.test_honesty import Cheat, confirm, explore
from tests.researcher.campaign.test_llm_strategist import long_campaign

pytestmark = pytest.mark.anyio

BEST = {"learning_rate": 1.6e-4}


def on(name: str, proposal: Proposal, **changes: Any) -> Proposal:
    return proposal.model_copy(update={"instrument": name, **changes})


def seen_of(made: MadeUpCampaign) -> Seen:
    return observe(made.store, made.id)


def course(made: MadeUpCampaign) -> list[tuple[str, str]]:
    """What each study was, and where."""
    plans = [(each.action, each.plan) for each in made.store.campaigns.decisions(made.id) if each.plan]
    return [(action, Plan.model_validate_json(plan).instrument) for action, plan in plans]


def differences(made: MadeUpCampaign) -> list[str]:
    return verify_campaign(made.store, made.id, made.folder / made.id)


# -- the built-in strategist --------------------------------------------------------------------------------------------------


async def test_what_was_confirmed_on_one_is_confirmed_on_the_next_before_that_is_searched(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": steep}, sigma=0.03)
    await made.carry_out()
    ran = course(made)
    first = ran.index(("confirm", "simulation"))
    assert all(where == "simulation" for _, where in ran[: first + 1])
    assert ran[first + 1] == ("confirm", "elsewhere")
    assert ("explore", "elsewhere") in ran[first + 2 :]
    seen = seen_of(made)
    assert [view.incumbent for view in seen.views] == [BEST, BEST]
    also = seen.on("elsewhere").studies[0]
    assert made.store.campaigns.decisions(made.id)[also.seq - 1].proposals[0]["proposal"]["rests_on"] == [
        seen.studies[first].study
    ]
    answer = " ".join(campaign_page(made.store, made.id).answer)
    assert "On simulation: Learning_rate 1.6e-4 is the best that was confirmed." in answer
    assert "On elsewhere: Learning_rate 1.6e-4 is the best that was confirmed." in answer
    assert f"Learning_rate 1.6e-4, confirmed on simulation, held on elsewhere too ({also.study})." in answer
    assert differences(made) == []


async def test_what_does_not_hold_elsewhere_is_said_and_that_one_is_searched_by_itself(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": flat}, sigma=0.03)
    await made.carry_out()
    seen = seen_of(made)
    assert [view.incumbent for view in seen.views] == [BEST, {}]
    assert ("explore", "elsewhere") in course(made)
    page = campaign_page(made.store, made.id)
    answer = " ".join(page.answer)
    assert "On elsewhere: Nothing was confirmed to be better than the default." in answer
    assert "confirmed on simulation, was not confirmed on elsewhere" in answer
    assert [(best.on, best.words) for best in page.best] == [
        ("simulation", "learning_rate 1.6e-4"),
        ("elsewhere", "the default"),
    ]
    assert differences(made) == []


async def test_an_instrument_where_nothing_is_found_leaves_the_next_its_share(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, flat, further={"elsewhere": steep})
    await made.carry_out()
    seen = seen_of(made)
    assert seen.on("elsewhere").incumbent["learning_rate"] == BEST["learning_rate"]
    assert sum(study.trials for study in seen.on().studies) < 0.8 * 240
    assert differences(made) == []


async def test_confirmations_and_seeds_are_counted_over_all_instruments(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": steep})
    await made.carry_out()
    decisions = [each for each in made.store.campaigns.decisions(made.id) if each.study_id]
    spent = [each.alpha for each in decisions if each.alpha is not None]
    assert len(spent) >= 2
    assert spent == pytest.approx([alpha_of(number) for number in range(1, len(spent) + 1)])
    used = [{trial.seed for trial in made.store.trials.all(each.study_id or "")} for each in decisions]
    assert sum(map(len, used)) == len(set().union(*used))


# -- those who cheat ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def confirmed(tmp_path: Path) -> MadeUpCampaign:
    """One that was explored and confirmed on its first instrument alone."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm()), further={"elsewhere": steep})
    await made.carry_out()
    return made


async def test_what_one_instrument_showed_is_no_claim_and_no_number_of_another(confirmed: MadeUpCampaign) -> None:
    there = seen_of(confirmed).on("elsewhere")
    assert seen_of(confirmed).on().incumbent == BEST
    assert (there.incumbent, there.measured(), there.studies) == ({}, {}, ())
    assert there.sigma == there.aim.margin, "nobody has measured its noise"
    page = campaign_page(confirmed.store, confirmed.id)
    assert "On elsewhere: Nothing was confirmed, so no claim is made." in page.answer
    assert "was not tested on elsewhere" in " ".join(page.answer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hypothesis": "H2", "rests_on": ("{confirmed}",)}, "H2 is about simulation; register a new one"),
        ({}, "explore first on elsewhere, or rest it on the study that confirmed this setting"),
        ({"rests_on": ("{explored}",)}, "explore first on elsewhere"),
        ({"rests_on": ("{confirmed}",), "arms": {"default": {}, "other": {"temperature": 1.5}}}, "explore first"),
        ({"rests_on": ("{confirmed}",), "arms": {"best": dict(BEST), "other": {"temperature": 1.5}}}, "explore first"),
        ({"action": "replicate", "rests_on": ("{confirmed}",)}, "nothing was confirmed on elsewhere yet"),
    ],
)
async def test_a_claim_is_not_carried_over_without_a_test(
    confirmed: MadeUpCampaign, changes: dict[str, Any], words: str
) -> None:
    seen = seen_of(confirmed)
    names = {"explored": seen.studies[0].study, "confirmed": seen.studies[1].study}
    asked = {**changes, "rests_on": tuple(each.format(**names) for each in changes.get("rests_on", ()))}
    arms = asked.pop("arms", None)
    cheating = on("elsewhere", confirm() if arms is None else confirm(arms=arms), **asked)
    assert words in " ".join(problems_of(cheating, seen))


async def test_it_may_be_tested_where_it_rests_on_the_confirmation(confirmed: MadeUpCampaign) -> None:
    seen = seen_of(confirmed)
    found = judged(on("elsewhere", confirm(), rests_on=(seen.studies[1].study,)), seen, confirmed.planner)
    assert found.problems == ()
    assert found.alpha == pytest.approx(alpha_of(2))
    assert found.baseline == "default"
    assert found.spec["seeds"]["first"] == seen.next_seed


async def test_the_best_of_one_instrument_is_no_incumbent_of_another(tmp_path: Path) -> None:
    straw = confirm(arms={"best": BEST, "middle": {"learning_rate": 4e-5}})
    cheat = Cheat(explore(), confirm(), on("elsewhere", explore()), on("elsewhere", straw))
    made = MadeUpCampaign(tmp_path, strategist=cheat, further={"elsewhere": lambda levels: -steep(levels)})
    await made.carry_out()
    seen = seen_of(made)
    assert (seen.studies[3].instrument, seen.studies[3].baseline) == ("elsewhere", "other")
    assert [view.incumbent for view in seen.views] == [BEST, {}]


async def test_what_was_measured_on_one_makes_a_study_on_another_no_cheaper_in_bits(confirmed: MadeUpCampaign) -> None:
    seen = seen_of(confirmed)
    fresh = seen.model_copy(update={"studies": (), "hypotheses": ()})
    look = explore()
    before, after = (judged(on("elsewhere", look), each, confirmed.planner).bits for each in (fresh, seen))
    assert before == pytest.approx(after)
    assert judged(look, seen, confirmed.planner).bits != pytest.approx(after)


async def test_an_instrument_that_an_llm_wrote_supports_no_claim_and_carries_none_over(tmp_path: Path) -> None:
    """Rule 6, whichever place it has among the campaign's."""
    cheat = Cheat(on("elsewhere", explore()), on("elsewhere", confirm()))
    made = MadeUpCampaign(tmp_path, strategist=cheat, further={"elsewhere": steep}, written=["elsewhere"])
    await made.carry_out()
    seen = seen_of(made)
    assert ["LLM wrote" in study.unfit for study in seen.studies] == [True, True]
    assert seen.on("elsewhere").incumbent == {}
    carried = confirm().model_copy(update={"rests_on": (seen.studies[1].study,)})
    assert "explore first on simulation" in " ".join(problems_of(carried, seen))
    assert differences(made) == []


@pytest.mark.parametrize(
    ("proposal", "words"),
    [
        (on("elswhere", explore()), "did you mean elsewhere?"),
        (on("arithmetic", explore()), "no instrument of this campaign is called 'arithmetic'; it has"),
        (explore(instrument="elsewhere"), "instrument"),
        (Proposal(action="ask", because="?", words="well?", instrument="elsewhere"), "leave the instrument out"),
    ],
)
async def test_an_instrument_is_one_of_the_campaigns_named_beside_the_spec(
    tmp_path: Path, proposal: Proposal, words: str
) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": steep})
    assert words in " ".join(problems_of(proposal, seen_of(made)))


async def test_verify_sees_an_instrument_that_joined_otherwise(confirmed: MadeUpCampaign) -> None:
    assert differences(confirmed) == []
    with confirmed.store._db.engine.begin() as connection:
        connection.execute(
            text("UPDATE campaign_events SET detail = replace(detail, '0.1', '0.01') WHERE kind = 'joined'")
        )
    assert "give another input (others)" in "; ".join(differences(confirmed))


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("detail = replace(detail, 'elsewhere', 'somewhere')", "somewhere: it joined, but the goal does not name it"),
        ("kind = 'noted'", "elsewhere: the goal names it, but it did not join"),
    ],
)
async def test_verify_sees_an_instrument_that_the_goal_does_not_name(
    confirmed: MadeUpCampaign, tampering: str, words: str
) -> None:
    with confirmed.store._db.engine.begin() as connection:
        connection.execute(text(f"UPDATE campaign_events SET {tampering} WHERE kind = 'joined'"))
    assert words in "; ".join(differences(confirmed))


async def test_verify_sees_instruments_that_joined_in_another_order(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(), further={"one": steep, "two": flat})
    await made.carry_out()
    assert differences(made) == []
    with made.store._db.engine.begin() as connection:
        connection.execute(text('UPDATE campaigns SET goal = replace(goal, \'"one", "two"\', \'"two", "one"\')'))
    assert "one: it joined, but the goal does not name it there" in "; ".join(differences(made))


async def test_a_vetoed_confirmation_tested_nothing(tmp_path: Path) -> None:
    there = on("elsewhere", explore()), on("elsewhere", confirm())
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), confirm(), *there), further={"elsewhere": steep})

    def vetoes(study_id: str) -> None:
        if len(made.store.campaigns.decisions(made.id)) == 4:
            veto(made.store, made.id, "not now", "ada")

    made.runner.before = vetoes
    await made.carry_out()
    answer = " ".join(campaign_page(made.store, made.id).answer)
    assert "was not confirmed on elsewhere" not in answer
    assert f"has no verdict on elsewhere ({seen_of(made).studies[3].study}: no trial was finished)" in answer


@pytest.mark.parametrize(("about", "counts"), [("simulation", True), ("elsewhere", False)])
async def test_a_veto_counts_on_the_instrument_that_it_is_about(tmp_path: Path, about: str, counts: bool) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": steep}, factors=list(FACTORS), budget={"trials": 400})
    undisturbed = seen_of(made)
    first, second, *_ = proposals(undisturbed)
    words = {"words": "not that", "by": "ada", "decision": 1, "instrument": about}
    made.store.campaigns.record(made.id, "vetoed", words)
    assert proposals(seen_of(made))[0] == (second if counts else first)


async def test_a_veto_says_what_it_is_about_and_one_of_an_earlier_version_does_not(tmp_path: Path) -> None:
    there = on("elsewhere", explore()), on("elsewhere", explore())
    made = MadeUpCampaign(tmp_path, strategist=Cheat(explore(), *there, explore()), further={"elsewhere": steep})

    def vetoes(study_id: str) -> None:
        if len(made.store.campaigns.decisions(made.id)) in (1, 2):
            veto(made.store, made.id, "not now", "ada")

    made.runner.before = vetoes
    made.store.campaigns.record(made.id, "vetoed", {"words": "not that", "by": "ada", "decision": 0})
    await made.carry_out()
    assert [said.instrument for said in seen_of(made).said] == ["", "", "elsewhere"]
    whole = seen_of(made).model_dump(mode="json")["said"]
    assert ["instrument" in said for said in whole] == [False, False, True]
    assert differences(made) == []


async def test_a_study_is_not_scored_on_another_instrument_of_the_campaign(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, further={"elsewhere": steep})
    for proposal in (explore(evaluate_on=["elsewhere"]), confirm(evaluate_on=["elsewhere"])):
        assert "evaluate_on: elsewhere is an instrument of this campaign" in " ".join(
            problems_of(proposal, seen_of(made))
        )
    assert problems_of(explore(evaluate_on=["arithmetic"]), seen_of(made)) == []
    spec = {"compare": {"temperature": {"levels": [1.25]}}, "evaluate_on": ["simulation"], "instrument": "elsewhere"}
    with pytest.raises(SpecRefused, match="simulation is an instrument of this campaign"):
        request_study(made.store, made.id, spec, "it matters there", "ada")


# -- goals, requests and pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"factors": ["max_tokens"]}, "factors.max_tokens: poorer has no factor"),
        ({"set": {"max_tokens": 64}}, "set.max_tokens: poorer has no factor"),
        ({"objective": {"metric": "final_reward"}}, "objective.metric: poorer has no metric"),
        ({"objective": {"margin": 0.05}}, "objective.margin: applies to one metric"),
        ({"factors": {"temperature": [9.0]}}, "on simulation: temperature goes from"),
        ({"instruments": ["simulation", "simulation"]}, "names one of them twice"),
    ],
)
def test_a_goal_that_one_of_its_instruments_cannot_pursue_is_refused_with_its_name(
    fields: dict[str, Any], words: str
) -> None:
    whole = instrument().instrument
    metric = next(each for each in whole.metrics if each.name == whole.defaults.metric)
    poorer = whole.model_copy(
        update={
            "name": "poorer",
            "factors": tuple(factor for factor in whole.factors if factor.name != "max_tokens"),
            "metrics": (metric.model_copy(update={"name": "other", "aliases": ()}),),
            "defaults": whole.defaults.model_copy(update={"metric": "other"}),
        }
    )
    document = {"goal": "better", "instruments": ["simulation", "poorer"], "budget": {"trials": 90}, **fields}
    with pytest.raises((SpecRefused, ValidationError), match=words):
        aims_of(CampaignGoal.model_validate(document), [whole, poorer])


async def test_people_ask_for_studies_on_any_of_them(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(), further={"elsewhere": steep})
    spec = {"compare": {"temperature": {"levels": [1.25]}}, "seeds": {"min": 3, "max": 3}}
    with pytest.raises(SpecRefused, match="did you mean elsewhere"):
        request_study(made.store, made.id, {**spec, "instrument": "elsewher"}, "it matters", "ada")
    request_study(made.store, made.id, {**spec, "instrument": "elsewhere"}, "it matters there", "ada")
    await made.carry_out()
    assert course(made) == [("explore", "elsewhere")]
    assert differences(made) == []


async def test_status_says_what_is_confirmed_on_each(confirmed: MadeUpCampaign) -> None:
    record = confirmed.store.campaigns.get(confirmed.id)
    document = status_json(Home(confirmed.folder, confirmed.store), record)
    assert [each["incumbent"] for each in document["instruments"]] == [BEST, {}]
    lines = status_lines(document)
    assert "best confirmed on simulation: learning_rate=0.00016" in lines
    assert "nothing is confirmed on elsewhere yet" in lines


# -- the LLM ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
async def test_the_prompt_has_a_block_for_each_and_rows_that_name_it(confirmed: MadeUpCampaign, form: str) -> None:
    seen = seen_of(confirmed)
    shown = texts({"messages": subject(confirmed, seen).first_messages(form)})
    for words in (
        "# Aim on simulation",
        "# Aim on elsewhere",
        "Nothing on elsewhere: the default stands.",
        " on simulation: confirm H2",
    ):
        assert words in shown, words


@pytest.mark.parametrize("form", FORMS)
async def test_many_instruments_and_a_long_campaign_fit_the_prompt(tmp_path: Path, form: str) -> None:
    made = MadeUpCampaign(tmp_path, further={f"elsewhere-{n}": steep for n in range(6)})
    seen = long_campaign(seen_of(made), "word " * 400)
    schemas = tool_schemas(seen.instruments)
    asked = {"messages": subject(made, seen).first_messages(form), **form_fields(form, schemas, ENDINGS)}
    assert tokens_of(asked) <= MOST_TOKENS
    assert "# Aim on elsewhere-5" in texts(asked)


async def test_its_tools_take_an_instrument_where_there_are_several(confirmed: MadeUpCampaign) -> None:
    asked = subject(confirmed, seen_of(confirmed))
    [price] = [each["function"] for each in asked.tools() if each["function"]["name"] == "price"]
    assert price["parameters"]["properties"]["instrument"]["enum"] == ["simulation", "elsewhere"]
    spec = explore().spec
    there = asked.look_up(Call("c1", "price", {"action": "explore", "spec": spec, "instrument": "elsewhere"}))
    assert "It can be planned" in there
    assert "did you mean" in asked.look_up(
        Call("c1", "price", {"action": "explore", "spec": spec, "instrument": "elsewhre"})
    )
    assert "did you mean" in asked.look_up(Call("c1", "instrument", {"name": "elsewhre"}))
    assert "learning_rate" in asked.look_up(Call("c1", "instrument", {"name": "elsewhere"}))


def subject(made: MadeUpCampaign, seen: Seen) -> NextStep:
    asked = strategist(ScriptedLlm(), made)
    return NextStep(seen, asked._planner, asked._evidence)


# -- campaigns of earlier versions --------------------------------------------------------------------------------------------------


def test_what_decisions_saw_before_keeps_its_digest() -> None:
    """The input of a decision on one instrument, as it was recorded before a campaign could have several."""
    kept = json.loads((Path(__file__).parent / "earlier_decision.json").read_text())
    seen = Seen.model_validate(kept["saw"])
    assert seen.digest() == kept["saw_digest"]
    assert seen.model_dump(mode="json") == kept["saw"]
    assert "instrument" not in tool_schemas(seen.instruments)[0]["function"]["parameters"]["properties"]
