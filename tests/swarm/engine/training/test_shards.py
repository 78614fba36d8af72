"""Parts that two FSDP2 ranks wrote, put together by a third process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swarm.engine.seam import EngineError
from swarm.engine.training.checkpoints import rank_file
from swarm.engine.training.shards import Parts

RANKS = 2


class Tied(nn.Module):
    """Sizes that two ranks share unevenly, or of which one has nothing; an output layer that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(3, 4), requires_grad=False)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(ids)) * self.norm)
        return logits


def stepped(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.tensor([step, 3, 6])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def rank(number: int, folder: str) -> None:
    """One of the ranks; it writes as verl does."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=RANKS)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    optimizer = stepped(model)
    assert not optimizer.state[model.frozen]  # an empty entry from here on, as verl's offloading makes them
    torch.save(model.state_dict(), Path(folder, rank_file("model", RANKS, number)))
    torch.save(optimizer.state_dict(), Path(folder, rank_file("optim", RANKS, number)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(rank, (str(made),), nprocs=RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
    return made


def test_weights_and_moments_are_those_of_one_process(folder: Path) -> None:
    parts = Parts(folder, RANKS)
    weights = {name: parts.weight(name) for name in parts.names}
    moments = {f"{name}/{kind}": value for name in parts.names for kind, value in parts.moments(name).items()}
    alone = Tied()
    optimizer = stepped(alone)
    named = dict(alone.named_parameters())
    assert weights.keys() == named.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, named[name].detach(), atol=1e-6), name
    expected = {
        f"{name}/{kind}": value for name, weight in named.items() for kind, value in optimizer.state[weight].items()
    }
    assert moments.keys() == expected.keys()
    for name, moment in moments.items():
        assert torch.allclose(moment, expected[name], atol=1e-6), name


def test_parts_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    for number in range(RANKS):
        state = torch.load(folder / rank_file("model", RANKS, number), weights_only=True)
        torch.save({"norm": state["norm"]}, tmp_path / rank_file("model", RANKS, number))
        (tmp_path / rank_file("optim", RANKS, number)).symlink_to(folder / rank_file("optim", RANKS, number))
    with pytest.raises(EngineError, match="cover 4 weights, but the model's cover 1"):
        Parts(tmp_path, RANKS)
