"""verl's vLLM replicas, extended so that weights can change while calls are in flight: freeze, count, continue.

verl itself aborts the calls. Runs in the driver and in Ray's actors.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from torch import Tensor
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from swarm.engine.local.adapters import CONFIG_FILE, WEIGHTS_FILE, folder_config, folder_weights
from swarm.engine.training.targets import layer_shapes
from swarm.engine.verl.config import configured_adapters
from swarm.protocol.runspec import LoraSpec

_EXTENSION = "swarm.engine.verl.worker_extension.ReplicaWorker"
_MIDDLEWARE = "swarm.engine.verl.replica.KeyRequired"


def require_key(key: str, args: argparse.Namespace) -> None:
    """Make vLLM's server, built with these arguments, refuse requests without the key."""
    args.api_key = [key]
    args.middleware = [*args.middleware, _MIDDLEWARE]


class ReplicaServer(vLLMHttpServer):  # type: ignore[misc]
    """One replica's actor: vLLM's engine, and its own HTTP server on a port of the node."""

    engine: Any

    async def run_server(self, args: argparse.Namespace) -> None:
        """Serve with a key made here, which appears in no log, environment or command line."""
        self._key = secrets.token_urlsafe(32)
        require_key(self._key, args)
        await super().run_server(args)

    async def launch_server(self, *args: Any, **fields: Any) -> None:
        """Start serving. If adapters are trained, serve adapters that change nothing, under the model's name."""
        with tempfile.TemporaryDirectory(prefix="swarm-adapter-") as folder:
            self._blank = Path(folder)
            await super().launch_server(*args, **fields)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        adapters = configured_adapters(self.model_config)
        if adapters is None:
            return
        (self._blank / CONFIG_FILE).write_text(json.dumps(folder_config(adapters, "hosted")))
        save_file(_one_blank_layer(Path(self.model_config.local_path), adapters), self._blank / WEIGHTS_FILE)
        name = engine_kwargs["served_model_name"]
        engine_kwargs["lora_modules"] = {"name": name, "path": str(self._blank)}
        engine_kwargs["max_cpu_loras"] = 1
        engine_kwargs["served_model_name"] = f"{name}:hosted"

    async def key(self) -> str:
        return self._key

    async def alive(self) -> None:
        """Raise if vLLM's engine died under the actor. While one of the engine's processes hangs, this call does not return."""
        await self.engine.check_health()
        await self.engine.collective_rpc(method="sampled_counts")

    async def freeze(self) -> dict[str, int]:
        """Stop every request where it is; new requests wait. Returns how many tokens each request has sampled, by vLLM's own id."""
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        counts: list[dict[str, int]] = await self.engine.collective_rpc(method="sampled_counts")
        return counts[0]

    async def fall_asleep(self) -> None:
        """Stop every request where it is, drop keys and values, and release the device's memory; on a CPU, memory is kept."""
        await self.engine.sleep(level=1, mode="keep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `fall_asleep`; requests recompute their keys and values."""
        await self.engine.wake_up(tags=tags)

    async def forget(self) -> str:
        """Drop keys and values of the old weights, including those of frozen requests; return the digest of the new weights.

        Raises: RuntimeError if vLLM kept any of them, or its workers received different weights.
        """
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept keys and values of the old weights")
        digests: set[str] = set(await self.engine.collective_rpc(method="weights_digest"))
        if len(digests) != 1:
            raise RuntimeError(f"the workers of replica {self.replica_rank} received different weights")
        return digests.pop()

    async def clear_kv_cache(self) -> None:
        """No-op. verl calls this at the end of a transfer, but `forget` does it, for frozen requests too."""

    async def go_on(self) -> None:
        await self.engine.resume_generation()

    def _get_worker_extension_cls(self) -> str:
        return _EXTENSION

    def _get_override_generation_config(self) -> dict[str, Any]:
        """Return no overrides: each request says how it is sampled."""
        return {}


def _one_blank_layer(model_dir: Path, adapters: LoraSpec) -> dict[str, Tensor]:
    """Return adapters of one layer that add nothing, because vLLM does not start without any."""
    shapes = layer_shapes(model_dir)
    name, (outputs, inputs) = next(
        (name, shape) for name, shape in shapes.items() if name.rpartition(".")[2] in adapters.targets
    )
    parts = {"A": torch.zeros(adapters.rank, inputs), "B": torch.zeros(outputs, adapters.rank)}
    return folder_weights({f"{name}.lora_{part}.weight": weight for part, weight in parts.items()})


class Replica(vLLMReplica):  # type: ignore[misc]
    """One replica, which samples on the devices of its ranks."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.server_class = ray.remote(ReplicaServer)


class Replicas(LLMServerManager):  # type: ignore[misc]
    """All replicas of an engine."""

    rollout_replica_class = Replica

    async def _init_global_load_balancer(self) -> None:
        """No-op: the control process chooses the replica for each call."""


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_OPEN = ("/health", "/version")
_JSON = [(b"content-type", b"application/json")]
_POLICY_VIOLATION = 1008


class KeyRequired:
    """ASGI middleware: every path except `/health` and `/version` requires one of the server's keys, whatever the method.

    The keys are read from the arguments of vLLM's application (`app.state.args.api_key`).
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or _knows_a_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": _JSON})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


def _knows_a_key(scope: Message) -> bool:
    header: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = header.partition(b" ")
    keys = [str(one).encode() for one in scope["app"].state.args.api_key]
    return scheme.lower() == b"bearer" and any(secrets.compare_digest(key, one) for one in keys)
