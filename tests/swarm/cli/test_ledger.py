"""swarm ledger: filters, pages, and a summary that says why it didn't learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from swarm.cli import diagnosis
from swarm.cli.diagnosis import ADVICE, CAUSE_ADVICE, Evidence
from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import Cause, DropReason, EpisodeState
from swarm.protocol.summary import LedgerCount, LedgerSummary, LostAttempts
from swarm.server.gateway.token_reuse import ForkCause
from tests.swarm.cli.conftest import Swarm


def test_the_ledger_is_filtered(history: dict[str, Any], swarm: Swarm) -> None:
    def ids(*arguments: str) -> set[str]:
        code, out, err = swarm("ledger", *arguments)
        assert code == 0, err
        return {line.split()[0] for line in out.splitlines()}

    assert history["trained"] in ids("--step", "1")
    assert len(ids("--step", "1")) == 2
    assert history["aborted"] in ids("--reason", "aborted")
    assert len(ids("--client-id", "bad")) == 3
    assert history["flat"] in ids("--task-id", "flat", "--state", "dropped")
    assert ids("--client-id", "bad", "--reason", "expired") == set()
    assert len(ids("--cause", "rollout")) == 3
    assert ids("--cause", "server") == set()
    assert swarm("ledger", "--cause", "graders")[0] == 2
    assert "(aborted, cause: rollout)" in swarm("ledger", "--client-id", "bad")[1]
    assert "KeyError: 'answer'" in swarm("ledger", "--client-id", "bad", "--detail")[1]
    assert swarm("ledger", "--run-id", "run-x") == (1, "", "swarm ledger: no run 'run-x' on this server\n")


@pytest.mark.usefixtures("history")
def test_the_ledger_comes_in_pages(swarm: Swarm) -> None:
    whole = swarm("ledger")[1].splitlines()
    assert len(whole) == 7
    read: list[str] = []
    after: list[str] = []
    while True:
        *lines, last = swarm("ledger", "--limit", "3", *after)[1].splitlines()
        if not last.startswith("more: "):
            read += [*lines, last]
            break
        read += lines
        after = last.removeprefix("more: ").split()
    assert read == whole
    assert swarm("ledger", *after)[1].splitlines() == whole[6:]
    assert json.loads(swarm("ledger", "--limit", "1", "--json")[1].splitlines()[-1])["next"]


def test_the_summary_answers_why_it_did_not_learn(history: dict[str, Any], swarm: Swarm) -> None:
    code, out, err = swarm("ledger", "--summary")
    assert code == 0, err
    assert f"run {history['run']}  step 2  " in out
    assert f"3 of 7 training episodes were dropped as aborted: {ADVICE[DropReason.ABORTED]}" in out
    assert "2 of 7 training episodes were dropped as zero_variance" in out
    assert "50% of the groups in the last steps had equal rewards" in out
    assert "answer_edited" in out
    assert "send them back unchanged" in out
    assert f"3 attempts were lost because of the rollout: {CAUSE_ADVICE[Cause.ROLLOUT]}" in out
    assert "mostly task sum" in out
    assert "client bad version v2: 3 of 3 episodes failed" in out
    assert "Traceback (most recent call last):" in out
    assert "good version v1: 4 episodes" in out
    made = json.loads(swarm("ledger", "--summary", "--json")[1])
    assert (made["episodes"], made["trained"] + made["in_step"]) == (7, 2)
    assert made["forks"] == {"answer_edited": 2}
    assert {fate["name"]: fate["episodes"] for fate in made["fates"]}["aborted"] == 3
    assert made["clients"][0]["last_failure"]["episode_id"] == history["aborted"]
    narrowed = json.loads(swarm("ledger", "--summary", "--json", "--client-id", "good", "--traces", "0")[1])
    assert (narrowed["episodes"], narrowed["traces_read"], narrowed["forks"]) == (4, 0, {})


def test_a_run_of_the_echo_engine_has_no_weights_to_export(
    history: dict[str, Any], swarm: Swarm, tmp_path: Path
) -> None:
    run_id, state_dir = history["run"], json.loads(swarm("run", "status", "--json")[1])["server"]["state_dir"]
    for command in (("models", "export", run_id, "--to", str(tmp_path / "out")), ("chat", run_id, "--once", "hi")):
        code, _, err = swarm(*command, "--state-dir", state_dir, "--json")
        assert (code, json.loads(err)["code"]) == (1, "no_weights")
        assert "the echo engine" in json.loads(err)["error"]


def test_a_summary_without_a_run_says_what_to_do(swarm: Swarm, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        code, out, _ = swarm("ledger", "--summary", "--url", server.url)
    assert code == 0
    assert "start one with `swarm run start`" in out


def test_the_headline_counts_as_the_table_of_fates_does() -> None:
    counts = [
        LedgerCount(
            client_id="c", client_version="0", kind=kind, mix=None, state=state, reason=reason, episodes=episodes,
            reward_sum=0.0, rewarded=episodes, sampled_tokens=9, last_claim_at=1.0,
        )
        for kind, state, reason, episodes in (
            ("train", EpisodeState.TRAINED, None, 3), ("train", EpisodeState.IN_STEP, None, 2),
            ("eval", EpisodeState.DROPPED, DropReason.EVAL, 4), ("eval", EpisodeState.DROPPED, DropReason.ABORTED, 7),
        )
    ]  # fmt: skip
    evidence = Evidence(summary=LedgerSummary(counts=counts, failures=[], recent=[]), run=None, traces=[])
    made = diagnosis.diagnose(evidence)
    assert {fate.name: fate.episodes for fate in made.fates} == {"trained": 3, "in_step": 2}
    assert "3 of 5 training episodes trained, 2 in_step, 4 evaluations" in diagnosis.diagnosis_text(made)


def test_the_summary_says_when_new_weights_do_not_reach_the_sampler(history: dict[str, Any]) -> None:
    with SwarmClient(history["url"], client_id="reader") as client:
        report, summary = client.run(history["run"]), client.summary()

    def findings(*mismatches: float) -> list[str]:
        steps = [
            step.model_copy(update={"values": step.values | {"logprob_mismatch_mean": mismatch, "staleness_max": 0.0}})
            for step, mismatch in zip(report.steps, mismatches, strict=True)
        ]
        run = report.model_copy(update={"steps": steps})
        made = diagnosis.diagnose(Evidence(summary=summary, run=run, traces=[]))
        return [finding for finding in made.findings if "but no longer do" in finding]

    assert findings(6e-6, 9e-6) == []
    assert len(findings(6e-6, 1.8e-3)) == 1


@pytest.mark.parametrize(
    ("forced", "grad_norm", "said"),
    [(20.0, 0.0, True), (25.0, 0.0, True), (20.0, 0.1, False), (19.0, 0.0, False), (0.0, 0.1, False)],
)
def test_the_summary_says_when_a_step_trained_forced_tokens_alone(
    history: dict[str, Any], forced: float, grad_norm: float, said: bool
) -> None:
    with SwarmClient(history["url"], client_id="reader") as client:
        report, summary = client.run(history["run"]), client.summary()
    values = {"tokens_trained": 20.0, "tokens_forced": forced, "grad_norm": grad_norm}
    first, last = report.steps
    steps = [first, last.model_copy(update={"values": last.values | values})]
    run = report.model_copy(update={"steps": steps})
    text = diagnosis.diagnosis_text(diagnosis.diagnose(Evidence(summary=summary, run=run, traces=[])))
    assert ("1 of the last 2 steps taught nothing: all tokens that they trained were forced" in text) is said


def test_there_is_advice_for_every_reason_and_every_cause_of_a_fork() -> None:
    assert set(ADVICE) == set(DropReason)
    assert set(CAUSE_ADVICE) == set(Cause)
    assert set(diagnosis.FORK_ADVICE) == {str(cause) for cause in ForkCause}


@pytest.mark.parametrize("cause", [Cause.SERVER, Cause.NETWORK, Cause.PERSON])
def test_what_others_lost_is_never_laid_at_the_rollouts_door(cause: Cause) -> None:
    count = LedgerCount(
        client_id="c", client_version="0", kind="train", mix=None, state=EpisodeState.DROPPED, reason=DropReason.ABORTED,
        cause=cause, episodes=9, reward_sum=0.0, rewarded=0, sampled_tokens=9, last_claim_at=1.0,
    )  # fmt: skip
    lost = LostAttempts(
        client_id="c", client_version="0", kind="train", mix=None, task_id="t-7", cause=cause, episodes=9
    )
    summary = LedgerSummary(counts=[count], causes={cause: 9}, lost=[lost], failures=[], recent=[])
    made = diagnosis.diagnose(Evidence(summary=summary, run=None, traces=[]))
    said = diagnosis.diagnosis_text(made)
    assert f"9 attempts were lost because of the {cause}" in said
    assert "mostly task t-7" in said
    assert "mend" not in said
    assert "c version 0: 9 episodes, reward -, 0 failed" in said
