"""The prefix tree: each token-in-context once, every use of it booked, nothing trained without provenance."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.engine.seam import TrainCall, TrainingRefused
from swarm.engine.tree import ROOT, Branch, PrefixTree, Segment, cut, grow, merged_tokens, timelines
from swarm.protocol.episodes import VersionSpan, WeightsVersion

from .batches import PROMPT, call

OTHER = WeightsVersion(run_id="run-1", step=1)


def branch(made: TrainCall, advantage: float = 1.0) -> Branch:
    return Branch(call=made, advantage=advantage, weight=0.5)


def random_calls(seed: int, count: int = 30) -> list[TrainCall]:
    """Timelines over three tokens: they share much."""
    draw = random.Random(seed)
    return [
        call(
            str(number),
            [1, *draw.choices(range(3), k=draw.randint(0, 4))],
            draw.choices(range(3), k=draw.randint(1, 4)),
            temperature=draw.choice([1.0, 0.7]),
        )
        for number in range(count)
    ]


def described(tree: PrefixTree, segments: Sequence[Segment]) -> dict[tuple[str, int], tuple[tuple[int, ...], float]]:
    """For every use in the segments: the tokens on the path through its head, its own token last, and the temperature."""
    found: dict[tuple[str, int], tuple[tuple[int, ...], float]] = {}
    for segment in segments:
        for head, token, at, position in zip(
            segment.use_head, segment.use_token, segment.use_branch, segment.use_position, strict=True
        ):
            where = segment.head_at[head]
            path = [segment.token[place] for place in [*segment.above(where), where]]
            assert segment.depth[where] == len(path) - 1
            key = (tree.branches[at].call.call_id, position)
            assert key not in found
            found[key] = ((*path, token), segment.head_temperature[head])
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("segment_tokens", [1, 7, 1000])
def test_every_trained_token_stands_once_under_exactly_what_the_model_saw(seed: int, segment_tokens: int) -> None:
    calls = random_calls(seed)
    tree = grow([branch(made) for made in calls])
    expected = {
        (made.call_id, position): (tuple(made.prompt_ids + made.sampled_ids[: position + 1]), made.temperature)
        for made in calls
        for position in range(len(made.sampled_ids))
    }
    assert described(tree, cut(tree, segment_tokens)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_each_distinct_token_in_context_is_one_node_and_subtrees_are_contiguous(seed: int) -> None:
    calls = random_calls(seed)
    tree = grow([branch(made) for made in calls])
    contexts = {tuple((made.prompt_ids + made.sampled_ids)[: end + 1]) for made in calls for end in range(99)}
    assert len(tree.token) == len(contexts) == merged_tokens(calls)
    (whole,) = cut(tree, 10_000)
    for position, end in enumerate(whole.end):
        below = {at for at in range(len(whole.token)) if at == position or position in whole.above(at)}
        assert below == set(range(position, end))


def test_a_token_that_predicts_nothing_is_not_computed() -> None:
    (segment,) = cut(grow([branch(call("c", PROMPT, [70, 71, 2]))]), 100)
    assert segment.token == [*PROMPT, 70, 71]


def test_segments_repeat_at_most_as_much_as_they_add() -> None:
    long = list(range(100, 160))
    tree = grow([branch(call(str(number), long, [number, 2, 3, 4])) for number in range(40)])
    segments = cut(tree, 10)
    assert len(segments) > 1
    assert sum(len(segment.token) for segment in segments) <= 2 * len(tree.token) + 120


def test_answers_to_a_prompt_that_is_longer_than_a_segment_are_computed_with_it() -> None:
    long = list(range(100, 160))
    (segment,) = cut(grow([branch(call(str(number), long, [number, 2, 3, 4])) for number in range(10)]), 10)
    assert len(segment.token) == 60 + 10 * 3


def test_cuts_are_made_where_they_repeat_least() -> None:
    """Filled up greedily, the first segment would end inside the last group and repeat its prompt."""
    calls = [
        call(f"{group}-{slot}", [group, *range(10, 18)], [slot, 3, 4])
        for group, slots in ((100, 2), (101, 1), (102, 2))
        for slot in range(slots)
    ]
    tree = grow([branch(made) for made in calls])
    segments = cut(tree, 26)
    assert sorted(len(segment.token) for segment in segments) == [13, 13 + 11]
    needed = {node for use in tree.use_node for node in tree.path(tree.parent[use])}
    assert sum(len(segment.token) for segment in segments) == len(needed)  # no prompt stands twice


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("segment_tokens", [6, 9, 14])
def test_no_other_cuts_would_repeat_less(seed: int, segment_tokens: int) -> None:
    tree = grow([branch(made) for made in random_calls(seed, count=5)])
    heads = sorted({tree.parent[node] for node in tree.use_node})
    ours = sum(len(segment.token) for segment in cut(tree, segment_tokens))
    best = min(
        filter(None, (tokens_if_cut(tree, heads, pattern, segment_tokens) for pattern in range(1 << len(heads) - 1)))
    )
    assert ours == best


def tokens_if_cut(tree: PrefixTree, heads: Sequence[int], pattern: int, segment_tokens: int) -> int | None:
    """Tokens of all segments when a bit of the pattern says to cut before that head; None where one would be too large."""
    parts = [[heads[0]]]
    for at, head in enumerate(heads[1:]):
        if pattern >> at & 1:
            parts.append([])
        parts[-1].append(head)
    total, before = 0, set[int]()
    for part in parts:
        nodes = {node for head in part for node in tree.path(head)}
        path = len(tree.path(part[0]))
        context = path if path > segment_tokens else len(nodes & before)
        if len(part) > 1 and len(nodes) > max(segment_tokens, 2 * context):
            return None
        total += len(nodes)
        before |= nodes
    return total


@pytest.mark.parametrize("seed", range(4))
def test_timelines_hold_every_trained_token_once_and_are_paths(seed: int) -> None:
    calls = random_calls(seed)
    tree = grow([branch(made) for made in calls])
    segments = timelines(tree)
    assert described(tree, segments) == described(tree, cut(tree, 10_000))
    for segment in segments:
        assert segment.parent == list(range(-1, len(segment.token) - 1))


def test_a_later_turn_trains_only_what_it_sampled_itself() -> None:
    first = call("first", PROMPT, [70, 71])
    second = call("second", [*PROMPT, 70, 71, 50], [80])
    tree = grow([branch(first), branch(second)])
    assert [tree.token[node] for node in tree.use_node] == [70, 71, 80]
    assert tree.parent.count(ROOT) == 1


def test_duplicates_share_a_node_and_keep_their_advantages() -> None:
    tree = grow([branch(call("a", PROMPT, [70]), 1.0), branch(call("b", PROMPT, [70]), -0.5)])
    assert tree.use_node == [tree.use_node[0]] * 2
    (segment,) = cut(tree, 100)
    assert len(segment.head_at) == 1
    assert [tree.branches[at].advantage for at in segment.use_branch] == [1.0, -0.5]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, float("nan")]},
        {"logprobs": [-1.0, 0.5]},
        {"logprobs": [-1.0, float("-inf")]},
        {"versions": []},
        {"versions": [VersionSpan(start=0, end=1, version=OTHER)]},
        {"versions": [VersionSpan(start=1, end=2, version=OTHER)]},
        {"versions": [VersionSpan(start=0, end=2, version=OTHER), VersionSpan(start=1, end=2, version=OTHER)]},
        {"call_id": ""},
        {"prompt_ids": []},
        {"prompt_ids": [-1]},
        {"sampled_ids": [], "logprobs": [], "versions": []},
        {"temperature": 0.0},
    ],
)
def test_a_call_without_provenance_is_refused(fields: dict[str, Any]) -> None:
    sound = call("c", PROMPT, [70, 71])
    grow([branch(sound)])
    with pytest.raises(TrainingRefused):
        grow([branch(dataclasses.replace(sound, **fields))])


def test_a_call_over_two_weights_versions_is_sound() -> None:
    spans = [
        VersionSpan(start=0, end=1, version=WeightsVersion(run_id="run-1")),
        VersionSpan(start=1, end=2, version=OTHER),
    ]
    assert grow([branch(call("c", PROMPT, [70, 71], versions=spans))]).use_position == [0, 1]


def test_a_call_that_stands_in_the_batch_twice_is_refused() -> None:
    with pytest.raises(TrainingRefused, match="twice"):
        grow([branch(call("c", PROMPT, [70])), branch(call("c", PROMPT, [71]))])
