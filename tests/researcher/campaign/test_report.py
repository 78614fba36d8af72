"""What the report says of held-out tasks beside a claim about training, and that `verify` makes it again."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from foundation.paths import write_atomically
from researcher.campaign.report import REPORT, campaign_page, campaign_wording, held_out_text, rendered
from researcher.campaign.seen import Levels
from researcher.campaign.verify import verify_campaign
from researcher.instruments.instrument import Metric
from researcher.report.writer import digest
from tests.fakes.campaign import MadeUpCampaign, steep

pytestmark = pytest.mark.anyio

SENTENCE = (
    "On average over the same trials, held-out accuracy after training is 0.75 with learning_rate=1.6e-4 "
    "and 0.25 with default."
)
TRAINING = Metric(name="auc_reward", kind="auc_reward", margin=0.1)
ARMS = {"fast": [{"eval_reward_after": [(0, 0.5), (1, 1.0)]}], "slow": [{"eval_reward_after": [(0, 0.25), (1, 0.25)]}]}


def solved(levels: Levels) -> float:
    return 0.25 + steep(levels)


async def carried_out(folder: Path, *series: str) -> MadeUpCampaign:
    """A campaign that confirms a learning rate; its trials have these held-out series."""
    made = MadeUpCampaign(folder)
    made.runner.solves = dict.fromkeys(series, solved)
    await made.carry_out()
    assert campaign_page(made.store, made.id).seen.on().confirmed is not None
    return made


def problems(made: MadeUpCampaign) -> list[str]:
    return verify_campaign(made.store, made.id, made.folder / made.id)


async def test_a_claim_about_training_says_how_its_arms_do_on_held_out_tasks_and_verify_makes_it_again(
    tmp_path: Path,
) -> None:
    made = await carried_out(tmp_path, "eval_success_after", "eval_reward_after")
    folder = tmp_path / made.id
    assert SENTENCE in campaign_page(made.store, made.id).answer
    assert SENTENCE in (folder / "report.md").read_text()
    assert SENTENCE in unescape((folder / "report.html").read_text())
    assert problems(made) == []
    with create_engine(made.store.url).begin() as database:
        database.execute(text("UPDATE trial_metrics SET value = 1 WHERE name = 'eval_success_after'"))
    assert {line.split(" does not ")[0] for line in problems(made)} == {"report.md", "report.html"}


async def test_a_report_from_before_still_holds_and_is_written_anew_with_the_scores(tmp_path: Path) -> None:
    made = await carried_out(tmp_path, "eval_success_after", "eval_reward_after")
    earlier = rendered(campaign_page(made.store, made.id, held_out=False))
    assert not any("held-out accuracy" in each for each in earlier.values())
    for name, told in earlier.items():
        write_atomically(tmp_path / made.id / name, told.encode())
    files = {name: digest(told.encode()) for name, told in earlier.items()}
    made.store.campaigns.record(made.id, REPORT, {"files": files, "status": None, "reason": None})
    assert problems(made) == []
    await made.carry_out()
    assert SENTENCE in (tmp_path / made.id / "report.md").read_text()
    assert problems(made) == []


async def test_another_versions_words_hold_with_the_same_numbers_and_this_versions_only_as_they_are(
    tmp_path: Path,
) -> None:
    made = await carried_out(tmp_path)
    ours = rendered(campaign_page(made.store, made.id))

    def recorded(change: tuple[str, str], **said: str) -> list[str]:
        told = {name: each.replace(*change) for name, each in ours.items()}
        assert told != ours
        for name, each in told.items():
            write_atomically(tmp_path / made.id / name, each.encode())
        files = {name: digest(each.encode()) for name, each in told.items()}
        made.store.campaigns.record(
            made.id, REPORT, {"files": files, "status": None, "reason": None, "held_out": True, **said}
        )
        return problems(made)

    words = ("Explorations show", "What was explored shows")
    assert recorded(words) == []
    assert recorded(words, wording="another") == []
    for other in ("17 explorations show", "<data>17</data> explorations show", "<b>17 show", "It is supported to show"):
        changed = recorded(("Explorations show", other), wording="another")
        assert {line.split(" does not ")[0] for line in changed} == {"report.md", "report.html"}, other
    assert {line.split(" does not ")[0] for line in recorded(words, wording=campaign_wording())} == {
        "report.md",
        "report.html",
    }


async def test_nothing_is_said_of_held_out_tasks_where_nothing_was_recorded(tmp_path: Path) -> None:
    made = await carried_out(tmp_path)
    assert "held-out accuracy" not in (tmp_path / made.id / "report.md").read_text()
    assert problems(made) == []


def test_without_successes_it_is_the_reward_and_a_held_out_metric_needs_no_such_line() -> None:
    told = "held-out reward after training is 0.75 with fast and 0.25 with slow."
    assert held_out_text(TRAINING, ARMS) == f"On average over the same trials, {told}"
    assert held_out_text(Metric(name="heldout_reward", kind="heldout_reward", margin=0.1), ARMS) == ""
    assert held_out_text(TRAINING, {**ARMS, "slow": []}) == ""
    assert held_out_text(TRAINING, {**ARMS, "slow": [{}]}) == ""


def test_of_several_models_it_is_the_one_that_the_claim_is_about() -> None:
    arms = {
        arm: [{f"judge/{name}": line for name, line in series.items()} for series in trials]
        for arm, trials in ARMS.items()
    }
    told = held_out_text(TRAINING.model_copy(update={"role": "judge"}), arms)
    assert "held-out reward of the judge after training is 0.75 with fast and 0.25 with slow" in told
