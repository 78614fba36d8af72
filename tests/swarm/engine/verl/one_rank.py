"""One rank of verl in this very process, behind the interface of a cluster: the trainer without Ray, replicas or a second rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from swarm.engine.verl.config import verl_config
from swarm.engine.verl.settings import VerlSettings
from swarm.engine.verl.worker import RankWorker


class OneRank:
    """See `swarm.engine.verl.cluster.Cluster`."""

    def __init__(self, model_dir: Path, **fields: Any) -> None:
        self.settings = VerlSettings(
            model_dir=model_dir, model_name="tiny", max_model_len=512, tokens_per_rank=512, dtype="float32", **fields
        )
        config = verl_config(self.settings).actor_rollout_ref
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        self.rank = RankWorker(config=config, role="actor")
        self.rank.init_model()

    def __enter__(self) -> OneRank:
        return self

    def __exit__(self, *_: object) -> None:
        torch.distributed.destroy_process_group()

    def all_ranks(self, method: str, *values: Any) -> list[Any]:
        return [getattr(self.rank, method)(*values)]

    def over_rows(self, method: str, rows: TensorDict) -> TensorDict:
        answer: TensorDict = getattr(self.rank, method)(rows)
        return answer
