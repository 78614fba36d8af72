"""One minibatch: its calls, the pieces that they are computed in, and forward passes over a piece.

Tensor suffixes: U uses of a piece, N sampled tokens of all calls, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from swarm.engine.algorithms.base import Algorithm
from swarm.engine.algorithms.facts import TokenFacts
from swarm.engine.algorithms.functions import Update
from swarm.engine.algorithms.own import told_of
from swarm.engine.algorithms.rewards import Credit, Episodes
from swarm.engine.local.attention import MicroBatch
from swarm.engine.local.forward import Policy
from swarm.engine.local.head import Heads, survey
from swarm.engine.training.selection import CallNotes
from swarm.engine.tree import Branch, Segment, cut, grow, timelines


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """The calls of a minibatch and its pieces. Together the pieces contain each sampled token of the calls exactly once."""

    branches: Sequence[Branch]
    pieces: list[Piece]

    def notes(self, kl: float, *, tokens: bool = False) -> dict[str, CallNotes]:
        """Return the input of `selection.credit`, by call.

        kl: weight of the penalty inside the reward; 0: no penalty.
        tokens: whether to include each token's log-probability and entropy before the step.
        """
        penalties = self._by_call(lambda facts: kl * (known(facts.old_U) - known(facts.start_U))) if kl else None
        valued = self.pieces[0].facts.value_U is not None
        values = self._by_call(lambda facts: known(facts.value_U)) if valued else None
        logps = self._by_call(lambda facts: known(facts.old_U)) if tokens else None
        entropies = self._by_call(lambda facts: known(facts.entropy_U)) if tokens else None
        return {
            branch.call.call_id: CallNotes(
                penalties=penalties[index].tolist() if penalties else (),
                values=values[index].tolist() if values else (),
                logps=logps[index].tolist() if logps else (),
                entropies=entropies[index].tolist() if entropies else (),
            )
            for index, branch in enumerate(self.branches)
        }

    def before(self) -> dict[str, Tensor]:
        """Return the log-probabilities before the step, by call."""
        return self._named(self._by_call(lambda facts: known(facts.old_U)))

    def at_start(self) -> dict[str, Tensor]:
        """Return the log-probabilities under the initial weights, by call."""
        return self._named(self._by_call(lambda facts: known(facts.start_U)))

    def take_credit(self, credits: Mapping[str, Credit]) -> None:
        """Set the advantage and the critic's target of each token."""
        own = [credits[branch.call.call_id] for branch in self.branches]
        advantage_N = torch.tensor([value for credit in own for value in credit.advantages], device=self._device)
        target_N = torch.tensor([value for credit in own for value in credit.targets], device=self._device)
        for piece in self.pieces:
            place_U = known(piece.facts.place_U)
            target_U = target_N[place_U] if len(target_N) else None
            piece.facts = replace(piece.facts, advantage_U=advantage_N[place_U], target_U=target_U)

    def take_call_gaps(self, logps: Sequence[Tensor]) -> None:
        """Set each call's log-ratio of current to old probability, the mean over its tokens. `logps` has each piece's log-probabilities
        under the current weights."""
        gaps = [logp_U - known(piece.facts.old_U) for piece, logp_U in zip(self.pieces, logps, strict=True)]
        self._spread([gap_S.mean() for gap_S in self._calls(gaps)], "call_gap_U")

    def take_rollout_gaps(self) -> None:
        """Set each call's log-ratio of old to recorded probability, the sum over its tokens."""
        gaps = [known(piece.facts.old_U) - piece.facts.recorded_U for piece in self.pieces]
        self._spread([gap_S.sum() for gap_S in self._calls(gaps)], "rollout_gap_U")

    def take_prices(self, algorithm: Algorithm, episodes: Episodes, logps: Sequence[Tensor]) -> None:
        """Set the facts that the algorithm computes over the whole update. `logps` has each piece's log-probabilities under the current
        weights.

        Runs on the CPU, because sums by index have no fixed order on a GPU and a replay must give the same weights.
        Raises: TrainingRefused.
        """
        facts = [piece.facts for piece in self.pieces]
        update = Update(
            logp_N=torch.cat(self._calls(logps)).cpu(),
            facts=TokenFacts(**{field.name: self._whole(facts, field.name) for field in fields(TokenFacts)}),
            calls=[(branch.call.call_id, len(branch.call.sampled_ids)) for branch in self.branches],
            episodes=episodes,
        )
        said = told_of(algorithm.over_update(update))
        for piece in self.pieces:
            place_U = known(piece.facts.place_U)
            own = {name: value_N.to(place_U.device)[place_U] for name, value_N in said.items()}
            piece.facts = replace(piece.facts, **own)

    def _whole(self, facts: Sequence[TokenFacts], name: str) -> Any:
        """Return a fact of all tokens, calls concatenated; None if no piece has it. Pieces without it count as 0."""
        values = [getattr(each, name) for each in facts]
        if name == "place_U" or all(value is None for value in values):
            return None
        there = [
            torch.zeros_like(each.recorded_U) if value is None else value
            for each, value in zip(facts, values, strict=True)
        ]
        return torch.cat(self._calls(there)).cpu()

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {branch.call.call_id: value_S for branch, value_S in zip(self.branches, values, strict=True)}

    def _spread(self, per_call: Sequence[Tensor], name: str) -> None:
        """Set the fact `name` of each token to its call's number."""
        lengths = torch.tensor(self._lengths, device=self._device)
        value_N = torch.stack(list(per_call)).repeat_interleave(lengths)
        for piece in self.pieces:
            piece.facts = replace(piece.facts, **{name: value_N[known(piece.facts.place_U)]})

    def _by_call(self, pick: Callable[[TokenFacts], Tensor]) -> list[Tensor]:
        return self._calls([pick(piece.facts) for piece in self.pieces])

    def _calls(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Regroup values of the pieces' uses by call."""
        value_N = torch.empty(sum(self._lengths), device=self._device)
        for piece, value_U in zip(self.pieces, values, strict=True):
            value_N[known(piece.facts.place_U)] = value_U
        return [value_N[first:last] for first, last in pairwise(accumulate(self._lengths, initial=0))]

    @property
    def _device(self) -> torch.device:
        """Device of the pieces' facts."""
        return self.pieces[0].facts.recorded_U.device

    @property
    def _lengths(self) -> list[int]:
        return [len(branch.call.sampled_ids) for branch in self.branches]


def known(fact: Tensor | None) -> Tensor:
    if fact is None:
        raise ValueError("this fact of the minibatch's tokens has not been computed")
    return fact


@dataclass(slots=True, kw_only=True)
class Piece:
    """One segment of a tree as tensors, with the facts about its uses that the loss needs.

    All passes over a piece compute the same shapes, so that equal weights give equal numbers, bit for bit.
    """

    micro: MicroBatch
    heads: Heads
    facts: TokenFacts

    @classmethod
    def of(cls, segment: Segment, branches: Sequence[Branch], device: torch.device) -> Piece:
        return cls(
            micro=MicroBatch.of(segment, device),
            heads=Heads.of(segment, branches, device),
            facts=_moved(facts_of(segment, branches), device),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed, including those that other pieces compute as well."""
        return len(self.micro.token_T)


def pieces(branches: Sequence[Branch], policy: Policy) -> list[Piece]:
    """Return the tree over these branches in pieces that fit into memory, or its timelines if the model cannot compute trees.

    Raises: TrainingRefused.
    """
    tree = grow(branches)
    segments = cut(tree, policy.segment_tokens) if policy.on_trees else timelines(tree)
    return [Piece.of(segment, branches, policy.device) for segment in segments]


@torch.no_grad()
def read(policy: Policy, piece: Piece, *, at_start: bool = False) -> tuple[Tensor, Tensor]:
    """Return logp_U and entropy_U of the piece's uses, under the current or the initial weights."""
    with policy.autocast():
        hidden_TD = policy.start_hidden(piece.micro) if at_start else policy.hidden(piece.micro)
    weight_VD = policy.start_output_weight if at_start else policy.cast_output_weight
    return survey(piece.heads, hidden_TD[piece.heads.at_H].to(policy.compute_dtype), weight_VD)


def _moved(facts: TokenFacts, device: torch.device) -> TokenFacts:
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return replace(facts, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})


def facts_of(segment: Segment, branches: Sequence[Branch]) -> TokenFacts:
    """Return the recorded facts of the segment's uses, in order."""
    uses = [(branches[branch], at) for branch, at in zip(segment.use_branch, segment.use_position, strict=True)]
    first = list(accumulate((len(branch.call.sampled_ids) for branch in branches), initial=0))
    places = [first[branch] + at for branch, at in zip(segment.use_branch, segment.use_position, strict=True)]
    off_policy = [float(branch.call.off_policy) for branch, _ in uses]
    return TokenFacts(
        off_policy_U=torch.tensor(off_policy) if any(off_policy) else None,
        advantage_U=torch.tensor([branch.advantage for branch, _ in uses]),
        weight_U=torch.tensor([branch.weight for branch, _ in uses]),
        recorded_U=torch.tensor([branch.call.logprobs[at] for branch, at in uses]),
        place_U=torch.tensor(places),
    )
