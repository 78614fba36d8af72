"""The conformance suite over real vLLM: in each run the frameworks that the tests' own environment has, in a campaign all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import pytest

from swarm.client.sync import SwarmClient
from swarm.engine.local.inference import VllmInference
from swarm.engine.seam import Sampled, SampledEvent, SampleRequest
from tests.conformance.frameworks import declared
from tests.conformance.rehearsal import Bare, rehearse
from tests.conformance.relay import served_bare
from tests.conformance.witness import Seen, Witness
from tests.fakes.sampling_engine import SamplingEngine
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.vllm_fixture import LoopThread


class WitnessedEngine(SamplingEngine):
    """Notes what the engine says that it sampled, before the gateway hears of it."""

    def __init__(self, inference: VllmInference, witness: Witness) -> None:
        super().__init__(inference)
        self._witness = witness

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = await super().sample(request)
        for choice in sampled.choices:
            self._witness.seen.append(Seen(tuple(sampled.prompt_ids), tuple(choice.sampled_ids)))
        return sampled

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        return self._noted(super().stream(request))

    async def _noted(self, events: AsyncIterator[SampledEvent]) -> AsyncGenerator[SampledEvent, None]:
        prompt: tuple[int, ...] = ()
        places: dict[int, int] = {}
        async for event in events:
            prompt = tuple(event.prompt_ids or prompt)
            for choice in event.choices:
                if choice.index not in places:
                    places[choice.index] = len(self._witness.seen)
                    self._witness.seen.append(Seen(prompt, ()))
                before = self._witness.seen[places[choice.index]]
                self._witness.seen[places[choice.index]] = Seen(prompt, (*before.sampled_ids, *choice.sampled_ids))
            yield event


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def served(
    vllm: VllmInference, vllm_loop: LoopThread, witness: Witness, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with served_by(vllm_loop, WitnessedEngine(vllm, witness), tmp_path_factory.mktemp("conformance")) as running:
        yield running


@pytest.fixture(scope="module")
def bare(vllm: VllmInference) -> Iterator[Bare]:
    """The same vLLM without a swarm server."""
    note = vllm.settings.log_path.with_suffix(".socket-dir")
    with served_bare(Path(note.read_text()) / "vllm.sock") as url:
        yield Bare(url, vllm.settings.model_name)


@pytest.mark.parametrize("name", ["openai", "anthropic", "curl"])
def test_a_framework_is_recorded_as_it_was_sampled(name: str, served: Served, bare: Bare, witness: Witness) -> None:
    (framework,) = declared([name])
    with SwarmClient(str(served.http.base_url)) as swarm:
        judgement = rehearse(
            framework, swarm, run_id=served.run_id, bare=bare, witness=witness, python=Path(sys.executable)
        )
    assert judgement.conforms, (judgement.faults, judgement.swarm, judgement.bare)


@pytest.mark.campaign
def test_all_frameworks_conform_each_in_its_own_environment() -> None:
    """Makes the environments that are not there yet: it needs the package index."""
    done = subprocess.run([sys.executable, "-m", "tests.conformance"], capture_output=True, text=True, check=False)
    judged = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in judged if not each["conforms"]] == [], done.stderr[-2000:]
    assert len(judged) == len(declared()), done.stderr[-2000:]
