"""The pool keeps what it was given, whole or not at all."""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest

from swarm.protocol.episodes import (
    DropReason,
    EpisodeState,
    RecordedCall,
    RecordedSampling,
    VersionSpan,
    WeightsVersion,
)
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.sampling_mask import SamplingMask, only
from swarm.protocol.summary import LedgerFilter
from swarm.server.state.call_codec import decode, encode
from swarm.server.state.rows import (
    Change,
    DropUnkept,
    EpisodeRow,
    FreeCalls,
    KeepSteps,
    PutCalls,
    SetFate,
)
from swarm.server.storage.schema import EPISODE_BODY, EPISODE_COLUMNS
from swarm.server.storage.store import StorageUnreadable, Store


def call(index: int = 0, *, tokens: int = 5) -> RecordedCall:
    version = WeightsVersion(run_id="run-1", step=3)
    return RecordedCall(
        call_id=f"call-{index}",
        episode_id="ep-1",
        index=index,
        agent="solver",
        dialect="chat.completions",
        prompt_ids=list(range(100, 110 + index)),
        sampled_ids=list(range(tokens)),
        logprobs=[-0.1 * i - 1e-17 for i in range(tokens)],
        sampling=RecordedSampling(temperature=0.7, top_p=0.9, max_tokens=64, seed=7, reproducible=False),
        versions=[VersionSpan(start=0, end=tokens, version=version)],
        finish_reason="stop",
        parent_call_id="call-x" if index else None,
        started_at=12.5,
        latency_s=0.25,
        request={"messages": [{"role": "user", "content": "ü"}]},
        answer={"n": [1, 2.5, None]},
    )


def row(seq: int, **fields: object) -> EpisodeRow:
    stated: dict[str, object] = {
        "seq": seq,
        "episode_id": f"ep-{seq}",
        "run_id": "run-1",
        "kind": "train",
        "task_id": f"t-{seq % 3}",
        "mix": None,
        "client_id": "client",
        "client_version": "0",
        "config_version": 1,
        "group_id": "gr-1",
        "slot": 0,
        "ordinal": 0,
        "claimed_step": 0,
        "claimed_at": 100.0,
        "lease_digest": "x",
    }
    return EpisodeRow(**(stated | fields))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "pool.sqlite")


def test_recorded_calls_come_back_equal_to_the_last_bit() -> None:
    calls = [call(0), call(1, tokens=0), call(2)]
    rows = [only([3]), only([3, 5]), only([3])]
    masked = calls[0].model_copy(update={"sampled_ids": [3, 3, 3], "mask": SamplingMask.of(rows)})
    calls = [masked, *calls, masked]
    assert decode(encode(calls)) == calls
    assert decode(encode([])) == []


def test_every_field_of_an_episode_has_a_place() -> None:
    assert {*EPISODE_COLUMNS, *EPISODE_BODY} == {field.name for field in fields(EpisodeRow)}


def test_an_episode_comes_back_equal_after_it_was_opened_and_ended(store: Store) -> None:
    one = row(1)
    store.write([one])
    one.state, one.reward, one.metadata, one.success = EpisodeState.ENDED, 0.5, {"note": [1]}, True
    one.sampled_tokens, one.end_digest, one.ended_at = 12, "digest", 101.0
    store.write([one, PutCalls(1, encode([call()]))])
    assert store.read.episode("ep-1") == one
    assert store.read.calls(1) == [call()]
    assert store.read.snapshot().episodes == [one]


def test_changes_are_written_whole_or_not_at_all(store: Store) -> None:
    store.write([row(1)])
    double = row(2, episode_id="ep-1")
    with pytest.raises(sqlite3.IntegrityError):
        store.write([row(3), double])
    assert [found.seq for found in store.read.ledger(LedgerFilter(), 0, 10)] == [1]


def test_a_full_disk_is_refused_in_words_and_later_writes_work(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.write([row(1)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(Refusal, match="make room") as caught:
            store.write([row(2), PutCalls(2, bytes(100_000))])
        assert caught.value.code is ErrorCode.STORAGE_FULL
    assert [record.message.count("make room") for record in caplog.records] == [1]
    assert store.read.episode("ep-2") is None
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.write([row(2), PutCalls(2, bytes(100_000))])
    assert "is writable again" in caplog.records[-1].message
    assert store.read.episode("ep-2") is not None


def test_a_pool_that_was_not_closed_is_read_by_the_next_process(tmp_path: Path) -> None:
    first = Store(tmp_path / "pool.sqlite")
    first.write([row(1)])
    first.begin()
    first.apply([row(2)])  # never committed: the process died here
    second = Store(tmp_path / "other.sqlite")
    second.close()
    first.close()
    again = Store(tmp_path / "pool.sqlite")
    assert [found.seq for found in again.read.ledger(LedgerFilter(), 0, 10)] == [1]
    again.close()


def test_a_file_that_is_no_pool_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    path.write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(StorageUnreadable, match="s database: "):
        Store(path)
    path.unlink()
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StorageUnreadable, match="version 99"):
        Store(path)


def test_a_checkpoint_makes_episodes_trained_and_frees_calls_that_no_replay_needs(store: Store) -> None:
    for seq in range(1, 5):
        store.write([row(seq), PutCalls(seq, encode([call()]))])
        store.write([SetFate(f"ep-{seq}", EpisodeState.IN_STEP, step=seq)])
    store.write([SetFate("ep-2", EpisodeState.DROPPED, DropReason.ZERO_VARIANCE)])
    store.write([KeepSteps("run-1", 0, 3), FreeCalls("run-1", 2, traces_from=100)])
    states = {found.episode_id: found.state for found in store.read.ledger(LedgerFilter(), 0, 10)}
    assert states == {"ep-1": "trained", "ep-2": "dropped", "ep-3": "trained", "ep-4": "in_step"}
    assert [store.read.calls(seq) is None for seq in range(1, 5)] == [True, True, False, False]


def test_what_a_checkpoint_or_a_failure_costs_does_not_grow_with_the_episodes_that_were_settled_before(
    store: Store,
) -> None:
    def work(change: Change) -> int:
        """SQLite's instructions."""
        done: list[None] = []
        store._db.set_progress_handler(lambda: done.append(None), 1)
        store.write([change])
        store._db.set_progress_handler(None, 1)
        return len(done)

    def costs(settled: int) -> list[int]:
        store.write([row(seq, state=EpisodeState.TRAINED, step=seq) for seq in range(1, settled + 1)])
        changes: list[Change] = [
            KeepSteps("run-1", settled, settled + 1),
            FreeCalls("run-1", settled, traces_from=settled),
            DropUnkept("run-1", settled, "it failed"),
        ]
        return [work(change) for change in changes]

    few = costs(10)
    assert costs(1_000) == few


def test_calls_of_recent_episodes_are_kept_as_traces(store: Store) -> None:
    for seq in (1, 2):
        store.write([row(seq), PutCalls(seq, encode([call()]))])
        store.write([SetFate(f"ep-{seq}", EpisodeState.IN_STEP, step=1)])
    store.write([KeepSteps("run-1", 0, 1), FreeCalls("run-1", 1, traces_from=2)])
    assert store.read.calls(1) is None
    assert store.read.calls(2) is not None


def test_the_ledger_is_filtered_and_paged_in_the_order_of_claims(store: Store) -> None:
    for seq in range(1, 8):
        store.write([row(seq, client_id=f"c{seq % 2}")])
    store.write([SetFate("ep-3", EpisodeState.IN_STEP, step=1), SetFate("ep-4", EpisodeState.IN_STEP, step=1)])
    store.write([SetFate("ep-4", EpisodeState.DROPPED, DropReason.ZERO_VARIANCE)])
    read = store.read

    def seqs(wanted: LedgerFilter, after: int = 0, limit: int = 10) -> list[int]:
        return [found.seq for found in read.ledger(wanted, after, limit)]

    assert seqs(LedgerFilter(), 2, 3) == [3, 4, 5]
    assert seqs(LedgerFilter(client_id="c1")) == [1, 3, 5, 7]
    assert seqs(LedgerFilter(step=1)) == [3]
    assert seqs(LedgerFilter(reason=DropReason.ZERO_VARIANCE)) == [4]
    assert seqs(LedgerFilter(run_id="run-2")) == []


def test_the_last_failure_is_the_last_that_brought_a_traceback(store: Store) -> None:
    lost = {"state": EpisodeState.DROPPED, "reason": DropReason.ABORTED}
    traced = "Traceback (most recent call last): boom"
    details = ["Traceback (most recent call last): older", traced, "the client stopped before it began"]
    store.write([row(seq, **lost, detail=detail) for seq, detail in enumerate(details, start=1)])
    store.write([row(9, **lost, client_id="other", detail="gave up")])
    failures = store.read.summary(LedgerFilter()).failures
    assert [(one.client_id, one.detail) for one in failures] == [("client", traced), ("other", "gave up")]


def test_a_pool_from_before_there_were_teams_gets_their_table(tmp_path: Path) -> None:
    store = Store(tmp_path / "pool.sqlite")
    store.close()
    with sqlite3.connect(tmp_path / "pool.sqlite") as db:
        db.execute("DROP TABLE teams")
    db.close()
    store = Store(tmp_path / "pool.sqlite")
    assert store.read.team(1) is None
    store.close()


def test_a_pool_whose_tallies_lack_prompt_tokens_is_counted_anew(tmp_path: Path) -> None:
    store = Store(tmp_path / "pool.sqlite")
    lost = {"state": EpisodeState.DROPPED, "reason": DropReason.ABORTED}
    store.write([row(1, prompt_tokens=30, sampled_tokens=12, **lost)])
    store.close()
    with sqlite3.connect(tmp_path / "pool.sqlite") as db:  # as an older server made it
        for name in ("tally_new", "tally_moved", "tally_settled"):
            db.execute(f"DROP TRIGGER {name}")
        db.execute("ALTER TABLE tallies DROP COLUMN prompt_tokens")
    db.close()
    for _ in range(2):
        store = Store(tmp_path / "pool.sqlite")
        [count] = store.read.summary(LedgerFilter()).counts
        assert (count.episodes, count.prompt_tokens, count.sampled_tokens) == (1, 30, 12)
        store.close()
