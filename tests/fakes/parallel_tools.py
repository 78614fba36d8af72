"""An echo engine that calls several tools in one answer, as models do that run them in parallel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from foundation.clock import Clock
from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import Sampled, SampledChoice, SampledEvent, SampleRequest
from swarm.protocol.episodes import VersionSpan

Json = dict[str, Any]


class ParallelTools(EchoEngine):
    """together: which tools an answer calls that has to call the one of this name. says: whether it has a text before them."""

    def __init__(
        self,
        together: Mapping[str, Sequence[str]] | None = None,
        *,
        says: bool = False,
        max_model_len: int = 32_768,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(model="echo", max_model_len=max_model_len, clock=clock)
        self.together: Mapping[str, Sequence[str]] = together or {}
        self.says = says

    async def sample(self, request: SampleRequest) -> Sampled:
        return await self._called_together(request) or await super().sample(request)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        sampled = await self._called_together(request)
        if sampled is None:
            async for event in super().stream(request):
                yield event
            return
        usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
        for event in _events(sampled, usage=usage):
            yield event

    async def _called_together(self, request: SampleRequest) -> Sampled | None:
        """None: nothing is to be called together."""
        parts = []
        for part in self._parts(request):
            parts.append(await super().sample(part))
        return _joined(parts) if parts else None

    def _parts(self, request: SampleRequest) -> list[SampleRequest]:
        """A request for each call of the answer, and for its text; empty where nothing is called together."""
        forced = _forced(request.body)
        choices: list[Any] = [
            {"type": "function", "function": {"name": name}} for name in self.together.get(forced, ())
        ]
        if choices and self.says:
            choices.insert(0, "none")
        seed = request.body.get("seed")
        bodies = [
            request.body | {"tool_choice": each, "seed": f"{seed} {number}"} for number, each in enumerate(choices)
        ]
        return [
            SampleRequest(dialect=request.dialect, body=body, prompt_ids=request.prompt_ids, masks=request.masks)
            for body in bodies
        ]


def _forced(body: Json) -> str:
    """The name of the tool that has to be called; of the first where any will do. Empty: none has to."""
    choice = body.get("tool_choice")
    if choice == "required":
        return str(body["tools"][0]["function"]["name"])
    return str(choice["function"]["name"]) if isinstance(choice, dict) else ""


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """One answer of several: only the last keeps its end token. The template, too, writes calls without anything between them."""
    choices = [part.choices[0] for part in parts]
    kept = [slice(None, -1)] * (len(choices) - 1) + [slice(None)]
    ids, logprobs, masks = (
        list(chain.from_iterable(getattr(choice, name)[part] for choice, part in zip(choices, kept, strict=True)))
        for name in ("sampled_ids", "logprobs", "masks")
    )
    versions = [VersionSpan(start=0, end=len(ids), version=choices[0].versions[0].version)]
    said = [part.answer["choices"][0]["message"] for part in parts]
    calls = [call for message in said for call in message.get("tool_calls") or ()]
    message = {
        "role": "assistant",
        "content": "".join(message["content"] or "" for message in said) or None,
        "tool_calls": [call | {"id": f"{call['id']}_{number}"} for number, call in enumerate(calls)],
    }
    prompt_ids = parts[0].prompt_ids
    counts = (len(prompt_ids), len(ids), len(prompt_ids) + len(ids))
    answer = parts[0].answer | {
        "choices": [parts[0].answer["choices"][0] | {"message": message, "finish_reason": "tool_calls"}],
        "usage": dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True)),
    }
    choice = SampledChoice(
        sampled_ids=ids, logprobs=logprobs, masks=masks, finish_reason="tool_calls", versions=versions
    )
    return Sampled(prompt_ids=prompt_ids, choices=[choice], answer=answer)


def _events(sampled: Sampled, *, usage: bool) -> Iterator[SampledEvent]:
    """The answer as a stream: a token with each delta, and with the last those that are left."""
    choice, answer = sampled.choices[0], sampled.answer
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    deltas = list(_deltas(answer["choices"][0]["message"]))
    for at, delta in enumerate(deltas):
        last = at == len(deltas) - 1
        finish = choice.finish_reason if last else None
        new = slice(at, None if last else at + 1)
        ids = choice.sampled_ids[new]
        part = SampledChoice(
            sampled_ids=ids,
            logprobs=choice.logprobs[new],
            masks=choice.masks[new],
            finish_reason=finish,
            versions=[VersionSpan(start=0, end=len(ids), version=choice.versions[0].version)],
        )
        shown = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield SampledEvent(
            data=head | {"choices": [shown]}, prompt_ids=None if at else sampled.prompt_ids, choices=[part]
        )
    if usage:
        yield SampledEvent(data=head | {"choices": [], "usage": answer["usage"]})


def _deltas(message: Json) -> Iterator[Json]:
    yield {"role": "assistant", "content": message["content"] or ""}
    for number, call in enumerate(message["tool_calls"]):
        function, arguments = call["function"], call["function"]["arguments"]
        yield {"tool_calls": [call | {"index": number, "function": function | {"arguments": ""}}]}
        for part in (arguments[:3], arguments[3:]):
            yield {"tool_calls": [{"index": number, "function": {"arguments": part}}]}
    yield {}
