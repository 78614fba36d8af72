"""What is recorded of the tokens that are trained, as tensors; the terms made of it stand with the algorithms.

Suffix of tensors: U uses (sampled tokens of trained calls).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from swarm.engine.algorithms.base import TokenFacts as TokenFacts
from swarm.engine.algorithms.base import kl_to_start as kl_to_start
from swarm.engine.tree import Branch, Segment


def facts_of(segment: Segment, branches: Sequence[Branch]) -> TokenFacts:
    """What is recorded of the segment's uses, in order."""
    uses = [(branches[branch], at) for branch, at in zip(segment.use_branch, segment.use_position, strict=True)]
    first = list(accumulate((len(branch.call.sampled_ids) for branch in branches), initial=0))
    places = [first[branch] + at for branch, at in zip(segment.use_branch, segment.use_position, strict=True)]
    return TokenFacts(
        advantage_U=torch.tensor([branch.advantage for branch, _ in uses]),
        weight_U=torch.tensor([branch.weight for branch, _ in uses]),
        recorded_U=torch.tensor([branch.call.logprobs[at] for branch, at in uses]),
        place_U=torch.tensor(places),
    )
