"""The prefix tree of a batch: all timelines merged on token ids, each distinct token-in-context in it once.

Tokens in, positions and ancestors out; knows nothing of rewards or tensors. Holds invariant I1: a token may only be
trained with its call, position, sampled log-probability and weights version, under the path that the model really saw.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from swarm.engine.seam import TrainCall, TrainingRefused
from swarm.protocol.sampling_mask import LogitChanges

ROOT = -1
_LOGPROB_SLACK = 1e-3
"""Rounding may put a sampler's log-probability this far above zero."""


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
    (or j itself) exactly when i <= j < end[i]. A head is a position at which the distribution of the next token is needed, at one
    temperature and under one restriction: that of the token that `head_drawn` names by branch and position (None: under none). A use
    names its head, the token that was sampled there, and where that came from.
    """

    token: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    head_at: list[int] = field(default_factory=list)
    head_temperature: list[float] = field(default_factory=list)
    head_drawn: list[tuple[int, int] | None] = field(default_factory=list)
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
    if call.mask is not None and len(call.mask.row_of) != count:
        raise TrainingRefused(
            f"call {call.call_id}: its mask is of {len(call.mask.row_of)} tokens, and it sampled {count}"
        )
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


def timeline_numbers(calls: Sequence[TrainCall]) -> list[int]:
    """Which timeline each call of an episode belongs to, counted from 0.

    A call continues the longest timeline whose tokens, sampled ones included, its prompt begins with; else it begins one.
    """
    found = [0] * len(calls)
    ends: list[list[int]] = []
    for index in sorted(range(len(calls)), key=lambda index: len(calls[index].prompt_ids)):
        call = calls[index]
        begun = [number for number, ids in enumerate(ends) if call.prompt_ids[: len(ids)] == ids]
        number = max(begun, key=lambda number: len(ends[number]), default=len(ends))
        ends[number : number + 1] = [call.prompt_ids + call.sampled_ids]
        found[index] = number
    return found


def cut(tree: PrefixTree, segment_tokens: int) -> list[Segment]:
    """Segments of at most `segment_tokens` tokens that together hold each head exactly once.

    Nodes under which nothing is trained are left out: a sampled token is predicted at its parent, so that leaves are not
    computed. A cut inside a tree repeats the path above it. Cuts are made where they repeat least, all in all; among
    equals there are as few as can be. Below a long path a segment may grow to twice the path, so that at most half of its
    work is repeated, and what hangs off a path that is longer than a segment is computed with it.
    """
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens must be positive, got {segment_tokens}")
    uses = _uses_by_parent(tree)
    heads = sorted(uses)
    if not heads:
        return []
    starts = {0, *_cheapest_cuts(_news(tree, heads), [tree.depth[head] + 1 for head in heads], segment_tokens)}
    segments: list[Segment] = []
    place: dict[int, int] = {}
    for number, head in enumerate(heads):
        if number in starts:
            segments.append(Segment())
            place = {}
        for node in _until(tree, head, place):
            _place(tree, node, segments[-1], place)
        _add_heads(tree, uses[head], segments[-1], place[head])
    for segment in segments:
        segment.end = _subtree_ends(segment.parent)
    return segments


def timelines(tree: PrefixTree) -> list[Segment]:
    """One segment for each path that ends in a head above no other: what models compute that can read no tree.

    A head stands in the first of the timelines that hold it.
    """
    uses = _uses_by_parent(tree)
    booked: set[int] = set()
    segments = []
    for head in _last_heads(tree, uses):
        segment, place = Segment(), dict[int, int]()
        for node in tree.path(head):
            _place(tree, node, segment, place)
            if node in uses and node not in booked:
                booked.add(node)
                _add_heads(tree, uses[node], segment, place[node])
        segment.end = _subtree_ends(segment.parent)
        segments.append(segment)
    return segments


def _last_heads(tree: PrefixTree, uses: Container[int]) -> list[int]:
    """Heads with no other below, in order."""
    above: set[int] = set()
    last = []
    for node in range(len(tree.token) - 1, -1, -1):
        if node in above or node in uses:
            if node not in above:
                last.append(node)
            above.add(tree.parent[node])
    return last[::-1]


def _news(tree: PrefixTree, heads: Sequence[int]) -> list[int]:
    """How many nodes each head adds to those computed for earlier heads."""
    placed: set[int] = set()
    counts = []
    for head in heads:
        path = _until(tree, head, placed)
        placed.update(path)
        counts.append(len(path))
    return counts


def _cheapest_cuts(news: Sequence[int], lengths: Sequence[int], most: int) -> list[int]:
    """Before which heads to start a new segment, so that the fewest tokens are computed twice.

    news, lengths: of each head, the tokens that it adds to those before it, and on its whole path. The best way to a cut is
    the best way to an earlier one, as long as what lies between fits; the heap holds the ways, cheapest first.
    """
    ends = [0, *accumulate(news)]
    ways: list[tuple[int, int, int]] = []  # (tokens repeated, segments, head that the last segment begins with)
    came_from: list[int] = []
    repeated, segments = 0, 0
    for head in range(len(news)):
        heappush(ways, (repeated + lengths[head] - news[head], segments + 1, head))
        while not _fits(ways[0][2], head + 1, ends, news, lengths, most):
            heappop(ways)
        repeated, segments, begin = ways[0]
        came_from.append(begin)
    cuts = [came_from[-1]]
    while cuts[-1] > 0:
        cuts.append(came_from[cuts[-1] - 1])
    return cuts


def _fits(first: int, last: int, ends: Sequence[int], news: Sequence[int], lengths: Sequence[int], most: int) -> bool:
    """Whether heads [first, last) make a segment. One alone always does."""
    context = lengths[first] - news[first]
    size = context + ends[last] - ends[first]
    long = lengths[first] if lengths[first] > most else context
    return size <= max(most, 2 * long) or last == first + 1


def _uses_by_parent(tree: PrefixTree) -> dict[int, list[int]]:
    """Uses by the node at which they were predicted."""
    uses: dict[int, list[int]] = {}
    for use, node in enumerate(tree.use_node):
        uses.setdefault(tree.parent[node], []).append(use)
    return uses


def _until(tree: PrefixTree, node: int, placed: Container[int]) -> list[int]:
    """The path down to `node`, without the nodes that are already placed."""
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
    """One head per distribution at this position, and the uses that it predicts."""
    drawn_of: dict[_Distribution, list[int]] = {}
    for use in sorted(uses, key=lambda use: tree.branches[tree.use_branch[use]].call.temperature):
        drawn_of.setdefault(_distribution(tree, use), []).append(use)
    for distribution, equal in drawn_of.items():
        head = len(segment.head_at)
        segment.head_at.append(at)
        segment.head_temperature.append(distribution[0])
        first = equal[0]
        segment.head_drawn.append(
            (tree.use_branch[first], tree.use_position[first]) if distribution[1:] != _WHOLE else None
        )
        for use in equal:
            segment.use_head.append(head)
            segment.use_token.append(tree.token[tree.use_node[use]])
            segment.use_branch.append(tree.use_branch[use])
            segment.use_position.append(tree.use_position[use])


_Distribution = tuple[float, bytes | None, tuple[int, LogitChanges] | None]
"""Temperature; the row that was drawn from; changes of logits, with where the answer began that penalties count from."""
_WHOLE = (None, None)


def _distribution(tree: PrefixTree, use: int) -> _Distribution:
    """Uses at one position with equal ones were drawn from the same distribution."""
    call = tree.branches[tree.use_branch[use]].call
    row = None if call.mask is None else call.mask.rows[call.mask.row_of[tree.use_position[use]]]
    changes = None if call.changes is None else (len(call.prompt_ids), call.changes)
    return call.temperature, row, changes


def _subtree_ends(parent: list[int]) -> list[int]:
    ends = list(range(1, len(parent) + 1))
    for position in range(len(parent) - 1, -1, -1):
        above = parent[position]
        if above != ROOT:
            ends[above] = max(ends[above], ends[position])
    return ends
