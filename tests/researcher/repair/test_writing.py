"""Instruments that an LLM writes: taken only where they hold, run only in a sandbox."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import SystemClock
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.llm.asking import Asker
from researcher.llm.endpoint import LlmSettings, LlmUnusable
from researcher.refusals import PlanningRefused
from researcher.repair.asking import Llm
from researcher.repair.writing import write_instrument
from tests.fakes.scripted_llm import Answer, ScriptedLlm, completion, said
from tests.fakes.specs import planned
from tests.fakes.written_instrument import LENGTH, WITH_LENGTH, WORKFLOW, written

pytestmark = pytest.mark.anyio

TOPIC = "Does a parrot learn faster with a higher learning rate?"


async def write(root: Path, *answers: Answer) -> tuple[InstrumentFolder, ScriptedLlm]:
    scripted = ScriptedLlm(*answers)
    settings = LlmSettings(model="some-llm", patience_s=0.0)
    asker = Asker(scripted, settings, SystemClock(), keep=lambda _: None, tell=lambda _: None)
    llm = Llm(asker, "some-llm", 4096)
    return await write_instrument(TOPIC, llm, root, "echo", answers=len(answers)), scripted


async def test_an_instrument_that_holds_is_kept_and_marked(tmp_path: Path) -> None:
    found, llm = await write(tmp_path, completion("Let me think."), said(written()))
    assert read_instrument(found.path) == found
    assert found.path.parent == tmp_path
    assert (found.instrument.name, found.instrument.generated, found.instrument.model) == ("parrot", "some-llm", "echo")
    assert set(os.listdir(found.path)) == {"instrument.toml", "workflow.py", "reward.py"}
    assert os.listdir(tmp_path) == [found.path.name]
    assert TOPIC in llm.asked[0]["messages"][1]["content"]
    assert "no complete JSON object" in llm.asked[1]["messages"][-1]["content"]


async def test_a_factor_of_its_own_can_be_asked_about(tmp_path: Path) -> None:
    hint = {**LENGTH, "name": "hint", "type": "bool", "default": False, "low": None, "high": None, "aliases": []}
    text = WITH_LENGTH.replace("parts=2):", "parts=2, hint=False):").replace(
        'query=f"Repeat', 'query=("Listen. " if hint else "") + f"Repeat'
    )
    found, llm = await write(tmp_path, said(written(text, factors=[LENGTH, hint])))
    assert found.instrument.defaults.task == {"parts": 2, "hint": False}
    plan = planned(found, compare={"parts": {"baseline": 1, "levels": [3]}}, set={"hint": True})
    assert [plan.levels_of(arm) for arm in plan.arms] == [{"task.parts": 1}, {"task.parts": 3}]
    assert "Factors" in llm.asked[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (written(WITH_LENGTH.replace("repeat=parts", "repeat=2"), factors=[LENGTH]), "'parts' changes nothing: at 1"),
        (written(factors=[LENGTH]), "unexpected keyword argument 'parts'"),
        (
            written(WITH_LENGTH.replace("repeat=parts", "repeat=2 // (3 - parts)"), factors=[LENGTH]),
            "with parts=3: the",
        ),
        (written(WITH_LENGTH, factors=[{**LENGTH, "name": "group_size"}]), "every study can already vary group_size"),
        (written(WITH_LENGTH, factors=[{**LENGTH, "high": None}]), "a numeric factor needs bounds"),
        (written(WORKFLOW.replace("else seed)", "else None)")), "called again with the same seed"),
        (written(reward="def score(answer, right):\n    return 0.0\n"), "right > wrong >= empty"),
        (written(reward="def score(answer, right):\n    return float(not answer)\n"), "right > wrong >= empty"),
        (written(reward="def score(answer, right):\n    return 1.0 + len(answer) / 0\n"), "ZeroDivisionError"),
        (written(reward="def score(answer:\n"), "reward.py:1: does not parse"),
        (written(WORKFLOW.replace("def examples", "def samples")), "no function 'examples'"),
        (written(WORKFLOW.replace('"wrong": "zzz", ', "")), "lack wrong"),
        (written(WORKFLOW.replace('"heldout" if split == "heldout" else seed', "seed")), "changes with the seed"),
        (written(WORKFLOW.replace('== (split == "heldout")]', "in (True, False)]")), "also training tasks"),
        (written(name="Not A Name"), "name"),
        (written(WORKFLOW.replace("_clients = {}", "_clients = {}\nopen('/etc/shadow').read()")), "Error"),
        (written(WORKFLOW.replace("_clients = {}", "import os\n_clients = {}\nos.fork()")), "PermissionError"),
        (
            written(
                WORKFLOW.replace("_clients = {}", "import os\n_clients = {}\nos.environ['RESEARCHER_LLM_API_KEY']")
            ),
            "KeyError",
        ),
    ],
)
async def test_one_that_does_not_hold_is_refused_with_its_reason(
    tmp_path: Path, wrong: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_LLM_API_KEY", "sk-verysecret")
    with pytest.raises(PlanningRefused, match="no instrument that passes the checks") as refused:
        await write(tmp_path, said(wrong))
    assert why in str(refused.value)
    assert os.listdir(tmp_path) == []


async def test_an_llm_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PlanningRefused, match="some-llm wrote no instrument: the key is wrong"):
        await write(tmp_path, LlmUnusable("the key is wrong"))
