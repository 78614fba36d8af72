"""GRPO as plainly as it can be written: one forward pass per call, the whole vocabulary, autograd for everything.

What the trainer's prefix tree, tiles and hand-made gradients are compared with. Knows none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.engine.seam import TrainBatch, TrainCall
from swarm.protocol.sampling_mask import LogitChanges, allows


@dataclass
class PlainStep:
    loss: float
    gradient: dict[str, Tensor]
    logps: dict[str, Tensor]
    entropies: dict[str, Tensor]


@dataclass
class PlainGrpo:
    """A model of its own. `old`: log-probabilities by call; missing ones are the current."""

    path: Path
    old: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        load = AutoModelForCausalLM.from_pretrained
        self.model = load(self.path, dtype=torch.float32, attn_implementation="eager").eval()
        self.start = load(self.path, dtype=torch.float32, attn_implementation="eager").eval()

    def step(self, batch: TrainBatch) -> PlainStep:
        self.model.zero_grad()
        algorithm = batch.spec.algorithm
        terms: list[tuple[int, int, Tensor]] = []
        logps, entropies = {}, {}
        number = 0
        for group in batch.groups:
            rewards = torch.tensor([episode.reward for episode in group.episodes], dtype=torch.float64)
            spread = rewards.std(unbiased=False)
            if spread == 0 and not algorithm.kl and not algorithm.entropy:
                continue
            for episode, reward in zip(group.episodes, rewards, strict=True):
                advantage = float(reward - rewards.mean())
                if algorithm.advantage_norm == "std" and spread > 0:
                    advantage /= float(spread) + 1e-6
                for call in episode.calls:
                    loss_S, logp_S, entropy_S = self._call(call, advantage, batch)
                    terms.append((number, len(terms), loss_S))
                    logps[call.call_id], entropies[call.call_id] = logp_S.detach(), entropy_S.detach()
                number += 1
        loss = aggregated(terms, algorithm.loss_agg)
        loss.backward()
        gradient = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
        return PlainStep(float(loss.detach()), gradient, logps, entropies)

    def _call(self, call: TrainCall, advantage: float, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
        spec = batch.spec.algorithm
        logp_S, entropy_S = distribution(self.model, call)
        with torch.no_grad():
            start_S, _ = distribution(self.start, call)
        old_S = self.old.get(call.call_id, logp_S.detach())
        ratio_S = (logp_S - old_S).exp()
        gain_S = torch.min(ratio_S * advantage, ratio_S.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
        if spec.importance_correction == "truncated":
            gain_S = gain_S * (old_S - torch.tensor(call.logprobs)).exp().clamp(max=2.0)
        gap_S = start_S - logp_S
        return -gain_S + spec.kl * (gap_S.exp() - 1 - gap_S) - spec.entropy * entropy_S, logp_S, entropy_S


def distribution(model: torch.nn.Module, call: TrainCall) -> tuple[Tensor, Tensor]:
    """Log-probability of each sampled token, and the entropy there, after temperature."""
    ids = torch.tensor([call.prompt_ids + call.sampled_ids])
    logits_SV = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1]
    logits_SV = torch.stack([restricted(logits_V, call, at) for at, logits_V in enumerate(logits_SV)])
    logp_SV = (logits_SV / call.temperature).log_softmax(-1)
    entropy_S = -(logp_SV.exp() * logp_SV.masked_fill(logp_SV.isinf(), 0.0)).sum(-1)
    return logp_SV.gather(-1, torch.tensor(call.sampled_ids)[:, None])[:, 0], entropy_S


def restricted(logits_V: Tensor, call: TrainCall, at: int) -> Tensor:
    """What the request left of the logits when the token at this position was drawn."""
    changes, said, size = call.changes or LogitChanges(), call.sampled_ids[:at], len(logits_V)
    bias_V = torch.tensor([dict(changes.bias).get(token, 0.0) for token in range(size)])
    count_V = torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=size)
    seen_V = count_V + torch.bincount(torch.tensor(call.prompt_ids), minlength=size) > 0
    z_V = logits_V + bias_V
    z_V = torch.where(seen_V, torch.where(z_V > 0, z_V / changes.repetition, z_V * changes.repetition), z_V)
    z_V = z_V - changes.frequency * count_V - changes.presence * (count_V > 0)
    if call.mask is None:
        return z_V
    row = call.mask.rows[call.mask.row_of[at]]
    return z_V.masked_fill(torch.tensor([not allows(row, token) for token in range(size)]), -torch.inf)


def aggregated(terms: list[tuple[int, int, Tensor]], how: str) -> Tensor:
    """(episode, call, losses of its tokens) → the loss."""
    if how == "token":
        return torch.cat([loss_S for _, _, loss_S in terms]).mean()
    units: dict[int, list[Tensor]] = {}
    for episode, call, loss_S in terms:
        units.setdefault(episode if how == "episode" else call, []).append(loss_S)
    return torch.stack([torch.cat(parts).mean() for parts in units.values()]).mean()
