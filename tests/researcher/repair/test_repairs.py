"""Clients that fail by their own code, mended in the running run: on a real server with the echo engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from researcher.executor.errors import MendByHand, Unmended
from researcher.llm.endpoint import LlmUnusable
from researcher.models import TrialStatus
from researcher.repair.code import Unfit
from researcher.repair.repairs import RepairLimits
from researcher.sandbox.launch import sandbox
from swarm.protocol.episodes import EpisodeState
from tests.fakes.mended_study import NINTH_TASK, WORKFLOW, MendedStudy, mended
from tests.fakes.scripted_llm import ScriptedLlm, completion, said

pytestmark = pytest.mark.anyio

Make = Callable[..., MendedStudy]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[MendedStudy] = []

    def one(*args: object, **kwargs: object) -> MendedStudy:
        made.append(MendedStudy(tmp_path, *args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        each.store.close()


async def test_a_client_that_fails_by_its_code_is_mended_in_the_running_run_and_loses_no_episode(make: Make) -> None:
    study = make(llm=ScriptedLlm(mended()))
    async with study.pool() as pool:
        [done] = await study.run(pool, study.trials())
        [attempt] = study.store.trials.attempts(study.study, done.key)
        entries = [entry async for entry in pool.servers[0].swarm.ledger(run_id=attempt.run_id)]
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    [repair] = study.store.journal.repairs(study.study)
    assert (repair.old, repair.by, repair.files) == (study.plan.instrument_code, "LLM some-llm", ("workflow.py",))
    assert "-            word = {'word': word}['wrod']" in repair.diff
    assert "KeyError: 'wrod'" in repair.failed
    assert "workflow.py:" in repair.failed
    assert "calls and rewards" in repair.rehearsed

    by_version = Counter(entry.client_version for entry in entries if entry.reward is not None)
    assert set(by_version) == {repair.old, repair.new}
    assert done.evidence is not None
    assert done.evidence.code_versions == dict(by_version)
    acknowledged = [entry for entry in entries if entry.kind == "train" and entry.client_version == repair.old]
    kept = [entry for entry in acknowledged if entry.reward is not None]
    assert len(kept) >= 32
    assert all(entry.state is EpisodeState.TRAINED or entry.reason is not None for entry in kept)
    assert [step for step, _ in done.series["reward_mean"]] == [1, 2, 3, 4]
    groups: dict[str, set[str]] = {}
    for entry in entries:
        if entry.group_id is not None and entry.kind == "train":
            groups.setdefault(entry.group_id, set()).add(entry.client_version)
    assert all(len(versions) == 1 for versions in groups.values())

    assert study.llm is not None
    [asked] = study.llm.asked
    assert "KeyError: 'wrod'" in asked["messages"][1]["content"]
    [call] = study.store.journal.llm_calls(study.study)
    assert call.purpose.startswith("repair 1 of ")
    assert (call.request, call.answer is not None) == (asked, True)
    [budget] = [each for each in study.store.budgets.all(study.study) if each.kind == "repairs"]
    assert (budget.spent, budget.reserved) == (1, 0)


@pytest.mark.campaign
async def test_a_version_that_was_taken_up_is_for_every_trial_that_begins_afterwards(make: Make) -> None:
    study = make(llm=ScriptedLlm(mended()))
    async with study.pool() as pool:
        first, second = await study.run(pool, study.trials(2))
        assert study.repairer().code().version == study.store.journal.repairs(study.study)[0].new
    assert (first.status, second.status) == (TrialStatus.DONE, TrialStatus.DONE)
    assert first.evidence is not None
    assert second.evidence is not None
    new = study.store.journal.repairs(study.study)[0].new
    assert set(second.evidence.code_versions or {}) == {new} < set(first.evidence.code_versions or {})
    assert study.llm is not None
    assert len(study.llm.asked) == 1


async def test_answers_that_cannot_be_used_are_told_so_and_the_next_is_taken(make: Make) -> None:
    llm = ScriptedLlm(mended("def tasks(:\n"), mended(WORKFLOW, name="../workflow.py"), mended())
    study = make(llm=llm)
    repairer = study.repairer()
    code = await repairer.mend(study.case(repairer))
    assert code == repairer.code() == study.repairer().code()
    assert code.sandboxed
    assert (code.folder / "workflow.py").read_text() == WORKFLOW
    assert "does not parse" in llm.asked[1]["messages"][-1]["content"]
    assert "not a file of the instrument" in llm.asked[2]["messages"][-1]["content"]
    [words] = study.store.journal.events(study.study, "sandboxed")
    assert words.detail["words"].endswith(sandbox().words)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (completion("I would rather not."), "no complete JSON object"),
        (mended("def tasks(:\n"), "does not parse"),
        (mended(WORKFLOW, name="/etc/passwd"), "not a file of the instrument"),
        (mended("name = 'other'\n", name="instrument.toml"), "may not be changed"),
        (mended(NINTH_TASK), "nothing was changed"),
        (mended(WORKFLOW.replace("async def rollout(episode", "async def rollout(game")), "must stay as it is"),
        (mended(WORKFLOW.replace("reward=float(right)", "reward=1.0")), "keep all rewards"),
        (mended(WORKFLOW.replace("Repeat this word", "Say this word")), "the prompts of"),
        (mended(WORKFLOW.replace("answer.raise_for_status()", "raise OSError('no')")), "failed"),
    ],
)
async def test_a_version_that_is_no_repair_is_refused_with_its_reason(make: Make, answer: object, why: str) -> None:
    study = make(llm=ScriptedLlm(answer), limits=RepairLimits(answers=1))  # type: ignore[arg-type]
    repairer = study.repairer()
    before = repairer.code()
    with pytest.raises(Unmended, match="KeyError: 'wrod'") as lost:
        await repairer.mend(study.case(repairer))
    assert why in str(lost.value)
    assert repairer.code() == before
    assert not study.store.journal.repairs(study.study)
    [event] = study.store.journal.events(study.study, "repair_refused")
    assert why in event.detail["why"]


SAID = "    right = said.strip()"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "    __import__('subprocess').run(['true'], check=True)\n",
            "differently than the client did: PermissionError",
        ),
        ("    assert '```' not in said\n", "differently than the client did: AssertionError"),
    ],
)
async def test_what_the_sandbox_cannot_rehearse_is_mended_by_a_person_and_no_llm_is_asked(
    make: Make, line: str, why: str
) -> None:
    broken = NINTH_TASK.replace(SAID, line + SAID)
    easier = WORKFLOW.replace("reward=float(right)", "reward=1.0")
    study = make(broken, llm=ScriptedLlm(mended(easier)))
    repairer = study.repairer()
    with pytest.raises(MendByHand, match=f"the old code cannot be rehearsed in the sandbox: .*{why}"):
        await repairer.mend(study.case(repairer))
    assert study.llm is not None
    assert study.llm.asked == []
    assert not study.store.journal.repairs(study.study)
    [budget] = [each for each in study.store.budgets.all(study.study) if each.kind == "repairs"]
    assert (budget.spent, budget.reserved) == (0, 0)
    (study.folder / "workflow.py").write_text(broken.replace("'wrod'", "'word'"))
    assert study.repairer().by_hand() is not None


async def test_episodes_that_need_further_models_cannot_be_rehearsed(make: Make) -> None:
    study = make(llm=ScriptedLlm(mended()))
    page = study.folder / "instrument.toml"
    page.write_text(page.read_text() + "\n[roles.solver.run.sampling]\nmax_tokens = 8\n")
    repairer = study.repairer()
    with pytest.raises(MendByHand, match="a rehearsal has no models"):
        await repairer.mend(study.case(repairer))


async def test_a_client_that_may_be_started_again_is_before_a_person_is_asked(make: Make) -> None:
    study = make(NINTH_TASK.replace(SAID, f"    raise OSError\n{SAID}"), llm=ScriptedLlm(mended()))
    repairer = study.repairer()
    assert await repairer.mend(replace(study.case(repairer), last=False)) == repairer.code()


async def test_a_fault_that_some_answers_meet_is_mended_and_the_others_are_compared(make: Make) -> None:
    line = SAID.replace("said.strip()", "{0: said}[said.count(' ')].strip()")
    broken = WORKFLOW.replace(SAID, line)
    place = f"workflow.py:{broken[: broken.index(line)].count(chr(10)) + 1}"
    easier = WORKFLOW.replace("reward=float(right)", "reward=1.0")
    study = make(broken, llm=ScriptedLlm(mended(easier), mended()))
    repairer = study.repairer()
    case = study.case(repairer)
    code = await repairer.mend(replace(case, diagnosis=replace(case.diagnosis, place=place)))
    assert (code.folder / "workflow.py").read_text() == WORKFLOW
    assert study.llm is not None
    assert "keep all rewards" in study.llm.asked[1]["messages"][-1]["content"]
    [repair] = study.store.journal.repairs(study.study)
    assert "42 episodes were rehearsed" in repair.rehearsed
    assert "24 of them had ended before too" in repair.rehearsed


async def test_where_the_failed_tasks_cannot_be_drawn_the_others_are_compared(make: Make) -> None:
    study = make(llm=ScriptedLlm(mended(WORKFLOW.replace("Repeat this word", "Say this word")), mended()))
    repairer = study.repairer()
    await repairer.mend(replace(study.case(repairer), tasks=("lost",)))
    assert study.llm is not None
    assert "the prompts of" in study.llm.asked[1]["messages"][-1]["content"]


@pytest.mark.campaign
async def test_repairs_end_with_their_budget_and_the_trial_with_clear_words(make: Make) -> None:
    still_wrong = NINTH_TASK.replace("at == 8", "at == 9")
    worse = NINTH_TASK.replace("at == 8", "at == 10")
    study = make(llm=ScriptedLlm(mended(still_wrong), mended(worse)), limits=RepairLimits(per_trial=2, answers=1))
    async with study.pool() as pool:
        [failed] = await study.run(pool, study.trials())
    assert (failed.status, failed.attempt) == (TrialStatus.FAILED, 1)
    assert "used all of its 2 repairs" in str(failed.reason)
    assert len(study.store.journal.repairs(study.study)) == 2

    study.limits = RepairLimits(per_study=2, answers=1)
    repairer = study.repairer()
    with pytest.raises(Unmended, match="study has used all of its 2 repairs"):
        await repairer.mend(study.case(repairer, seed=1))
    assert study.llm is not None
    assert len(study.llm.asked) == 2


async def test_without_an_llm_the_place_is_named_and_a_person_mends_it(make: Make) -> None:
    study = make()
    place = str(study.folder / "workflow.py")
    trials = study.trials()
    async with study.pool() as pool:
        with pytest.raises(MendByHand, match="KeyError: 'wrod'") as halt:
            await study.run(pool, trials)
        assert place in str(halt.value)
        assert f"researcher resume {study.study}" in str(halt.value)
    assert not study.store.trials.get(study.study, trials[0].key).status.ended
    before = study.store.trials.attempts(study.study, trials[0].key)[0]
    assert before.step >= 1

    assert study.repairer().by_hand() is None
    (study.folder / "workflow.py").write_text(WORKFLOW)
    repairer = study.repairer()
    record = repairer.by_hand()
    assert record is not None
    assert (record.by, record.files, record.old) == ("person", ("workflow.py",), study.plan.instrument_code)
    async with study.pool() as pool:
        [done] = await study.run(pool, trials, repairer)
    assert (done.status, done.attempt) == (TrialStatus.DONE, 1)
    [attempt] = study.store.trials.attempts(study.study, done.key)
    assert attempt.run_id == before.run_id
    assert study.repairer().by_hand() is None


async def test_an_llm_that_cannot_be_reached_leaves_the_mending_to_a_person(make: Make) -> None:
    study = make(llm=ScriptedLlm(LlmUnusable("the key is wrong")))
    repairer = study.repairer()
    with pytest.raises(MendByHand, match="the key is wrong"):
        await repairer.mend(study.case(repairer))


async def test_a_person_may_not_change_what_the_plan_was_made_for(make: Make) -> None:
    study = make()
    repairer = study.repairer()
    with pytest.raises(MendByHand):
        await repairer.mend(study.case(repairer))
    (study.folder / "workflow.py").write_text("def tasks(:\n")
    with pytest.raises(Unfit, match=r"workflow.py:1: does not parse"):
        study.repairer().by_hand()
    (study.folder / "workflow.py").write_text(WORKFLOW)
    declaration = study.folder / "instrument.toml"
    declaration.write_text(declaration.read_text().replace("steps = 6", "steps = 7"))
    with pytest.raises(Unfit, match=r"instrument.toml was changed"):
        study.repairer().by_hand()


async def test_infrastructure_is_tried_again_and_nobody_is_asked(make: Make) -> None:
    lost = WORKFLOW.replace("    answer.raise_for_status()\n", "    raise ConnectionResetError(104, 'reset')\n")
    study = make(lost, llm=ScriptedLlm(mended()))
    async with study.pool() as pool:
        [failed] = await study.run(pool, study.trials(), attempts=2)
    assert (failed.status, failed.attempt) == (TrialStatus.FAILED, 2)
    assert "infrastructure" in str(failed.reason)
    causes = {event.detail["cause"] for event in study.store.journal.events(study.study, "client_failed")}
    assert causes == {"infrastructure"}
    assert study.llm is not None
    assert study.llm.asked == []


async def test_what_rules_cannot_tell_is_asked_and_labelled(make: Make) -> None:
    endless = WORKFLOW.replace(
        "    while True:\n        yield from rng", "    for _ in range(1):\n        yield from rng"
    )
    short = endless.replace("yield from rng.sample(words, len(words))", "yield from rng.sample(words, 5)")
    llm = ScriptedLlm(said({"cause": "infrastructure", "why": "It looks like a hiccup."}))
    study = make(short, llm=llm)
    async with study.pool() as pool:
        [failed] = await study.run(pool, study.trials(), attempts=1)
    assert failed.status is TrialStatus.FAILED
    [event, *_] = study.store.journal.events(study.study, "client_failed")
    assert (event.detail["by"], event.detail["cause"]) == ("LLM some-llm", "infrastructure")
    assert len(llm.asked) == 1
