"""Rows as verl takes them: jagged tensors, one entry per row, with the loss's own columns beside verl's.

Every column is as long as the row. verl keeps the log-probability of a token where it was predicted, one place before it, so
the loss's columns are moved there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as verl_tensors

from swarm.engine.verl.timelines import Row

COLUMNS = ("advantage", "weight", "recorded")


def jagged(columns: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(columns), layout=torch.jagged)


def tensors_of(rows: Sequence[Row], *, pad_token: int) -> TensorDict:
    """A batch for verl's workers. Later columns (old, start) are added with `with_column`."""
    columns = {
        "input_ids": jagged([torch.tensor(row.ids) for row in rows]),
        "position_ids": jagged([torch.arange(len(row.ids)) for row in rows]),
        "loss_mask": jagged([_before(row.mask) for row in rows]),
        "temperature": torch.tensor([row.temperature for row in rows]),
    }
    for name in COLUMNS:
        columns[name] = jagged([_before(getattr(row, name)) for row in rows])
    batch: TensorDict = verl_tensors.get_tensordict(
        columns, non_tensor_dict={"calculate_entropy": True, "pad_token_id": pad_token, "global_batch_size": len(rows)}
    )
    return batch


def with_column(batch: TensorDict, name: str, answer: TensorDict) -> TensorDict:
    """The batch with what the ranks said of its tokens (their log-probabilities) as a further column."""
    made = batch.copy()
    made[name] = jagged([row.detach().float() for row in answer["log_probs"].unbind()])
    return made


def trained(batch: TensorDict, answer: TensorDict, name: str) -> Tensor:
    """A column of an answer at the trained tokens, in the order of the rows."""
    mask = torch.cat([row > 0 for row in batch["loss_mask"].unbind()])
    return torch.cat([row.detach().float() for row in answer[name].unbind()])[mask]


def measured(answer: TensorDict) -> dict[str, Any]:
    """What the ranks measured over all of them: the same from each, but joined row by row where they also tell of themselves."""
    told = verl_tensors.get(answer, "metrics")
    first: dict[str, Any] = told[0] if isinstance(told, list) else told
    return first


def _before(column: Sequence[float]) -> Tensor:
    return torch.tensor([*column[1:], 0.0])
