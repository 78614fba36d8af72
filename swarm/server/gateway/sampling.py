"""A request's sampling parameters: fills in the run's defaults, and records what the trainer must know about the parameters.

Pure functions over an OpenAI-style request body.
"""

from __future__ import annotations

from typing import Any

from swarm.protocol.episodes import RecordedSampling
from swarm.protocol.runspec import UNCUT, SamplingSpec
from swarm.protocol.sampling_mask import LEAST_TEMPERATURE

_LIMITS = ("max_completion_tokens", "max_tokens")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (None, *values) for name, values in UNCUT.items()},
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
}
"""For each field, the values that leave the distribution unchanged."""
_UNKNOWN = ("logits_processors", "vllm_xargs", "watermarking")
"""Fields that may change the logits in ways that we cannot reproduce."""
_ANY_VALUE_BENDS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    *_UNKNOWN,
)


def with_defaults(body: dict[str, Any], sampling: SamplingSpec, seed: int | None) -> dict[str, Any]:
    """Return the body with unset fields filled in from the run's defaults, and with `seed` as the default seed."""
    filled = dict(body)
    defaults = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "seed": seed}
    for name, value in defaults.items():
        if filled.get(name) is None:
            filled[name] = value
    if all(filled.get(name) is None for name in _LIMITS):
        filled["max_tokens"] = sampling.max_tokens
    if sampling.thinking is not None and "messages" in filled:
        stated = filled.get("chat_template_kwargs") or {}
        filled["chat_template_kwargs"] = {"enable_thinking": sampling.thinking, **stated}
    return filled


def recorded_sampling(body: dict[str, Any]) -> RecordedSampling:
    """Return the sampling record of a body whose defaults are filled in."""
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    return RecordedSampling(
        temperature=float(body["temperature"]),
        top_p=float(body["top_p"]),
        top_k=int(body["top_k"]),
        max_tokens=None if limit is None else int(limit),
        seed=None if body["seed"] is None else int(body["seed"]),
        reproducible=_reproducible(body),
    )


def wants_masks(body: dict[str, Any], sampling: SamplingSpec) -> bool:
    """True if the trainer must know the candidate tokens for each token of the answer."""
    return (
        sampling.train in ("auto", "exact")
        and float(body["temperature"]) >= LEAST_TEMPERATURE
        and not _reproducible(body)
        and not any(body.get(name) for name in _UNKNOWN)
    )


def _reproducible(body: dict[str, Any]) -> bool:
    """True if the tokens are sampled from plain softmax(logits / temperature)."""
    return (
        float(body["temperature"]) >= LEAST_TEMPERATURE
        and all(body.get(name) in neutral for name, neutral in _NEUTRAL.items())
        and not any(body.get(name) for name in _ANY_VALUE_BENDS)
        and not _has_grammar(body)
    )


def forbidding(body: dict[str, Any]) -> list[str]:
    """Return the fields of a call that forbid tokens; together they may forbid every token."""
    found = [name for name in ("allowed_token_ids", "bad_words", "structured_outputs") if body.get(name)]
    if _has_grammar(body):
        found += [name for name in ("response_format", "tool_choice", "tools") if body.get(name)]
    return found


def _has_grammar(body: dict[str, Any]) -> bool:
    """True if a response format, a forced tool or a strict tool imposes a grammar, so that other tokens cannot be sampled."""
    if (body.get("response_format") or {}).get("type", "text") != "text":
        return True
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        return True
    strict = any(
        (tool.get("function") or {}).get("strict") for tool in body.get("tools") or () if isinstance(tool, dict)
    )
    return strict and choice != "none"
