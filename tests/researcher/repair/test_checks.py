"""What can be told of files without running them."""

from __future__ import annotations

import pytest

from researcher.repair.code import Unfit, check_changes, check_entries, diff

OLD = {
    "workflow.py": "LIMIT = 3\n\ndef tasks(split, seed, count, *, digits=1):\n    return []\n\nasync def rollout(episode, task):\n"
    "    return _one()\n\ndef _one():\n    return 1.0\n",
    "reward.py": "def score(answer, right):\n    return 1.0\n",
    "instrument.toml": 'name = "x"\n',
}


def test_private_names_and_bodies_may_change() -> None:
    check_changes(
        OLD,
        {"workflow.py": OLD["workflow.py"].replace("_one", "_two").replace("return []", "return [1]")},
        "workflow.py",
    )
    check_changes(OLD, {"reward.py": "def score(answer: str, right: str) -> float:\n    return 0.5\n"}, "workflow.py")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "nothing was changed"),
        ({"reward.py": OLD["reward.py"]}, "nothing was changed"),
        ({"other.py": "x = 1\n"}, "not a file of the instrument"),
        ({"../reward.py": "x = 1\n"}, "not a file of the instrument"),
        ({"instrument.toml": 'name = "y"\n'}, "may not be changed"),
        ({"reward.py": "def score(answer, right:\n"}, "reward.py:1: does not parse"),
        ({"reward.py": "def score(answer):\n    return 1.0\n"}, r"`def score\(answer, right\)` must stay"),
        ({"reward.py": "x = 1\n"}, "is gone"),
        ({"workflow.py": OLD["workflow.py"].replace("*, digits=1", "*, figures=1")}, "must stay"),
        ({"workflow.py": OLD["workflow.py"].replace("async def", "def")}, "must stay"),
        ({"workflow.py": OLD["workflow.py"].replace("LIMIT = 3", "")}, "is gone"),
        ({"reward.py": "x = 1\n" * 100_000}, "characters"),
        ({"reward.py": "x = '\0'\n"}, "does not parse"),
    ],
)
def test_what_is_no_repair_is_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        check_changes(OLD, changes, "workflow.py")


def test_a_file_that_did_not_parse_may_offer_what_it_likes_but_for_the_entries() -> None:
    broken = {**OLD, "workflow.py": "def tasks(:\n"}
    check_changes(broken, {"workflow.py": OLD["workflow.py"]}, "workflow.py")
    with pytest.raises(Unfit, match="no function 'rollout'"):
        check_changes(broken, {"workflow.py": "def tasks():\n    return []\n"}, "workflow.py")
    with pytest.raises(Unfit, match="async def rollout"):
        check_entries("workflow.py", "def tasks(): ...\ndef rollout(): ...\n")


def test_a_diff_names_every_file_that_differs() -> None:
    text = diff(OLD, {**OLD, "reward.py": "def score(answer, right):\n    return 2.0\n"})
    assert text.splitlines()[:2] == ["--- a/reward.py", "+++ b/reward.py"]
    assert "+    return 2.0" in text
    assert "workflow.py" not in text
