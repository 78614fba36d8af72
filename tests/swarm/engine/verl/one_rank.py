"""One rank of verl in this very process, behind the interface of a cluster: the trainer without Ray, replicas or a second rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from swarm.engine.verl.config import verl_config
from swarm.engine.verl.settings import VerlSettings
from swarm.engine.verl.worker import RankWorker


class OneRank:
    """See `swarm.engine.verl.cluster.Cluster`. The first weights are read by a second worker that is never trained."""

    def __init__(self, model_dir: Path, **fields: Any) -> None:
        self.settings = VerlSettings(
            model_dir=model_dir, model_name="tiny", max_model_len=512, tokens_per_rank=512, dtype="float32", **fields
        )
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        config = verl_config(self.settings).actor_rollout_ref
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        self.rank, self.start = RankWorker(config=config, role="actor"), RankWorker(config=config, role="actor")
        self.rank.init_model()
        self.start.init_model()

    def all_ranks(self, method: str, *values: Any) -> list[Any]:
        return [getattr(self.rank, method)(*values)]

    def over_rows(self, method: str, rows: TensorDict) -> TensorDict:
        if method == "compute_ref_log_prob":
            return self.start.compute_log_prob(rows)
        answer: TensorDict = getattr(self.rank, method)(rows)
        return answer
