"""Counts of choices that finished before others of their call, which vLLM's model runner forgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarm.engine.local.sampled_counts import FinishedChoices
from swarm.engine.sampling.request_ids import CHOICES
from swarm.engine.sampling.sampler import WeightSpans
from swarm.protocol.episodes import WeightsVersion


def request(tokens: int, choices: int | None = None) -> Any:
    arguments = None if choices is None else {CHOICES: choices}
    return SimpleNamespace(output_token_ids=[0] * tokens, sampling_params=SimpleNamespace(extra_args=arguments))


def test_a_finished_choice_counts_until_the_others_have_finished_too() -> None:
    finished = FinishedChoices()
    names = [f"{choice}_chatcmpl-a-0123abcd" for choice in range(3)]
    requests = {names[0]: request(5, 3), names[1]: request(9, 3)}
    finished.add(requests, {names[0]})
    assert finished.counts == {names[0]: 5}
    finished.add({names[1]: request(9, 3), names[2]: request(1, 3)}, {names[1]})
    assert finished.counts == {names[0]: 5, names[1]: 9}
    finished.add({names[2]: request(4, 3)}, {names[2]})
    assert finished.counts == {}


def test_a_call_with_one_choice_is_not_kept() -> None:
    finished = FinishedChoices()
    pooling = SimpleNamespace(output_token_ids=[], sampling_params=None)
    finished.add({"chatcmpl-a-0123abcd": request(5), "b": pooling}, {"chatcmpl-a-0123abcd", "b"})
    assert finished.counts == {}


def test_a_cancelled_call_is_not_kept_though_some_of_its_choices_never_began() -> None:
    finished = FinishedChoices()
    names = [f"{choice}_cmpl-a-0-0123abcd" for choice in range(3)]
    finished.add({names[0]: request(5, 3), names[1]: request(3, 3)}, {names[0]})
    assert finished.counts == {names[0]: 5}
    finished.add({names[1]: request(3, 3)}, {names[2], names[1]})
    assert finished.counts == {}


def test_tokens_of_a_finished_choice_keep_their_weights_over_a_change() -> None:
    old, new = WeightsVersion(run_id="r", step=1), WeightsVersion(run_id="r", step=2)
    spans, finished = WeightSpans(old), FinishedChoices()
    call = spans.begin("a")
    names = [f"{choice}_chatcmpl-a-0123abcd" for choice in range(3)]
    finished.add({names[0]: request(5, 3)}, {names[0]})
    spans.change(new, finished.counts | {names[1]: 7})
    versions = [
        [(span.end, span.version) for span in call.spans(choice, 0, size)] for choice, size in enumerate((5, 9, 4))
    ]
    assert versions == [[(5, old)], [(7, old), (9, new)], [(4, new)]]
