"""Encodes the recorded calls of one episode: a JSON head, then token ids as int32, log-probabilities as float64, and masks.

Layout, little-endian: length of the head as uint32, the head, all token ids, all log-probabilities, the rows of all masks. Nothing is
rounded. Ids are below 2**31. A head that begins with white space comes from an older server and has integers of more than 64 bits.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from swarm.protocol.episodes import RecordedCall, RecordedSampling, VersionSpan, WeightsVersion
from swarm.protocol.errors import SwarmError
from swarm.protocol.sampling_mask import SamplingMask

_LENGTH = struct.Struct("<I")
_WIDE = b" "


class Unwritable(SwarmError):
    """The calls cannot be stored in this format."""


def encode(calls: Sequence[RecordedCall]) -> bytes:
    """Encode the calls, in order. Raises: Unwritable."""
    ids, logprobs, masks = array("i"), array("d"), bytearray()
    try:
        for call in calls:
            ids.extend(call.prompt_ids)
            ids.extend(call.sampled_ids)
            logprobs.extend(call.logprobs)
            masks += b"" if call.mask is None else call.mask.packed
        head = orjson.dumps([_head(call) for call in calls])
    except (TypeError, OverflowError, RecursionError) as error:
        raise Unwritable(str(error)) from error
    return b"".join((_LENGTH.pack(len(head)), head, _little(ids), _little(logprobs), masks))


def decode(body: bytes) -> list[RecordedCall]:
    """Decode what `encode` returned; the calls equal the original ones."""
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    head = body[_LENGTH.size : at]
    heads = json.loads(head) if head.startswith(_WIDE) else orjson.loads(head)
    id_count = sum(each["n"][0] + each["n"][1] for each in heads)
    ids, logprobs = array("i"), array("d")
    ids_end = at + id_count * ids.itemsize
    mask_at = ids_end + sum(each["n"][2] for each in heads) * logprobs.itemsize
    ids.frombytes(body[at:ids_end])
    logprobs.frombytes(body[ids_end:mask_at])
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    calls: list[RecordedCall] = []
    id_at = logprob_at = 0
    for each in heads:
        prompt_n, sampled_n, logprob_n = each.pop("n")
        sampled_at = id_at + prompt_n
        mask: SamplingMask | None = None
        if "mask" in each:
            row_of, lengths, size = each.pop("mask")
            mask = SamplingMask(row_of=row_of, lengths=lengths, packed=body[mask_at : mask_at + size])
            mask_at += size
        calls.append(
            _call(
                each,
                mask,
                prompt_ids=ids[id_at:sampled_at].tolist(),
                sampled_ids=ids[sampled_at : sampled_at + sampled_n].tolist(),
                logprobs=logprobs[logprob_at : logprob_at + logprob_n].tolist(),
            )
        )
        id_at = sampled_at + sampled_n
        logprob_at += logprob_n
    return calls


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _head(call: RecordedCall) -> dict[str, Any]:
    sampling = call.sampling
    return {
        "call_id": call.call_id,
        "episode_id": call.episode_id,
        "index": call.index,
        "agent": call.agent,
        "dialect": call.dialect,
        "sampling": [
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_tokens,
            sampling.seed,
            sampling.reproducible,
        ],
        "versions": [
            [span.start, span.end, span.version.run_id, span.version.branch, span.version.step]
            for span in call.versions
        ],
        "finish_reason": call.finish_reason,
        "complete": call.complete,
        **({"failure": call.failure.model_dump()} if call.failure is not None else {}),
        **({"mask": [call.mask.row_of, call.mask.lengths, len(call.mask.packed)]} if call.mask is not None else {}),
        "parent_call_id": call.parent_call_id,
        "fork_cause": call.fork_cause,
        "started_at": call.started_at,
        "latency_s": call.latency_s,
        "request": call.request,
        "answer": call.answer,
        "n": [len(call.prompt_ids), len(call.sampled_ids), len(call.logprobs)],
    }


def _call(head: dict[str, Any], mask: SamplingMask | None, **tokens: list[Any]) -> RecordedCall:
    temperature, top_p, top_k, max_tokens, seed, reproducible = head.pop("sampling")
    sampling = RecordedSampling(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed, reproducible=reproducible
    )
    versions = [
        VersionSpan(start=start, end=end, version=WeightsVersion(run_id=run_id, branch=branch, step=step))
        for start, end, run_id, branch, step in head.pop("versions")
    ]
    return RecordedCall(**head, **tokens, mask=mask, sampling=sampling, versions=versions)
