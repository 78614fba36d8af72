"""Two replicas of inference: who takes which call, and what each serves while the other dies and comes back; vLLM is not started."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import SystemClock
from swarm.engine.local.inference import VllmInference, WeightsRefused
from swarm.engine.local.replicas import Replicas, beginnings
from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.server import VllmSettings
from swarm.engine.seam import EngineDown, EngineHealth, SampleRequest
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess
from swarm.models.folder import ModelFolder
from swarm.protocol.episodes import WeightsVersion

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0


class Servers:
    """What stands in for vLLM. asked: the device of each call; loaded: device and weights, in order; a start waits at the gate."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.replicas: Replicas | None = None
        self.asked: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = asyncio.Event()
        self.reading.set()
        self._start = ChildProcess.start
        patch.setattr(ChildProcess, "start", self.start)
        patch.setattr(VllmSettings, "check_memory", lambda _: None)
        servers = self

        async def healthy(client: VllmClient) -> bool:
            await servers.gate.wait()
            return True

        async def replace_weights(client: VllmClient, folder: Path) -> None:
            servers.loaded.append((servers.device(client), folder.name))
            await servers.reading.wait()

        async def nothing(client: VllmClient) -> None:
            return None

        async def counts(client: VllmClient) -> dict[str, int]:
            return {}

        async def stream(
            client: VllmClient, dialect: str, body: dict[str, Any]
        ) -> AsyncGenerator[dict[str, Any], None]:
            servers.asked.append(servers.device(client))
            while True:
                yield {"id": body["request_id"], "choices": [], "usage": None}

        for name, method in {"healthy": healthy, "replace_weights": replace_weights, "stream": stream}.items():
            patch.setattr(VllmClient, name, method)
        for name in ("pause", "resume", "forget_prefixes"):
            patch.setattr(VllmClient, name, nothing)
        patch.setattr(VllmClient, "sampled_counts", counts)

    async def start(self, command: ChildCommand) -> ChildProcess:
        return await self._start(replace(command, argv=[sys.executable, "-c", "import time; time.sleep(600)"]))

    def device(self, client: VllmClient) -> str:
        assert self.replicas is not None
        return next(str(each.settings.device_name) for each in self.replicas.all if each._client is client)


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


@pytest.fixture
async def replicas(tiny_llama: ModelFolder, tmp_path: Path, servers: Servers) -> AsyncIterator[Replicas]:
    made = Replicas(
        [
            VllmInference(
                VllmSettings(
                    model_dir=tiny_llama.path,
                    model_name="tiny",
                    log_path=tmp_path / f"inference-{index}.log",
                    index=index,
                    replicas=2,
                ),
                clock=SystemClock(),
                back_off=BackOff(first_s=0.01, failures=2),
            )
            for index in range(2)
        ]
    )
    servers.replicas = made
    try:
        await made.boot()
        yield made
    finally:
        servers.gate.set()
        servers.reading.set()
        await made.shutdown()


def version(step: int) -> WeightsVersion:
    return WeightsVersion(run_id="run-1", step=step)


def said(*texts: str) -> SampleRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return SampleRequest(dialect="chat.completions", body={"messages": messages})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:  # another process's state has no event to wait for
            if holds():
                return
            await asyncio.sleep(0.005)


async def begun(open_calls: AsyncExitStack, replicas: Replicas, request: SampleRequest) -> None:
    """A call that goes on until the stack is closed."""
    await anext(await open_calls.enter_async_context(aclosing(replicas.stream(request))))


async def killed(replica: VllmInference) -> None:
    assert replica._supervisor.child is not None
    await replica._supervisor.child.stop(grace_s=0)
    await until(lambda: not replica.health.ready)


async def test_a_call_goes_to_the_idlest_replica_and_the_next_turn_follows_its_prompt(
    replicas: Replicas, servers: Servers
) -> None:
    async with AsyncExitStack() as calls:
        for text in ("first task", "second task", "third task"):
            await begun(calls, replicas, said(text))
    assert servers.asked == ["cpu:0", "cpu:1", "cpu:0"]
    for _ in range(3):
        async with AsyncExitStack() as calls:
            await begun(calls, replicas, said("second task", "an answer", "a question"))
    assert servers.asked[3:] == ["cpu:1"] * 3


async def test_a_group_stays_together_until_its_replica_has_far_more_calls(
    replicas: Replicas, servers: Servers
) -> None:
    async with AsyncExitStack() as calls:
        for _ in range(16):
            await begun(calls, replicas, said("one task"))
    assert servers.asked[:5] == ["cpu:0"] * 5
    assert abs(servers.asked.count("cpu:0") - servers.asked.count("cpu:1")) <= 4


async def test_new_weights_make_every_prompt_unknown(replicas: Replicas, servers: Servers, tmp_path: Path) -> None:
    async with AsyncExitStack() as calls:
        await begun(calls, replicas, said("x"))
        await begun(calls, replicas, said("task"))
    await replicas.publish(tmp_path / "a", version(1))
    async with AsyncExitStack() as calls:
        await begun(calls, replicas, said("task"))
    assert servers.asked == ["cpu:0", "cpu:1", "cpu:0"]


async def test_while_one_replica_is_away_the_other_takes_the_calls_and_the_weights(
    replicas: Replicas, servers: Servers, tmp_path: Path
) -> None:
    heard: list[EngineHealth] = []
    replicas.subscribe(heard.append)
    await replicas.publish(tmp_path / "a", version(1))
    servers.gate.clear()
    first, second = replicas.all
    await killed(first)
    assert replicas.health.ready
    assert [(each.device, each.ready) for each in heard[-1].replicas] == [("cpu:0", False), ("cpu:1", True)]
    async with AsyncExitStack() as calls:
        for _ in range(6):
            await begun(calls, replicas, said("one task"))
    assert servers.asked == ["cpu:1"] * 6
    async with asyncio.timeout(PATIENCE_S):
        await replicas.publish(tmp_path / "b", version(2))
    assert second.version == first.version == version(2)
    servers.gate.set()
    await until(lambda: first.health.ready)
    assert servers.loaded[-2:] == [("cpu:1", "b"), ("cpu:0", "b")]
    assert first.health.failures == 1


async def test_weights_are_not_written_over_while_a_starting_replica_reads_them(
    replicas: Replicas, servers: Servers, tmp_path: Path
) -> None:
    await replicas.publish(tmp_path / "a", version(1))
    first, _ = replicas.all
    servers.reading.clear()
    await killed(first)
    await until(lambda: servers.loaded[-1:] == [("cpu:0", "a")] and len(servers.loaded) == 3)
    publishing = asyncio.create_task(replicas.publish(tmp_path / "b", version(2)))
    await asyncio.sleep(0.05)
    assert not publishing.done()  # whoever is told that it is published writes over `a` next
    servers.reading.set()
    async with asyncio.timeout(PATIENCE_S):
        await publishing
    await until(lambda: first.health.ready)
    assert {weights for device, weights in servers.loaded if device == "cpu:0"} == {"a", "b"}
    assert servers.loaded[-1] == ("cpu:0", "b")
    assert first.version == version(2)


async def test_weights_that_are_refused_are_served_by_no_replica(
    replicas: Replicas, servers: Servers, tmp_path: Path
) -> None:
    await replicas.publish(tmp_path / "a", version(1))

    async def refuse() -> None:
        raise WeightsRefused("other weights")

    with pytest.raises(WeightsRefused):
        await replicas.publish(tmp_path / "b", version(2), approval=asyncio.ensure_future(refuse()))
    await until(lambda: all(each.health.ready for each in replicas.all))
    assert [each.version for each in replicas.all] == [version(1)] * 2
    assert sorted(servers.loaded[-2:]) == [("cpu:0", "a"), ("cpu:1", "a")]


async def test_inference_fails_for_good_once_every_replica_has(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: ChildCommand) -> ChildProcess:
        raise EngineDown("no such device")

    monkeypatch.setattr(ChildProcess, "start", broken)
    first, second = replicas.all
    await killed(first)
    await until(lambda: first.health.failed_for_good)
    assert replicas.health.ready
    assert not replicas.health.failed_for_good
    await replicas.publish(None, version(1))
    await killed(second)
    await until(lambda: second.health.failed_for_good)
    assert replicas.health.failed_for_good
    assert replicas.health.failures == 4
    with pytest.raises(EngineDown, match="no such device"):
        await replicas.publish(None, version(2))
    with pytest.raises(EngineDown, match="no such device"):
        await replicas.render("completions", {"prompt": "x"})


def test_what_prompts_have_in_common_is_found_in_messages_tools_and_texts() -> None:
    one, more = beginnings(said("a", "b")), beginnings(said("a", "b", "c"))
    assert more[: len(one)] == one
    tooled = SampleRequest(dialect="chat.completions", body=said("a").body | {"tools": [{"name": "t"}]})
    assert not set(beginnings(tooled)) & set(one)
    text, longer = (SampleRequest(dialect="completions", body={"prompt": "x" * size}) for size in (512, 600))
    assert beginnings(longer)[:2] == beginnings(text)
    assert beginnings(SampleRequest(dialect="completions", body={"prompt": [1, 2, 3]}))
    for odd in ({}, {"messages": "hello"}, {"prompt": 3}):
        for dialect in ("chat.completions", "completions"):
            assert len(beginnings(SampleRequest(dialect=dialect, body=odd))) <= 1  # type: ignore[arg-type]
