"""What people are told of a campaign, and that it holds no more than they may read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from researcher.models import NoticeKind, StudyStatus
from researcher.notify.campaign_watch import CampaignWatch
from researcher.notify.sink import sinks_of
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.notices import SECRET, Webhook, webhook

pytestmark = pytest.mark.anyio


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def _sent(made: MadeUpCampaign, hook: Webhook) -> list[str]:
    """Record what the loop told, send what waits, and return the titles that arrived."""
    for notice in made.notices:
        made.store.notices.record(notice, ["HOOK"])
    [sink] = sinks_of(made.store, ["HOOK"], {"RESEARCHER_NOTIFY_HOOK": hook.url}, made.clock)
    sink.drain()
    assert all(SECRET not in str(each) for each in hook.posts)
    return [each["title"] for each in hook.posts]


async def test_a_gate_and_the_answer_are_told_once_each(tmp_path: Path, hook: Webhook) -> None:
    made = MadeUpCampaign(tmp_path, approve="study")
    await made.carry_out()
    await made.carry_out()
    assert _sent(made, hook) == [f"{made.id} waits for your decision"]
    assert "campaign approve" in hook.posts[0]["message"]
    made.store.campaigns.request(made.id, stop=False)
    for _ in range(20):
        made.store.campaigns.record(made.id, "approved", {"decision": 0, "words": "", "by": "ada"})
        if (await made.carry_out()).status.ended:
            break
    titles = _sent(made, hook)
    assert titles[-1] == f"{made.id} is done"
    assert titles.count(f"{made.id} is done") == 1
    assert "Learning_rate 1.6e-4 is the best that was confirmed." in hook.posts[-1]["message"]


async def test_a_standstill_and_each_day_are_told_once_whoever_looks(tmp_path: Path, hook: Webhook) -> None:
    made = MadeUpCampaign(tmp_path, approve="study")
    await made.carry_out()
    study = made.store.campaigns.decisions(made.id)[0].study_id
    assert study is not None
    made.notices.clear()
    watch = CampaignWatch(made.store, made.id, ["HOOK"], tmp_path, made.clock)
    watch.look()
    made.store.studies.set_status(study, StudyStatus.RUNNING)
    made.clock.advance(90_000)
    watch.look()
    CampaignWatch(made.store, made.id, ["HOOK"], tmp_path, made.clock).look()
    assert sorted(_sent(made, hook)) == [f"{made.id} has stalled", f"{made.id}, day 1"]
    kinds = {notice.kind for notice in made.store.notices.of(made.id)}
    assert kinds == {NoticeKind.STALLED, NoticeKind.DIGEST}
