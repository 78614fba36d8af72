"""Either the server's records show a whole trial, or there is none. The server is played by canned answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from researcher.executor.collection import attrition, collect, interim
from researcher.executor.errors import EvidenceMissing
from researcher.instruments.instrument import Metric
from researcher.models import without as left_of
from swarm.client import SwarmClient
from swarm.protocol.blueprint import HeldOut, Interim, TrialBlueprint
from swarm.protocol.episodes import Cause, DropReason, EpisodeState, LedgerEntry, LedgerPage
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import (
    ConfigChange,
    EngineStatus,
    Phase,
    PoolStatus,
    RunReport,
    ServerStatus,
    StepMetrics,
)

pytestmark = pytest.mark.anyio

STEPS = 2
BLUEPRINT = TrialBlueprint(
    trial_key="hash/a/0",
    server_url="http://server",
    run_id="run-1",
    instrument_dir="/i",
    workflow="workflow.py",
    code_version="c",
    parameters={"digits": 1},
    seed=0,
    group_size=2,
    concurrency=1,
    heldout=HeldOut(tasks=2, episodes=2, temperature=1.0),
)

STATUS = ServerStatus(
    server_id="s",
    revision=1,
    phase=Phase.IDLE,
    model="smollm2-135m-instruct-q4_1-dequantised",
    model_fingerprint="abc",
    pool=PoolStatus(),
    engine=EngineStatus(backend="local", device="cpu"),
)


def report(**changes: Any) -> RunReport:
    steps = [StepMetrics(step=n, at=float(n), config_version=1, values={"reward_mean": n / 10}) for n in (1, 2)]
    first = ConfigChange(config_version=1, at=0.0, by="client", patch={})
    fields = {"status": "complete", "step": STEPS, "steps": steps, "changes": [first], "phase": Phase.IDLE}
    return RunReport(run_id="run-1", branch=0, spec=RunSpec(), config_version=1, started_at=0.0, **fields | changes)


def episode(task: str, claimed_step: int, reward: float | None, **changes: Any) -> LedgerEntry:
    fields: dict[str, Any] = {
        "episode_id": f"ep-{task}-{claimed_step}-{reward}",
        "run_id": "run-1",
        "kind": "eval",
        "task_id": task,
        "mix": None,
        "client_id": "trial:hash/a/0",
        "client_version": "c",
        "config_version": 1,
        "group_id": None,
        "slot": None,
        "state": EpisodeState.DROPPED,
        "reason": DropReason.EVAL,
        "claimed_step": claimed_step,
        "reward": reward,
        "success": None if reward is None else reward == 1.0,
        "prompt_tokens": 4,
        "sampled_tokens": 3,
        "claimed_at": 0.0,
    }
    return LedgerEntry(**fields | changes)


def whole() -> list[LedgerEntry]:
    evaluated = [episode(task, step, float(step > 0)) for step in (0, STEPS) for task in ("b", "a") for _ in range(2)]
    trained = {"kind": "train", "state": EpisodeState.TRAINED, "reason": None, "step": 1}
    return [*evaluated, episode("t", 0, 0.5, **trained)]


def server(run: RunReport, entries: list[LedgerEntry]) -> Callable[[httpx.Request], httpx.Response]:
    """Hands the ledger out in pages of three."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/runs/run-1"):
            return httpx.Response(200, content=run.model_dump_json())
        if request.url.path.endswith("/status"):
            return httpx.Response(200, content=STATUS.model_dump_json())
        after = int(request.url.params.get("after", 0))
        following = str(after + 3) if after + 3 < len(entries) else None
        page = LedgerPage(entries=entries[after : after + 3], next=following)
        return httpx.Response(200, content=page.model_dump_json())

    return answer


async def collected(run: RunReport, entries: list[LedgerEntry], *metrics: Metric, partner: bool = False) -> Any:
    transport = httpx.MockTransport(server(run, entries))
    async with SwarmClient("http://server", transport=transport) as swarm:
        return await collect(swarm, BLUEPRINT, metrics, partner=partner)


async def test_tokens_of_training_are_counted_for_the_step_that_they_were_sampled_for_dropped_ones_too() -> None:
    dropped = {"kind": "train", "sampled_tokens": 5, "state": EpisodeState.DROPPED, "reason": DropReason.RUN_ENDED}
    entries = [*whole(), episode("t", 1, None, **dropped), episode("u", STEPS, None, **dropped)]
    assert (await collected(report(), entries)).series["tokens_sampled"] == [(1, 3.0), (2, 10.0)]


async def test_series_come_from_steps_and_ledger_in_the_order_of_the_tasks() -> None:
    entries = whole()
    entries[2] = episode("a", 0, 1.0)
    found = await collected(report(), entries)
    assert found.series["reward_mean"] == [(1, 0.1), (2, 0.2)]
    assert found.series["eval_reward_before"] == [(0, 1.0), (1, 0.0), (2, 0.0), (3, 0.0)]
    assert found.series["eval_success_after"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert found.tokens == 9 * (4 + 3)
    assert (found.evidence.train_tasks, found.evidence.heldout_tasks) == (["t"], ["a", "b"])
    assert (found.evidence.changes, found.evidence.parameters) == ([], {"digits": 1})
    assert (found.evidence.model.name, found.evidence.model.fingerprint) == ("smollm2-135m", "abc")
    assert found.evidence.model.engine == "local"


async def test_an_episode_too_many_is_left_out_and_an_aborted_one_does_not_count() -> None:
    aborted = episode("a", 0, None, reason=DropReason.ABORTED)
    found = await collected(report(), [aborted, *whole(), episode("a", 0, 1.0)])
    assert [value for _, value in found.series["eval_reward_before"]] == [0.0] * 4


async def test_people_who_join_evaluate_what_they_like_and_what_they_trained_is_evidence() -> None:
    person = {"client_id": "ada"}
    played = [episode("a", 0, 9.0, **person), episode("t", 0, 9.0, **person), episode("new", STEPS, 9.0, **person)]
    trained = {"kind": "train", "state": EpisodeState.TRAINED, "reason": None, "step": 1}
    judged = [episode("u", 0, reward, **person, **trained) for reward in (0.0, 1.0)]
    found = await collected(report(), [*played, *whole(), *judged])
    assert [value for _, value in found.series["eval_reward_before"]] == [0.0] * 4
    assert (found.evidence.train_tasks, found.evidence.heldout_tasks) == (["t", "u"], ["a", "b"])
    assert found.evidence.joined == {"ada": 2}
    assert (await collected(report(), [*played, *whole()])).evidence.joined is None


async def test_a_change_by_hand_is_kept_as_evidence() -> None:
    changes = [*report().changes, ConfigChange(config_version=2, at=1.0, by="admin", patch={"max_staleness": 2})]
    found = await collected(report(changes=changes), whole())
    assert [change["patch"] for change in found.evidence.changes] == [{"max_staleness": 2}]


def during(task: str, step: int, reward: float, **changes: Any) -> LedgerEntry:
    mine = {"client_id": "trial:hash/a/0:interim", "episode_id": f"mid-{task}-{step}-{reward}"}
    return episode(task, step, reward, **mine | changes)


async def curves(entries: list[LedgerEntry], *metrics: Metric, steps: int = 5, tasks: int = 2) -> dict[str, Any]:
    heldout = HeldOut(tasks=2, episodes=2, temperature=1.0, interim=Interim(every=2, tasks=tasks))
    blueprint = BLUEPRINT.model_copy(update={"heldout": heldout})
    own = [entry.model_copy(update={"claimed_step": entry.claimed_step and steps}) for entry in whole()]
    made = [StepMetrics(step=n, at=float(n), config_version=1, values={"reward_mean": n / 10}) for n in range(1, 6)]
    transport = httpx.MockTransport(server(report(step=steps, steps=made[:steps]), [*own, *entries]))
    async with SwarmClient("http://server", transport=transport) as swarm:
        found = await collect(swarm, blueprint, metrics)
        assert found.evidence.heldout_tasks == ["a", "b"]
        assert found.evidence.attrition is not None
        assert found.evidence.attrition.eval.attempts == 8
        assert found.series["eval_reward_after"] == [(index, 1.0) for index in range(4)]
        seen, _ = await interim(swarm, blueprint, metrics)
    live = {name: [(step, value) for each, step, value in seen if each == name] for name, _, _ in seen}
    ended = {name: line for name, line in found.series.items() if name.startswith("heldout_")}
    assert live == {name: [point for point in line if point[0] != steps] for name, line in ended.items()}
    return ended


async def test_the_held_out_curve_has_a_point_for_each_whole_evaluation_and_one_at_either_end() -> None:
    second = [during("a", 4, 1.0), during("b", 4, 0.5, episode_id="mid")]
    found = await curves([during("a", 2, 0.0), during("b", 2, 1.0), *second])
    assert found["heldout_reward"] == [(0, 0.0), (2, 0.5), (4, 0.75), (5, 1.0)]
    assert found["heldout_success"] == [(0, 0.0), (2, 0.5), (4, 0.5), (5, 1.0)]


async def test_the_ends_of_the_held_out_curve_are_those_of_the_same_tasks() -> None:
    found = await curves([during("b", 2, 0.25)], tasks=1)
    assert found["heldout_reward"] == [(0, 0.0), (2, 0.25), (5, 1.0)]


async def test_an_evaluation_that_is_not_whole_at_one_step_has_no_point_and_one_too_many_no_second() -> None:
    parted = [during("a", 2, 1.0), during("b", 3, 1.0)]
    assert await curves(parted) == {}
    again = [during(task, 3, 0.5) for task in ("a", "b")]
    twice = during("a", 3, 1.0, claimed_at=9.0, episode_id="twice")
    assert (await curves([*parted[:1], *again, twice]))["heldout_reward"] == [(0, 0.0), (3, 0.5), (5, 1.0)]
    assert (await curves([during(task, 2, 0.5, success=None) for task in ("a", "b")])).keys() == {"heldout_reward"}
    other = [during(task, 2, 0.5, client_id="ada") for task in ("a", "b")]
    assert await curves(other) == {}


async def test_unknown_successes_are_not_made_up() -> None:
    entries = [entry.model_copy(update={"success": None}) for entry in whole()]
    assert "eval_success_after" not in (await collected(report(), entries)).series


@pytest.mark.parametrize(
    ("run", "entries", "says"),
    [
        (report(status="running", step=1), whole(), "running at step 1"),
        (report(status="failed", reason="disk full"), whole(), "disk full"),
        (report(steps=report().steps[1:]), whole(), "1 steps are recorded"),
        (report(), whole()[1:], "before training: 3 of 4"),
        (report(), [entry for entry in whole() if entry.claimed_step == 0], "after training: 0 of 4"),
    ],
)
async def test_a_part_of_a_trial_is_refused(run: RunReport, entries: list[LedgerEntry], says: str) -> None:
    with pytest.raises(EvidenceMissing, match=says):
        await collected(run, entries)


HONEST = Metric(name="honesty", kind="outcome", source="honest", direction="increase", margin=0.1)


async def test_what_episodes_report_beside_the_reward_is_kept_where_a_metric_asks_for_it() -> None:
    entries = [entry.model_copy(update={"metrics": {"honest": 0.25, "other": 1.0}}) for entry in whole()]
    found = await collected(report(), entries, HONEST)
    assert found.series["eval_outcome_before.honest"] == [(index, 0.25) for index in range(4)]
    assert found.series["eval_outcome_after.honest"] == [(index, 0.25) for index in range(4)]
    assert found.series["outcome.honest"] == [(1, 0.25)]
    assert not [name for name in found.series if "other" in name]
    assert not [name for name in (await collected(report(), entries)).series if "outcome" in name]


async def test_episodes_that_do_not_report_a_declared_metric_are_counted_and_the_remedy_is_named() -> None:
    entries = [
        entry.model_copy(update={"metrics": {} if entry.task_id == "b" else {"honest": 1.0}}) for entry in whole()
    ]
    with pytest.raises(
        EvidenceMissing, match=r"2 of 4 held-out episodes report no 'honest': .*metrics=\{'honest': …\}"
    ):
        await collected(report(), entries, HONEST)


async def test_training_episodes_have_to_report_it_too() -> None:
    entries = [
        entry.model_copy(update={"metrics": {"honest": 1.0} if entry.kind == "eval" else {}}) for entry in whole()
    ]
    with pytest.raises(EvidenceMissing, match="1 of 1 training episodes report no 'honest'"):
        await collected(report(), entries, HONEST)


def lost(task: str, cause: Cause | None, reason: DropReason | None = DropReason.ABORTED, **changes: Any) -> LedgerEntry:
    fields = {"kind": "train", "reason": reason, "cause": cause, "episode_id": f"lost-{task}-{cause}-{reason}"}
    return episode(task, 0, None, **fields | changes)


async def test_attempts_are_counted_by_kind_and_by_who_lost_them() -> None:
    entries = [lost("t", cause) for cause in Cause]
    entries += [lost("a", Cause.GRADER, kind="eval"), episode("t", 0, 1.0, kind="train", reason=DropReason.STALE)]
    entries.append(lost("t", None, state=EpisodeState.RUNNING, reason=None))
    found = (await collected(report(), [*whole(), *entries])).evidence.attrition
    assert found.train.lost == dict.fromkeys(Cause, 1)
    assert (found.train.attempts, found.train.ended, found.train.counted, found.train.eligible) == (9, 2, 4, 6)
    assert (found.eval.attempts, found.eval.lost) == (9, {Cause.GRADER: 1})


async def test_what_code_lost_that_was_mended_since_can_be_left_out() -> None:
    broken = [lost(f"t{number}", Cause.ROLLOUT, episode_id=f"ep-{number}") for number in range(3)]
    then = attrition([*broken, episode("t0", 0, 1.0, kind="train")])
    found = attrition([*broken, episode("t0", 0, 1.0, kind="train"), lost("u", Cause.ROLLOUT), lost("u", Cause.LIMIT)])
    left = left_of(found, then).train
    assert (left.attempts, left.ended, left.lost, left.set_aside) == (3, 1, {Cause.ROLLOUT: 1, Cause.LIMIT: 1}, 1)


async def test_what_people_who_joined_lost_is_not_the_trials() -> None:
    found = await collected(report(), [*whole(), lost("t", Cause.ROLLOUT, client_id="ada")])
    assert found.evidence.attrition.train.lost == {}


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (DropReason.ABORTED, Cause.ROLLOUT),
        (DropReason.NO_CALLS, Cause.ROLLOUT),
        (DropReason.EXPIRED, Cause.CLIENT),
        (DropReason.SERVER_RESTARTED, Cause.SERVER),
        (DropReason.RUN_ENDED, Cause.SERVER),
    ],
)
async def test_of_an_older_server_the_reason_says_who_lost_an_attempt(reason: DropReason, cause: Cause) -> None:
    found = await collected(report(), [*whole(), lost("t", None, reason)])
    assert found.evidence.attrition.train.lost == {cause: 1}


async def test_the_first_words_of_each_cause_are_kept_cut_and_without_secrets() -> None:
    long = "Traceback: Bearer abcdefgh12345678 " + "x" * 5000
    entries = [
        lost("t", Cause.ROLLOUT, detail=words, ended_at=at, episode_id=words[:3])
        for at, words in ((2.0, "later"), (1.0, long))
    ]
    said = (await collected(report(), [*whole(), *entries])).evidence.attrition.first
    assert set(said) == {Cause.ROLLOUT}
    assert said[Cause.ROLLOUT].startswith("Traceback: Bearer [redacted]")
    assert len(said[Cause.ROLLOUT]) == 2000


async def test_a_task_is_set_aside_where_nothing_came_of_it_and_the_run_went_on() -> None:
    bad = [lost("bad", Cause.ROLLOUT, episode_id=f"bad-{number}") for number in range(3)]
    cut_short = [lost("late", Cause.ROLLOUT), lost("late", Cause.SERVER, DropReason.RUN_ENDED)]
    entries = [*bad, *cut_short, lost("t", Cause.ROLLOUT), lost("away", Cause.NETWORK)]
    assert (await collected(report(), [*whole(), *entries])).evidence.attrition.train.set_aside == 1


def given_up(task: str, *causes: Cause, step: int = 0) -> list[LedgerEntry]:
    """Attempts one after the other, each lost to one of these."""
    return [
        lost(
            task,
            cause,
            kind="eval",
            episode_id=f"{task}-{step}-{number}",
            claimed_at=10.0 + number,
            ended_at=10.5 + number,
        ).model_copy(update={"claimed_step": step})
        for number, cause in enumerate(causes)
    ]


def without(task: str, step: int, left: int = 0) -> list[LedgerEntry]:
    """A whole trial less what ended of this evaluation of one task; `left`: episodes that did."""
    those = [entry for entry in whole() if (entry.kind, entry.task_id, entry.claimed_step) == ("eval", task, step)]
    return [entry for entry in whole() if entry not in those] + those[:left]


async def test_a_held_out_episode_in_which_a_partner_was_not_called_is_no_measurement_of_it() -> None:
    idle = episode("a", 0, 1.0, reason=DropReason.NO_CALLS, cause=Cause.ROLLOUT)
    entries = [idle, *without("a", 0, left=1)]
    found = await collected(report(), entries, partner=True)
    assert found.series["eval_reward_before"] == [(0, 0.0), (2, 0.0), (3, 0.0)]
    assert found.evidence.attrition.eval.lost == {Cause.ROLLOUT: 1}
    with pytest.raises(EvidenceMissing, match="before training: 3 of 4"):
        await collected(report(), entries)


GRADED, DIED = (Cause.GRADER, Cause.ROLLOUT, Cause.LIMIT), (Cause.CLIENT,) * 3


@pytest.mark.parametrize("causes", [GRADED, DIED, (*GRADED, Cause.SERVER), (Cause.NETWORK, *GRADED)])
@pytest.mark.parametrize("step", [0, STEPS])
async def test_a_held_out_task_that_was_set_aside_leaves_a_gap_where_it_stands_and_is_counted(
    step: int, causes: tuple[Cause, ...]
) -> None:
    found = await collected(report(), [*given_up("a", *causes, step=step), *without("a", step)])
    when, other = ("before", "after") if step == 0 else ("after", "before")
    assert [index for index, _ in found.series[f"eval_reward_{when}"]] == [2, 3]
    assert [index for index, _ in found.series[f"eval_success_{when}"]] == [2, 3]
    assert [index for index, _ in found.series[f"eval_reward_{other}"]] == [0, 1, 2, 3]
    attrition = found.evidence.attrition.eval
    assert (attrition.ended, attrition.counted) == (6, 3)


async def test_of_a_held_out_task_that_was_set_aside_what_ended_counts() -> None:
    reported = [
        entry.model_copy(update={"metrics": {"honest": float(entry.task_id == "b")}})
        for entry in [*given_up("a", *GRADED), *without("a", 0, left=1)]
    ]
    found = await collected(report(), reported, HONEST)
    assert found.series["eval_outcome_before.honest"] == [(0, 0.0), (2, 1.0), (3, 1.0)]
    assert [index for index, _ in found.series["eval_reward_before"]] == [0, 2, 3]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([*given_up("a", *GRADED[:2]), *without("a", 0)], "before training: 2 of 4"),
        ([*given_up("a", Cause.CLIENT), *without("a", 0)], "before training: 2 of 4"),
        ([*given_up("a", *(Cause.SERVER, Cause.NETWORK, Cause.PERSON) * 3), *without("a", 0)], "2 of 4"),
        ([*given_up("a", *GRADED, step=STEPS), *without("a", 0)], "before training: 2 of 4"),
        ([*given_up("a", *GRADED), *given_up("b", *GRADED)], "before training: 0 of 4"),
    ],
)
async def test_held_out_tasks_that_are_missing_otherwise_and_an_evaluation_of_none_are_refused(
    entries: list[LedgerEntry], says: str
) -> None:
    with pytest.raises(EvidenceMissing, match=says):
        await collected(report(), entries)
