"""One minibatch: its calls, the pieces that they are computed in, and values that go from one to the other.

Suffix of tensors: U uses of a piece, N sampled tokens of all calls, one call behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from swarm.engine.algorithms.base import TokenFacts
from swarm.engine.algorithms.rewards import Credit
from swarm.engine.local.reading import Piece
from swarm.engine.training.selection import CallNotes
from swarm.engine.tree import Branch


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """Pieces hold each sampled token of the calls exactly once."""

    branches: Sequence[Branch]
    pieces: list[Piece]

    def notes(self, kl: float) -> dict[str, CallNotes]:
        """What `selection.credit` needs of the calls. kl: weight of the penalty inside the reward; 0: there is none."""
        penalties = self._by_call(lambda facts: kl * (known(facts.old_U) - known(facts.start_U))) if kl else None
        valued = self.pieces[0].facts.value_U is not None
        values = self._by_call(lambda facts: known(facts.value_U)) if valued else None
        return {
            branch.call.call_id: CallNotes(
                penalties=penalties[index].tolist() if penalties else (),
                values=values[index].tolist() if values else (),
            )
            for index, branch in enumerate(self.branches)
        }

    def before(self) -> dict[str, Tensor]:
        """Log-probabilities before the step, by call."""
        return self._named(self._by_call(lambda facts: known(facts.old_U)))

    def at_start(self) -> dict[str, Tensor]:
        """Log-probabilities under the first weights, by call."""
        return self._named(self._by_call(lambda facts: known(facts.start_U)))

    def take_credit(self, credits: Mapping[str, Credit]) -> None:
        """Advantages and targets, token by token."""
        own = [credits[branch.call.call_id] for branch in self.branches]
        advantage_N = torch.tensor([value for credit in own for value in credit.advantages], device=self._device)
        target_N = torch.tensor([value for credit in own for value in credit.targets], device=self._device)
        for piece in self.pieces:
            place_U = known(piece.facts.place_U)
            target_U = target_N[place_U] if len(target_N) else None
            piece.facts = replace(piece.facts, advantage_U=advantage_N[place_U], target_U=target_U)

    def take_call_gaps(self, logps: Sequence[Tensor]) -> None:
        """Log-ratios of whole calls, current to old. logps: of each piece, under the current weights."""
        gaps = [logp_U - known(piece.facts.old_U) for piece, logp_U in zip(self.pieces, logps, strict=True)]
        self._spread([gap_S.mean() for gap_S in self._calls(gaps)], "call_gap_U")

    def take_rollout_gaps(self) -> None:
        """Log-ratios of whole calls, old to recorded."""
        gaps = [known(piece.facts.old_U) - piece.facts.recorded_U for piece in self.pieces]
        self._spread([gap_S.sum() for gap_S in self._calls(gaps)], "rollout_gap_U")

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {branch.call.call_id: value_S for branch, value_S in zip(self.branches, values, strict=True)}

    def _spread(self, per_call: Sequence[Tensor], name: str) -> None:
        """One number per call becomes a fact of each of its tokens."""
        lengths = torch.tensor(self._lengths, device=self._device)
        value_N = torch.stack(list(per_call)).repeat_interleave(lengths)
        for piece in self.pieces:
            piece.facts = replace(piece.facts, **{name: value_N[known(piece.facts.place_U)]})

    def _by_call(self, pick: Callable[[TokenFacts], Tensor]) -> list[Tensor]:
        return self._calls([pick(piece.facts) for piece in self.pieces])

    def _calls(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What the pieces say of their uses, sorted into calls."""
        value_N = torch.empty(sum(self._lengths), device=self._device)
        for piece, value_U in zip(self.pieces, values, strict=True):
            value_N[known(piece.facts.place_U)] = value_U
        return [value_N[first:last] for first, last in pairwise(accumulate(self._lengths, initial=0))]

    @property
    def _device(self) -> torch.device:
        """Where the pieces' facts lie."""
        return self.pieces[0].facts.recorded_U.device

    @property
    def _lengths(self) -> list[int]:
        return [len(branch.call.sampled_ids) for branch in self.branches]


def known(fact: Tensor | None) -> Tensor:
    if fact is None:
        raise ValueError("a minibatch was asked for what was not read of its tokens")
    return fact
