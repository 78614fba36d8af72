"""Functions of a user's own: what they are given, what is refused of them, and that they are exact."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.engine.algorithms import algorithm_of
from swarm.engine.algorithms.checks import check_function
from swarm.engine.algorithms.rewards import Trajectory
from swarm.engine.seam import TrainingRefused
from swarm.protocol.algorithms import AlgorithmSpec
from tests.swarm.engine.own_functions import SOURCE, own


def spec_of(**fields: Any) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate(fields)


def trajectory(group: str, reward: float, *calls: int) -> Trajectory:
    size = sum(calls)
    facts = {"recorded": [-1.0] * size, "logps": [-1.1] * size, "entropies": [0.5] * size}
    return Trajectory(group=group, reward=reward, tokens=size, calls=calls, **facts)


def written(text: str, **fields: Any) -> AlgorithmSpec:
    return spec_of(**{"name": "mine.py:advantage", "sources": {"mine.py": text}} | fields)


def test_an_advantage_sees_every_episode_also_those_without_a_trained_token() -> None:
    paths = [trajectory("a", 1.0, 2, 1), trajectory("a", 0.0), trajectory("b", 0.5, 1), trajectory("b", 0.5, 2)]
    credits = algorithm_of(spec_of(**own(name="mine.py:advantage"))).credit(paths)
    assert [list(credit.advantages) for credit in credits] == [[0.5] * 3, [], [0.0], [0.0] * 2]
    text = "def advantage(t):\n    return t.call_N + 10.0 * t.episode_N + 100.0 * t.group_N"
    credits = algorithm_of(written(text)).credit(paths)
    assert [list(credit.advantages) for credit in credits] == [[0, 0, 1], [], [122], [133, 133]]


def test_a_penalty_of_the_rewards_is_off_before_they_are_compared() -> None:
    path = trajectory("a", 1.0, 2)
    penalised = Trajectory(**{name: getattr(path, name) for name in path.__slots__} | {"penalties": [0.25, 0.5]})
    algorithm = algorithm_of(written("def advantage(t):\n    return t.reward_E[t.episode_N]"))
    assert list(algorithm.credit([penalised])[0].advantages) == [0.25, 0.25]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return t.reward_E / 0", r"shape \[1\], not \[2\]"),
        ("return 1.0", "returned float"),
        ("return t.advantage_N / 0", "not finite"),
        ("x = 1\n    return t.nothing", r"raised AttributeError.*\(line 3\)"),
        ("raise SystemExit('no')", "raised SystemExit: no"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused_with_what_to_do(body: str, said: str) -> None:
    algorithm = algorithm_of(written(f"def advantage(t):\n    {body}"))
    with pytest.raises(TrainingRefused, match=f"mine.py:advantage .*{said}.*swarm algorithm check"):
        algorithm.credit([trajectory("a", 1.0, 2)])


def test_a_text_may_define_dataclasses_with_postponed_annotations() -> None:
    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "@dataclass",
        "class Half:",
        "    of: float",
    ]
    text = "\n".join([*lines, "def advantage(t):", "    return t.logp_N * 0 + Half(3.0).of / 2"])
    assert list(algorithm_of(written(text)).credit([trajectory("a", 1.0, 2)])[0].advantages) == [1.5, 1.5]


def test_what_a_text_leaves_in_its_module_is_gone_by_the_next_call() -> None:
    text = "seen = []\n\ndef advantage(t):\n    seen.append(1)\n    return t.advantage_N + len(seen)"
    algorithm = algorithm_of(written(text))
    for _ in range(2):
        assert list(algorithm.credit([trajectory("a", 1.0, 1)])[0].advantages) == [1.0]


CHECKED: dict[str, tuple[str, set[str]]] = {
    "return -(t.logp_N - t.old_logp_N).clamp(max=30.0).exp() * t.advantage_N": ("loss", set()),
    "return -(t.logp_N - t.old_logp_N).exp() * t.advantage_N": ("loss", {"extremes"}),
    "return t.logp_N - t.logp_N.detach().mean()": ("loss", {"mask", "padding", "gradient"}),
    "return t.advantage_N": ("loss", {"gradient"}),
    "return t.logp_N * torch.arange(len(t.logp_N))": ("loss", {"order", "padding"}),
    "return torch.rand(len(t.logp_N))": ("name", {"deterministic", "order", "mask", "padding"}),
    "return t.reward_E.mean()": ("name", {"runs"}),
    "return t.call_N.bincount()[t.call_N] * 1.0": ("name", {"padding"}),
    "return (t.old_logp_N - t.sampled_logp_N).exp()": ("importance_correction", {"extremes"}),
}


@pytest.mark.parametrize("body", CHECKED)
def test_checks_find_what_is_wrong_with_a_function(body: str) -> None:
    field, expected = CHECKED[body]
    spec = spec_of(**{field: "mine.py:f", "sources": {"mine.py": f"import torch\n\ndef f(t):\n    {body}"}})
    assert {check.check for check in check_function(spec, field) if check.passed is False} == expected


@pytest.mark.parametrize(
    ("field", "name"),
    [("name", "advantage"), ("loss", "loss"), ("loss", "coupled_loss"), ("importance_correction", "correction")],
)
def test_sound_functions_pass_all_checks(field: str, name: str) -> None:
    found = check_function(spec_of(**own(**{field: f"mine.py:{name}"})), field)
    assert [check for check in found if check.passed is False] == []


def test_a_loss_that_detaches_on_purpose_can_say_so() -> None:
    text = "def f(t):\n    return -(t.logp_N.detach() - t.old_logp_N).clamp(max=5.0).exp() * t.advantage_N * t.logp_N"
    spec = spec_of(loss="mine.py:f", sources={"mine.py": text})
    assert {check.check for check in check_function(spec, "loss") if check.passed is False} == {"gradient"}
    assert all(check.passed is not False for check in check_function(spec, "loss", detached=True))


def test_a_spec_with_functions_comes_back_from_json_and_differs_by_their_text() -> None:
    spec = spec_of(**own(loss="mine.py:loss"))
    assert AlgorithmSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec_of(loss="mine.py:loss", sources={"mine.py": SOURCE + "# edited"}) != spec
    assert "sources" not in AlgorithmSpec().model_dump()
