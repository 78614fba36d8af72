"""The prefix tree of a batch: all timelines merged on token ids, each distinct token-in-context in it once.

Tokens in, positions and ancestors out; knows nothing of rewards or tensors. Holds invariant I1: a token may only be
trained with its call, position, sampled log-probability and weights version, under the path that the model really saw.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from swarm.engine.seam import TrainCall, TrainingRefused

ROOT = -1
_LOGPROB_SLACK = 1e-3
"""Samplers round: a log-probability may come out this far above zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One call to be trained. Each token that it sampled has this advantage, and this weight in the loss."""

    call: TrainCall
    advantage: float
    weight: float


@dataclass(slots=True, kw_only=True)
class PrefixTree:
    """Nodes in depth-first order, so that a subtree is contiguous and a parent stands before its children.

    A use is one sampled token of one branch; uses are ordered by branch, then position. Equal tokens in equal context
    are one node with several uses.
    """

    branches: Sequence[Branch]
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    use_node: list[int] = field(default_factory=list)
    use_branch: list[int] = field(default_factory=list)
    use_position: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Nodes from the root down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


@dataclass(slots=True, kw_only=True)
class Segment:
    """A part of the tree that is computed at once: some nodes with all their ancestors, depth-first.

    parent and end are positions in the segment; the subtree of position i is [i, end[i]), so that i is an ancestor of j
    (or j itself) exactly when i <= j < end[i]. A head is a position at which the distribution of the next token is needed,
    at one temperature. A use names its head, the token that was sampled there, and where that came from.
    """

    token: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    head_at: list[int] = field(default_factory=list)
    head_temperature: list[float] = field(default_factory=list)
    use_head: list[int] = field(default_factory=list)
    use_token: list[int] = field(default_factory=list)
    use_branch: list[int] = field(default_factory=list)
    use_position: list[int] = field(default_factory=list)

    def above(self, position: int) -> list[int]:
        """The ancestors of a position, from the root down."""
        found = []
        position = self.parent[position]
        while position != ROOT:
            found.append(position)
            position = self.parent[position]
        return found[::-1]


def grow(branches: Sequence[Branch]) -> PrefixTree:
    """The prefix tree over `branches`.

    Raises: TrainingRefused when a call lacks provenance, or stands in the batch twice.
    """
    for branch in branches:
        check_provenance(branch.call)
    _refuse_repeats(branches)
    tree = PrefixTree(branches=branches)
    paths = [branch.call.prompt_ids + branch.call.sampled_ids for branch in branches]
    nodes_of: list[list[int]] = [[]] * len(paths)
    nodes: list[int] = []
    last: list[int] = []
    for index in sorted(range(len(paths)), key=paths.__getitem__):  # sorted paths are met in depth-first order
        path = paths[index]
        shared = shared_length(last, path)
        nodes = nodes[:shared]
        for depth in range(shared, len(path)):
            tree.token.append(path[depth])
            tree.parent.append(nodes[-1] if nodes else ROOT)
            tree.depth.append(depth)
            nodes.append(len(tree.token) - 1)
        nodes_of[index], last = nodes, path
    for index, branch in enumerate(branches):
        _book_uses(tree, index, branch.call, nodes_of[index])
    return tree


def _book_uses(tree: PrefixTree, index: int, call: TrainCall, nodes: list[int]) -> None:
    """Enter the call's sampled tokens, after checking that the path above them is what the model saw."""
    last = nodes[-1]
    if [tree.token[node] for node in tree.path(last)] != call.prompt_ids + call.sampled_ids:
        raise TrainingRefused(f"call {call.call_id}: its path in the prefix tree is not its prompt and samples")
    sampled = nodes[len(call.prompt_ids) :]
    tree.use_node += sampled
    tree.use_branch += [index] * len(sampled)
    tree.use_position += range(len(sampled))


def check_provenance(call: TrainCall) -> None:
    """Raises: TrainingRefused unless every sampled token has its log-probability and exactly one weights version."""
    count = len(call.sampled_ids)
    if not call.call_id:
        raise TrainingRefused("a call without an id cannot be trained: nothing says where its tokens came from")
    if not call.prompt_ids or not count:
        raise TrainingRefused(f"call {call.call_id}: {len(call.prompt_ids)} prompt and {count} sampled tokens")
    if min(call.prompt_ids) < 0 or min(call.sampled_ids) < 0:
        raise TrainingRefused(f"call {call.call_id}: negative token ids")
    if len(call.logprobs) != count:
        raise TrainingRefused(
            f"call {call.call_id}: {count} sampled tokens, but {len(call.logprobs)} log-probabilities"
        )
    if not all(-math.inf < logprob <= _LOGPROB_SLACK for logprob in call.logprobs):
        raise TrainingRefused(f"call {call.call_id}: recorded log-probabilities that are not finite or above 0")
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        raise TrainingRefused(f"call {call.call_id}: temperature {call.temperature} has no distribution to train")
    ends = [0, *(span.end for span in call.versions)]
    starts = [*(span.start for span in call.versions), count]
    if starts != ends or any(start >= end for start, end in pairwise(ends)):
        raise TrainingRefused(f"call {call.call_id}: weights versions do not cover its {count} tokens exactly once")


def _refuse_repeats(branches: Iterable[Branch]) -> None:
    seen: set[str] = set()
    for branch in branches:
        if branch.call.call_id in seen:
            raise TrainingRefused(f"call {branch.call.call_id} stands in the batch twice")
        seen.add(branch.call.call_id)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next(index for index in range(size) if first[index] != second[index])


def merged_tokens(calls: Iterable[TrainCall]) -> int:
    """How many nodes the tree over these calls has."""
    paths = sorted(call.prompt_ids + call.sampled_ids for call in calls)
    return sum(map(len, paths)) - sum(shared_length(first, second) for first, second in pairwise(paths))


def cut(tree: PrefixTree, segment_tokens: int) -> list[Segment]:
    """Segments of about `segment_tokens` tokens that together hold each head exactly once.

    Nodes under which nothing is trained are left out: a sampled token is predicted at its parent, so that leaves are not
    computed. A cut inside a tree repeats the path above it; a segment then grows to twice that path if need be, so that at
    most half of the work is repeated.
    """
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens must be positive, got {segment_tokens}")
    uses = _uses_by_parent(tree)
    segments: list[Segment] = []
    place: dict[int, int] = {}
    context = 0
    for head in sorted(uses):
        if not segments or len(segments[-1].token) >= max(segment_tokens, 2 * context):
            segments.append(Segment())
            place = {}
            context = tree.depth[head]
        for node in _until(tree, head, place):
            _place(tree, node, segments[-1], place)
        _add_heads(tree, uses[head], segments[-1], place[head])
    for segment in segments:
        segment.end = _subtree_ends(segment.parent)
    return segments


def _uses_by_parent(tree: PrefixTree) -> dict[int, list[int]]:
    """Uses by the node at which they were predicted."""
    uses: dict[int, list[int]] = {}
    for use, node in enumerate(tree.use_node):
        uses.setdefault(tree.parent[node], []).append(use)
    return uses


def _until(tree: PrefixTree, node: int, placed: Container[int]) -> list[int]:
    """The path down to `node`, without the part that is placed already."""
    path = []
    while node != ROOT and node not in placed:
        path.append(node)
        node = tree.parent[node]
    return path[::-1]


def _place(tree: PrefixTree, node: int, segment: Segment, place: dict[int, int]) -> None:
    place[node] = len(segment.token)
    segment.token.append(tree.token[node])
    segment.depth.append(tree.depth[node])
    segment.parent.append(place.get(tree.parent[node], ROOT))


def _add_heads(tree: PrefixTree, uses: list[int], segment: Segment, at: int) -> None:
    """One head per temperature at this position, and the uses that it predicts."""
    head_of: dict[float, int] = {}
    for use in sorted(uses, key=lambda use: tree.branches[tree.use_branch[use]].call.temperature):
        temperature = tree.branches[tree.use_branch[use]].call.temperature
        if temperature not in head_of:
            head_of[temperature] = len(segment.head_at)
            segment.head_at.append(at)
            segment.head_temperature.append(temperature)
        segment.use_head.append(head_of[temperature])
        segment.use_token.append(tree.token[tree.use_node[use]])
        segment.use_branch.append(tree.use_branch[use])
        segment.use_position.append(tree.use_position[use])


def _subtree_ends(parent: list[int]) -> list[int]:
    ends = list(range(1, len(parent) + 1))
    for position in range(len(parent) - 1, -1, -1):
        above = parent[position]
        if above != ROOT:
            ends[above] = max(ends[above], ends[position])
    return ends
