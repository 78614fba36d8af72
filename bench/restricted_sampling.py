"""Does the trainer compute the distribution that vLLM sampled from if a request restricts the vocabulary or changes the logits?

`python -m bench.restricted_sampling [--tokens N]` samples at least N tokens of each kind (plain first) with SmolLM2-135M on this machine, and
recomputes the log-probability of each in the trainer's own way. A JSON line per kind: p99 is the 99th percentile of
|recorded - recomputed|, ratio its quotient by that of plain sampling in the same run; alternatives is the mean number of tokens that were left,
forced the share of tokens with none; mask_bytes is what a sampled token adds to the journal. The last line has the worst ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.command import run
from bench.machine import path_of_model
from foundation.arguments import count
from foundation.clock import SystemClock
from swarm.engine.local.forward import Policy
from swarm.engine.local.inference import VllmInference
from swarm.engine.local.minibatch import pieces, read
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import SampleRequest, TrainCall
from swarm.engine.tree import Branch
from swarm.protocol.sampling_mask import LogitChanges, SamplingMask, size

_SCHEMA = {
    "type": "object",
    "properties": {
        "reason": {"type": "string"},
        "number": {"type": "integer"},
        "kind": {"enum": ["good", "bad", "neither"]},
    },
    "required": ["reason", "number", "kind"],
    "additionalProperties": False,
}
_FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}
}
_TOOL = {"type": "function", "function": {"name": "submit", "parameters": _SCHEMA, "strict": True}}
_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "penalties": _PENALTIES,
    "logit_bias": {"logit_bias": {"28": 2.0, "30": -3.0, "198": -100}},
    "json_schema": _FORMAT,
    "forced_tool": {"tools": [_TOOL], "tool_choice": "required"},
    "regex": {"structured_outputs": {"regex": "[A-Z][a-z ,]{20,120}\\."}},
    "min_tokens_and_bad_words": {"min_tokens": 20, "bad_words": ["the", "and"]},
    "all_at_once": _FORMAT | _PENALTIES | {"top_p": 0.95},
}
_TOGETHER = 16
_THINGS = (
    "a river",
    "rain",
    "the number nine",
    "a broken clock",
    "bread",
    "a ladder",
    "sleep",
    "chess",
    "wool",
    "a map",
)
_VERBS = ("Describe", "Praise", "Explain", "Warn of", "Draw up rules for")


def questions() -> Iterator[str]:
    number = 0
    while True:
        verb, thing = _VERBS[number % len(_VERBS)], _THINGS[number // len(_VERBS) % len(_THINGS)]
        yield f"{verb} {thing} in a few words. Case {number}."
        number += 1


async def sampled(
    inference: VllmInference, fields: dict[str, Any], tokens: int, *, max_tokens: int = 96
) -> list[TrainCall]:
    """Sample calls of at most `max_tokens` each, until they have at least `tokens` together."""
    calls: list[TrainCall] = []
    asked = questions()
    while sum(len(call.sampled_ids) for call in calls) < tokens:
        bodies = [
            {
                "messages": [{"role": "user", "content": next(asked)}],
                "temperature": 1.0,
                "max_tokens": max_tokens,
                "seed": len(calls) + number,
                **fields,
            }
            for number in range(_TOGETHER)
        ]
        calls += await asyncio.gather(*(_call(inference, body, bool(fields)) for body in bodies))
    return calls


async def _call(inference: VllmInference, body: dict[str, Any], masks: bool) -> TrainCall:
    answer = await inference.sample(SampleRequest(dialect="chat.completions", body=body, masks=masks))
    (choice,) = answer.choices
    if masks and len(choice.masks) != len(choice.sampled_ids):
        raise SystemExit(f"{len(choice.sampled_ids)} tokens, but {len(choice.masks)} masks")
    return TrainCall(
        call_id=str(body["seed"]),
        agent=None,
        prompt_ids=answer.prompt_ids,
        sampled_ids=choice.sampled_ids,
        logprobs=choice.logprobs,
        temperature=body["temperature"],
        versions=choice.versions,
        reproducible=not masks,
        mask=SamplingMask.of(choice.masks) if masks else None,
        changes=LogitChanges.of(body) if masks else None,
    )


def gaps(policy: Policy, calls: Sequence[TrainCall]) -> torch.Tensor:
    """|recorded - recomputed| log-probability of every token."""
    branches = [Branch(call=call, advantage=1.0, weight=1.0) for call in calls]
    return torch.cat([(read(policy, piece)[0] - piece.facts.recorded_U).abs() for piece in pieces(branches, policy)])


def line(kind: str, calls: Sequence[TrainCall], gap_U: torch.Tensor, plain_p99: float | None) -> dict[str, Any]:
    p99 = float(gap_U.double().quantile(0.99))
    masks = [call.mask for call in calls if call.mask is not None]
    left = [size(mask.rows[row]) for mask in masks for row in mask.row_of]
    return {
        "kind": kind,
        "tokens": len(gap_U),
        "mean": float(gap_U.mean()),
        "p99": p99,
        "max": float(gap_U.max()),
        "ratio": 1.0 if plain_p99 is None else p99 / plain_p99,
        "alternatives": sum(left) / len(left) if left else None,
        "forced": sum(each == 1 for each in left) / len(left) if left else None,
        "mask_bytes": sum(len(mask.packed) for mask in masks) / len(left) if left else None,
    }


async def measured(kinds: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    path, lines = path_of_model("smollm2-135m"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch:
        log_path = Path(scratch) / "inference.log"
        settings = VllmSettings(model_dir=path, model_name="smollm2", log_path=log_path, max_model_len=1024)
        inference = VllmInference(settings, clock=SystemClock())
        await inference.boot()
        policy = Policy.load(path, trained=True)
        policy.use_dtype(settings.compute_dtype)
        try:
            for kind in kinds:
                calls = await sampled(inference, KINDS[kind], tokens)
                gap_U = await asyncio.to_thread(gaps, policy, calls)
                lines.append(line(kind, calls, gap_U, lines[0]["p99"] if lines else None))
                _say(lines[-1])
        finally:
            await inference.shutdown()
    return lines


def _say(fields: dict[str, Any]) -> None:
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.restricted_sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=10_000, help="of each kind, at least (default %(default)s)")
    others = [kind for kind in KINDS if kind != "plain"]
    parser.add_argument("--only", nargs="+", choices=others, default=others, help="these kinds, beside plain")
    args = parser.parse_args()
    lines = asyncio.run(measured(["plain", *args.only], args.tokens))
    _say({"bench": "restricted_sampling", "kinds": len(lines) - 1, "ratio": max(one["ratio"] for one in lines[1:])})
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
