"""The prefix tree of a batch: all timelines merged on token ids, with each distinct token-in-context only once.

Tokens in, positions and ancestors out; knows nothing of rewards or tensors. Enforces invariant I1: a token may only be
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
"""Tolerance for log-probabilities that rounding in the sampler puts above zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One call to be trained. Each of its sampled tokens has this advantage, and this weight in the loss."""

    call: TrainCall
    advantage: float
    weight: float


@dataclass(slots=True, kw_only=True)
class PrefixTree:
    """Nodes in depth-first order, so that a subtree is contiguous and a parent comes before its children.

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
        """Return the nodes from the root down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


@dataclass(slots=True, kw_only=True)
class Segment:
    """A part of the tree that is computed together: some nodes with all their ancestors, depth-first.

    `parent` and `end` are positions in the segment. The subtree of position i is [i, end[i]), so i is an ancestor of j (or j itself)
    exactly when i <= j < end[i].

    A head is a position at which the distribution of the next token is needed, at one temperature and under one restriction.
    `head_drawn` is the branch and position of a token sampled under that restriction (None: no restriction). A use has its head, the
    token that was sampled there, and the branch and position that it came from.
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
        """Return the ancestors of a position, from the root down."""
        found = []
        position = self.parent[position]
        while position != ROOT:
            found.append(position)
            position = self.parent[position]
        return found[::-1]


def grow(branches: Sequence[Branch]) -> PrefixTree:
    """Build the prefix tree over `branches`.

    Raises: TrainingRefused if a call lacks provenance, or is in the batch twice.
    """
    for branch in branches:
        check_provenance(branch.call)
    _refuse_repeats(branches)
    tree = PrefixTree(branches=branches)
    paths = [branch.call.prompt_ids + branch.call.sampled_ids for branch in branches]
    nodes_of: list[list[int]] = [[]] * len(paths)
    nodes: list[int] = []
    last: list[int] = []
    for index in sorted(range(len(paths)), key=paths.__getitem__):  # sorted paths are in depth-first order
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
    """Record the call's sampled tokens, after checking that the path above them is what the model saw."""
    last = nodes[-1]
    if [tree.token[node] for node in tree.path(last)] != call.prompt_ids + call.sampled_ids:
        raise TrainingRefused(
            f"call {call.call_id}: its path in the prefix tree differs from its prompt and sampled tokens"
        )
    sampled = nodes[len(call.prompt_ids) :]
    tree.use_node += sampled
    tree.use_branch += [index] * len(sampled)
    tree.use_position += range(len(sampled))


def check_provenance(call: TrainCall) -> None:
    """Check that every sampled token has its log-probability and exactly one weights version. Raises: TrainingRefused."""
    count = len(call.sampled_ids)
    if not call.call_id:
        raise TrainingRefused("a call without an id cannot be trained: the origin of its tokens is unknown")
    if not call.prompt_ids or not count:
        raise TrainingRefused(
            f"call {call.call_id}: it has {len(call.prompt_ids)} prompt tokens and {count} sampled tokens, and needs at least one of each"
        )
    if min(call.prompt_ids) < 0 or min(call.sampled_ids) < 0:
        raise TrainingRefused(f"call {call.call_id}: negative token ids")
    if len(call.logprobs) != count:
        raise TrainingRefused(
            f"call {call.call_id}: {count} sampled tokens, but {len(call.logprobs)} log-probabilities"
        )
    if not all(-math.inf < logprob <= _LOGPROB_SLACK for logprob in call.logprobs):
        raise TrainingRefused(f"call {call.call_id}: some recorded log-probabilities are not finite, or are above 0")
    if not (math.isfinite(call.temperature) and call.temperature > 0):
        raise TrainingRefused(f"call {call.call_id}: temperature {call.temperature} has no distribution to train")
    if call.mask is not None and len(call.mask.row_of) != count:
        raise TrainingRefused(
            f"call {call.call_id}: its mask covers {len(call.mask.row_of)} tokens, but it sampled {count}"
        )
    ends = [0, *(span.end for span in call.versions)]
    starts = [*(span.start for span in call.versions), count]
    if starts != ends or any(start >= end for start, end in pairwise(ends)):
        raise TrainingRefused(f"call {call.call_id}: weights versions do not cover its {count} tokens exactly once")


def _refuse_repeats(branches: Iterable[Branch]) -> None:
    seen: set[str] = set()
    for branch in branches:
        if branch.call.call_id in seen:
            raise TrainingRefused(f"call {branch.call.call_id} is in the batch twice")
        seen.add(branch.call.call_id)


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next(index for index in range(size) if first[index] != second[index])


def merged_tokens(calls: Iterable[TrainCall]) -> int:
    """Return how many nodes the tree over these calls has."""
    paths = sorted(call.prompt_ids + call.sampled_ids for call in calls)
    return sum(map(len, paths)) - sum(shared_length(first, second) for first, second in pairwise(paths))


def timeline_numbers(calls: Sequence[TrainCall]) -> list[int]:
    """Return which timeline each call of an episode belongs to, counted from 0.

    A call continues the longest timeline that its prompt begins with, sampled tokens included; otherwise it starts a new timeline.
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
    """Return segments of at most `segment_tokens` tokens that together hold each head exactly once.

    Nodes under which nothing is trained are left out: a sampled token is predicted at its parent, so leaves are not
    computed. A cut inside a tree repeats the path above it. Cuts are chosen to repeat the fewest tokens in total, and then to
    make the fewest segments. Below a long path, a segment may grow to twice the path, so that at most half of its work is
    repeated. If a path is longer than a segment, the nodes that branch off it are computed with it.
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
    """Return one segment for each path that ends in a head with no other head below, for models that cannot compute trees.

    A head belongs to the first of the timelines that contain it.
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
    """Return the heads with no other head below, in order."""
    above: set[int] = set()
    last = []
    for node in range(len(tree.token) - 1, -1, -1):
        if node in above or node in uses:
            if node not in above:
                last.append(node)
            above.add(tree.parent[node])
    return last[::-1]


def _news(tree: PrefixTree, heads: Sequence[int]) -> list[int]:
    """Return how many nodes each head adds to those computed for earlier heads."""
    placed: set[int] = set()
    counts = []
    for head in heads:
        path = _until(tree, head, placed)
        placed.update(path)
        counts.append(len(path))
    return counts


def _cheapest_cuts(news: Sequence[int], lengths: Sequence[int], most: int) -> list[int]:
    """Choose the heads before which to start a new segment, so that the fewest tokens are computed twice.

    news: tokens that each head adds to those before it.
    lengths: tokens on each head's whole path.
    most: maximum tokens of a segment.

    The best way to a cut extends the best way to an earlier cut, as long as the heads between them fit into a segment. The heap holds
    the ways, cheapest first.
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
    """Return whether heads [first, last) fit into one segment. A single head always does."""
    context = lengths[first] - news[first]
    size = context + ends[last] - ends[first]
    long = lengths[first] if lengths[first] > most else context
    return size <= max(most, 2 * long) or last == first + 1


def _uses_by_parent(tree: PrefixTree) -> dict[int, list[int]]:
    """Return the uses by the node at which they were predicted."""
    uses: dict[int, list[int]] = {}
    for use, node in enumerate(tree.use_node):
        uses.setdefault(tree.parent[node], []).append(use)
    return uses


def _until(tree: PrefixTree, node: int, placed: Container[int]) -> list[int]:
    """Return the path down to `node`, without the nodes that are already placed."""
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
    """Add one head for each distinct distribution at this position, with the uses sampled from it."""
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
"""Temperature, row of the mask, and changes of the logits with the prompt's length, because penalties count from there."""
_WHOLE = (None, None)


def _distribution(tree: PrefixTree, use: int) -> _Distribution:
    """Return a key for the distribution that a use was sampled from. At one position, equal keys mean equal distributions."""
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
