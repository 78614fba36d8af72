"""An instrument's packages and tasks, before a study begins: what is missing or wrong is said in one line."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from researcher.environments import check_tasks, count_heldout, drawn_once, install, interpreter, pins, rehearsed
from researcher.instruments.catalogue import InstrumentFolder, read_instrument
from researcher.refusals import PlanningRefused
from tests.fakes.specs import planned

REPEAT = Path(__file__).parents[1] / "instruments" / "repeat"
SOUND = """
from swarm.client import Task

def tasks(split, seed, count, *, syllables=2):
    names = (f"{split}-{number}" if split == "heldout" else f"{split}-{seed}-{number}" for number in range(500))
    return [Task(name, name) for name in names][:count]

async def rollout(episode, task):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REPEAT, tmp_path / "repeat"))


def with_code(folder: Path, text: str) -> InstrumentFolder:
    (folder / "workflow.py").write_text(text)
    return read_instrument(folder)


def with_pins(folder: Path, text: str) -> InstrumentFolder:
    (folder / "requirements.txt").write_text(text)
    page = folder / "instrument.toml"
    page.write_text('requirements = "requirements.txt"\n' + page.read_text())
    return read_instrument(folder)


def test_tasks_are_drawn_and_shown(folder: Path) -> None:
    (found,) = rehearsed(with_code(folder, SOUND), sys.executable, [{}], 8, thorough=True)
    assert (found["train"], found["heldout"]) == (200, 8)
    assert found["examples"][1] == {"id": "heldout-0", "query": "heldout-0"}


def test_what_an_llm_wrote_draws_its_tasks_in_the_sandbox_without_secrets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_LLM_API_KEY", "a secret")
    page = folder / "instrument.toml"
    page.write_text('generated = "some-llm"\n' + page.read_text())
    (found,) = rehearsed(with_code(folder, SOUND), sys.executable, [{}], 8)
    assert found["heldout"] == 8
    telling = SOUND.replace(
        "return [Task",
        'raise ValueError(__import__("os").environ.get("RESEARCHER_LLM_API_KEY", "none"))\n    return [Task',
    )
    with pytest.raises(PlanningRefused, match="repeat: none"):
        rehearsed(with_code(folder, telling), sys.executable, [{}], 8)
    forking = SOUND.replace("return [Task", "__import__('os').fork()\n    return [Task")
    with pytest.raises(PlanningRefused):
        rehearsed(with_code(folder, forking), sys.executable, [{}], 8)


def test_a_study_is_evaluated_on_as_many_held_out_tasks_as_every_arm_has(folder: Path) -> None:
    few = SOUND.replace("[:count]", "[: min(count, 3 if split == 'heldout' else 500)]")
    plan = planned(folder)
    assert check_tasks(plan, with_code(folder, SOUND), sys.executable) == plan
    fewer = check_tasks(plan, with_code(folder, few), sys.executable)
    assert fewer.heldout_tasks == 3
    assert "3 held-out tasks instead of" in fewer.assumptions[-1]


def test_a_plan_that_skips_held_out_tasks_needs_all_of_those_after_them(folder: Path) -> None:
    plan = planned(folder, heldout_from=6, heldout_tasks=4)
    assert check_tasks(plan, with_code(folder, SOUND), sys.executable) == plan
    few = SOUND.replace("[:count]", "[: min(count, 9 if split == 'heldout' else 500)]")
    with pytest.raises(PlanningRefused, match="has 9 held-out tasks, but 10 are needed"):
        check_tasks(plan, with_code(folder, few), sys.executable)
    assert count_heldout(plan, with_code(folder, few), sys.executable, 100) == 9


def test_tasks_that_change_with_their_number_cannot_be_left_to_others(folder: Path) -> None:
    turned = SOUND.replace("[:count]", "[:count][:: -1 if split == 'heldout' else 1]")
    plan = planned(folder, heldout_from=6, heldout_tasks=4)
    with pytest.raises(PlanningRefused, match="depends on the count"):
        check_tasks(plan, with_code(folder, turned), sys.executable)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('f"{split}-{seed}-{number}"', 'f"heldout-{number}"', "task 'heldout-0' is both in 'train' and in 'heldout'"),
        ('f"{split}-{number}" if', 'f"{split}-{seed}" if', "yields the same task twice"),
        ('f"{split}-{number}" if', 'f"{split}-{seed}-{number}" if', "depends on the seed"),
        ('f"{split}-{seed}-{number}"', 'f"{id(object())}-{__import__(\'os\').urandom(4).hex()}"', "yields different tasks the second time"),
        ("[:count]", "[:0]", "yields no tasks"),
        ("range(500)", "range(50)", "ends after 50 tasks; it must be endless"),
        ("[Task(name, name)", "[name", "yields str, not swarm.client.Task"),
        ("return [Task", "raise ValueError('data, line 3: is not JSON')\n    return [Task", "repeat: data, line 3: is not JSON"),
        ("return [Task", "1 / 0\n    return [Task", "ZeroDivisionError: division by zero"),
        ("return [Task", "raise KeyError('one', 'two') from Exception('a\\nb')\n    return [Task", "KeyError: ('one', 'two')"),
        ("return [Task", "raise RuntimeError('first\\nsecond')\n    return [Task", "lists its tasks: RuntimeError: first File"),
        ("async def rollout", "def rollout", "must be `async def rollout"),
        ("from swarm.client import Task", "import no_such_module", "No module named 'no_such_module'"),
        ("syllables=2", "vowels=2", "unexpected keyword argument 'syllables'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_instrument_is_said_in_one_line(folder: Path, old: str, new: str, says: str) -> None:
    assert old in SOUND
    wrong = with_code(folder, SOUND.replace(old, new, 1))
    with pytest.raises(PlanningRefused) as refused:
        rehearsed(wrong, sys.executable, [{"syllables": 2}], 8, thorough=True)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_parameters_that_factors_set_have_to_be_there(folder: Path) -> None:
    sound = with_code(folder, SOUND)
    rehearsed(sound, sys.executable, [{}], 8, names=["syllables"])
    for name, says in (
        ("sylables", "repeat: tasks has no parameter 'sylables'; did you mean 'syllables'?"),
        ("seed", "no parameter 'seed'"),
    ):
        with pytest.raises(PlanningRefused, match=says):
            rehearsed(sound, sys.executable, [{}], 8, names=[name])
    anything = with_code(folder, SOUND.replace("*, syllables=2", "**parameters"))
    rehearsed(anything, sys.executable, [{}], 8, names=["sylables"])


def test_every_arm_of_a_plan_is_tried(folder: Path) -> None:
    code = SOUND.replace("    names", "    if syllables == 3: raise ValueError('three are too many')\n    names", 1)
    instrument = with_code(folder, code)
    check_tasks(planned(instrument), instrument, sys.executable)
    length = planned(instrument, compare={"syllables": {"baseline": 2, "levels": [3]}})
    with pytest.raises(PlanningRefused, match="three are too many"):
        check_tasks(length, instrument, sys.executable)


def test_an_instrument_without_packages_of_its_own_runs_under_this_python(folder: Path, tmp_path: Path) -> None:
    assert interpreter(read_instrument(folder), tmp_path) == sys.executable
    here = with_pins(folder, f"# what is here anyway\npytest=={pytest.__version__}  # and why\n\n")
    assert interpreter(here, tmp_path) == install(here, tmp_path) == sys.executable
    assert not (tmp_path / "environments").exists()


def test_a_line_that_pins_nothing_is_refused_with_its_number(folder: Path) -> None:
    with pytest.raises(PlanningRefused, match=r"requirements\.txt, line 2: write name==version, got 'numpy>=2'"):
        pins(with_pins(folder, "a==1\nnumpy>=2\n"))


def test_a_requirements_file_that_is_not_there_is_refused(folder: Path) -> None:
    page = folder / "instrument.toml"
    page.write_text('requirements = "needs.txt"\n' + page.read_text())
    with pytest.raises(PlanningRefused, match=r"requirements: there is no file 'needs\.txt'"):
        read_instrument(folder)


def test_packages_are_installed_into_an_environment_on_top_of_this_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (folder / "workflow.py").write_text(
        "import word_maker\n" + SOUND.replace("Task(name, name)", "Task(name, word_maker.WORD)")
    )
    needy = with_pins(folder, "word-maker==1.0\n")
    with pytest.raises(PlanningRefused, match=r"needs word-maker==1\.0, .* instruments --install repeat"):
        interpreter(needy, tmp_path)
    with pytest.raises(PlanningRefused, match=r"cannot be installed; pip says: .*word-maker"):
        install(needy, tmp_path)
    _wheel(tmp_path / "word_maker-1.0-py3-none-any.whl")
    python = install(needy, tmp_path)
    assert python == interpreter(needy, tmp_path) != sys.executable
    (found,) = rehearsed(needy, python, [{}], 4)
    assert found["examples"][0]["query"] == "wombat"
    with pytest.raises(PlanningRefused, match="No module named 'word_maker'"):
        rehearsed(needy, sys.executable, [{}], 4)


def _wheel(file: Path) -> None:
    facts = "word_maker-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("word_maker.py", "WORD = 'wombat'\n")
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: word-maker\nVersion: 1.0\n")
        wheel.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{facts}/RECORD", "")


def test_what_many_plans_ask_for_is_drawn_once_and_a_refusal_is_not_remembered() -> None:
    folder, drawn = read_instrument(REPEAT), list[int]()

    def draw(
        folder: InstrumentFolder,
        python: str,
        parameters: Sequence[Mapping[str, Any]],
        heldout: int,
        skipped: int,
    ) -> list[dict[str, Any]]:
        drawn.append(heldout)
        if heldout == 99:
            raise PlanningRefused("not now")
        return [{"heldout": heldout}]

    once = drawn_once(draw)
    for _ in range(2):
        assert once(folder, "python", [{"digits": 1}], 4, 0) == [{"heldout": 4}]
        assert once(folder, "python", [{"digits": 1}], 8, 0) == [{"heldout": 8}]
        with pytest.raises(PlanningRefused):
            once(folder, "python", [{"digits": 1}], 99, 0)
    assert drawn == [4, 8, 99, 99]
    once(folder, "python", [{"digits": 2}], 4, 0)
    once(folder, "python", [{"digits": 1}], 4, 2)
    assert drawn[4:] == [4, 4]
