"""The rehearsal process: runs an instrument's code against an endpoint that gives fixed answers in every API dialect."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from foundation.clock import SystemClock
from researcher.repair.rehearsal import ECHO, TASKS, Played, Rehearsal, RehearsalRequest
from researcher.sandbox.entry import confine_by
from researcher.sandbox.launch import SandboxSpec
from swarm.client.episode import Episode
from swarm.client.rollouts import end_with
from swarm.client.tasks import Task, each
from swarm.client.wire import Patience
from swarm.client.workflow import Workflow, load_module, workflow_of
from swarm.protocol.episodes import (
    Cause,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeState,
    LedgerEntry,
    WeightsVersion,
)
from swarm.protocol.teams import EpisodePreparation, TeamReceipt

MOST_CALLS = 64
"""Maximum calls per episode. Further calls are refused, so that no agent runs forever."""


class FixedEndpoint:
    """An HTTP endpoint with fixed answers. Binds its port on construction, so that the port is known early. Call `serve` to answer."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.answer = ""
        self.asked: list[str] = []
        """Hashes of the requests since `begin`."""

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def serve(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begin(self, answer: str) -> None:
        self.answer, self.asked = answer, []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        """Return the reply's status, content type and content."""
        if len(self.asked) >= MOST_CALLS:
            return 400, _JSON, json.dumps({"error": {"message": "too many calls in one episode"}}).encode()
        self.asked.append(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16])
        text = _last_said(body) if self.answer == ECHO else self.answer
        for ending, shape in _SHAPES.items():
            if path.endswith(ending):
                if body.get("stream"):
                    return _streamed(ending, text)
                return 200, _JSON, json.dumps(shape(text, int(body.get("n") or 1))).encode()
        return 404, _JSON, json.dumps({"error": {"message": f"nothing is served at {path}"}}).encode()


_JSON = "application/json"


def _handler(endpoint: FixedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else TCP delays the second part of each answer by 40 ms

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw)
            except ValueError:
                body = {}
            status, kind, content = endpoint.reply(self.path, body if isinstance(body, dict) else {})
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def _last_said(body: dict[str, Any]) -> str:
    said = body.get("messages") or body.get("input") or body.get("prompt") or ""
    if isinstance(said, list):
        said = said[-1].get("content", "") if said and isinstance(said[-1], dict) else ""
    return said if isinstance(said, str) else json.dumps(said)


_USED = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_COUNTED = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}


def _chat(text: str, count: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choices = [{"index": at, "message": message, "finish_reason": "stop", "logprobs": None} for at in range(count)]
    return {
        "id": "c-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": choices,
        "usage": _USED,
    }


def _completion(text: str, count: int) -> dict[str, Any]:
    choices = [{"index": at, "text": text, "finish_reason": "stop", "logprobs": None} for at in range(count)]
    return {
        "id": "c-1",
        "object": "text_completion",
        "created": 0,
        "model": "policy",
        "choices": choices,
        "usage": _USED,
    }


def _response(text: str, _count: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed", "content": content}
    rest = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "model": "policy", "usage": _COUNTED}
    return {"id": "r-1", "object": "response", "created_at": 0, "status": "completed", "output": [message], **rest}


def _message(text: str, _count: int) -> dict[str, Any]:
    end = {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    content = [{"type": "text", "text": text}]
    return {"id": "m-1", "type": "message", "role": "assistant", "model": "policy", "content": content, **end}


_SHAPES = {
    "/chat/completions": _chat,
    "/completions": _completion,
    "/responses": _response,
    "/messages": _message,
}


def _streamed(ending: str, text: str) -> tuple[int, str, bytes]:
    if ending != "/chat/completions":
        return 400, _JSON, json.dumps({"error": {"message": "only chat completions are streamed here"}}).encode()
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    chunk = {"id": "c-1", "object": "chat.completion.chunk", "created": 0, "model": "policy", "choices": [delta]}
    return 200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


EPISODE_S = 20.0
_LOOKED_THROUGH = 5000
"""Maximum number of tasks of a split to search for the tasks that failed."""
_TRACE = 1500


class _NoServer:
    """Stands in for an episode's server."""

    def __init__(self, base_url: str) -> None:
        self.url = base_url
        self.result: EpisodeResult | None = None

    async def meet(self, connect_s: float) -> None:
        raise TypeError("a rehearsal has no teams")

    async def current_run_id(self) -> str:
        return "rehearsal"

    async def run(self, run_id: str) -> object:
        raise TypeError("a rehearsal has no teams")

    async def claim(self, claim: EpisodeClaim, patience: Patience | None = None) -> EpisodeGrant:
        return EpisodeGrant(
            episode_id="rehearsal",
            lease="none",
            group_id=None,
            slot=None,
            base_url=self.url,
            api_key="none",
            weights_version=WeightsVersion(run_id="rehearsal"),
            expires_at=math.inf,
        )

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        self.result = result
        return EpisodeReceipt(episode_id=episode_id, status="pooled")

    async def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry:
        return LedgerEntry(
            episode_id=episode_id,
            run_id="rehearsal",
            kind="train",
            task_id="rehearsal",
            mix=None,
            client_id="rehearsal",
            client_version="0",
            config_version=1,
            group_id=None,
            slot=None,
            state=EpisodeState.DROPPED,
            cause=cause,
            claimed_step=0,
            claimed_at=0.0,
        )

    async def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry:
        raise TypeError("a rehearsal keeps no ledger")

    async def renew(self, episode_id: str, lease: str) -> float:
        return math.inf

    async def prepare(self, episode_id: str, preparation: EpisodePreparation) -> object:
        raise TypeError("a rehearsal has no teams")

    async def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        raise TypeError("a rehearsal has no teams")


async def _rehearsed(request: RehearsalRequest, endpoint: FixedEndpoint) -> Rehearsal:
    found = Rehearsal()
    tasks: dict[str, list[Task]] = {}
    try:
        module = load_module(Path(request.folder), request.workflow)
        workflow = workflow_of(module, str(Path(request.folder) / request.workflow))
        for split in ("train", "heldout"):
            found.tasks[split], tasks[split] = await _tasks(request, workflow, split)
    except Exception:  # noqa: BLE001 - the rehearsal exists to find whatever the code raises
        return Rehearsal(error=_trace(request))
    examples: Callable[[Task], Mapping[str, str]] | None = (
        getattr(module, "examples", None) if request.examples else None
    )
    if request.plays:
        for split, line in tasks.items():
            for task in line:
                found.played += [
                    await _played(request, workflow, endpoint, split, task, name, answer)
                    for name, answer in _answers(request, examples, task)
                ]
    if workflow.close is not None:
        await workflow.close()
    return found


def _answers(
    request: RehearsalRequest, examples: Callable[[Task], Mapping[str, str]] | None, task: Task
) -> Iterable[tuple[int | str, str]]:
    named = examples(task) if examples is not None else {}
    return [*enumerate(request.answers), *((str(name), str(text)) for name, text in named.items())]


async def _tasks(request: RehearsalRequest, workflow: Workflow, split: str) -> tuple[list[str], list[Task]]:
    """Return the ids of a split's first tasks, and the tasks to play: the first few, plus those that the request names."""
    count = None if split == "train" else request.heldout
    names: list[str] = []
    line: list[Task] = []
    wanted = set(request.tasks)
    number = itertools.count()
    async for task in each(workflow.tasks(split, request.seed, count, **request.parameters)):
        at = next(number)
        if at < request.listed:
            names.append(task.id)
        if at < TASKS or task.id in wanted:
            line.append(task)
            wanted.discard(task.id)
        if at >= max(TASKS, request.listed) - 1 and (not wanted or at >= _LOOKED_THROUGH):
            break
    return names, line


async def _played(
    request: RehearsalRequest,
    workflow: Workflow,
    endpoint: FixedEndpoint,
    split: str,
    task: Task,
    name: int | str,
    answer: str,
) -> Played:
    server = _NoServer(endpoint.base_url)
    claim = EpisodeClaim(run_id="rehearsal", client_id="rehearsal", task_id=task.id)
    endpoint.begin(answer)
    random.seed(0)
    failure: dict[str, Any] = {}
    try:
        async with asyncio.timeout(EPISODE_S), Episode(server, claim, clock=SystemClock()) as episode:
            end_with(episode, await workflow.rollout(episode, task))
    except Exception as error:  # noqa: BLE001 - as above
        failure = {
            "error": _trace(request),
            "kind": type(error).__name__,
            "place": _place(request, error),
            "by_system": isinstance(error, OSError),
        }
    result = server.result
    reward = None if result is None else float(result.reward)
    success = None if result is None else result.success
    return Played(
        split=split,
        task=task.id,
        answer=name,
        reward=reward,
        success=success,
        metrics=[] if result is None else sorted(result.metrics),
        asked=list(endpoint.asked),
        **failure,
    )


def _trace(request: RehearsalRequest) -> str:
    """Return the end of the traceback, with relative names for the instrument's files."""
    return traceback.format_exc()[-_TRACE:].replace(f"{request.folder}/", "").strip()


def _place(request: RehearsalRequest, error: Exception) -> str:
    """Return the last line of the instrument's code that ran; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(request.folder)]
    return f"{Path(own[-1].filename).relative_to(request.folder)}:{own[-1].lineno}" if own else ""


def main(arguments: list[str]) -> int:
    request = RehearsalRequest.model_validate_json(Path(arguments[0]).read_bytes())
    spec = SandboxSpec.model_validate_json(Path(arguments[1]).read_bytes())
    result = os.dup(1)
    os.dup2(2, 1)
    endpoint = FixedEndpoint()
    confine_by(spec, [endpoint.port])
    endpoint.serve()
    found = asyncio.run(_rehearsed(request, endpoint))
    with os.fdopen(result, "w") as out:
        out.write(found.model_dump_json())
    return 0


if __name__ == "__main__":
    # Not sys.exit: the rehearsed code may have left threads that never end.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
