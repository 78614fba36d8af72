"""Rows of a sampling mask, from tensors.

Tensor suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from swarm.protocol.sampling_mask import BITS, BUT, ONLY, is_short


def encode(allowed_RV: Tensor) -> list[bytes]:
    """Encode the rows in the format of `swarm.protocol.sampling_mask`."""
    vocabulary = allowed_RV.shape[1]
    found = []
    for allowed_V in allowed_RV.cpu().numpy():
        kept = int(np.count_nonzero(allowed_V))
        if is_short(kept, vocabulary):
            found.append(ONLY + _written(np.flatnonzero(allowed_V)))
        elif is_short(vocabulary - kept, vocabulary):
            found.append(BUT + _written(np.array([vocabulary, *np.flatnonzero(~allowed_V)])))
        else:
            found.append(BITS + np.packbits(allowed_V, bitorder="little").tobytes())
    return found


def _written(tokens: np.ndarray[Any, Any]) -> bytes:
    return tokens.astype("<i4").tobytes()
