"""The conformance suite over real vLLM: in each run the frameworks that the tests' own environment has, in a campaign all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.client.sync import SwarmClient
from swarm.engine.local.inference import VllmInference
from swarm.models import resolve
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import OptimizerSpec
from tests.conformance.frameworks import declared
from tests.conformance.rehearsal import Bare, rehearse
from tests.conformance.relay import served_bare
from tests.conformance.training import LEAST_SHARE, spec_of, train_on
from tests.conformance.witness import Witness
from tests.conformance.witnessing import Witnessing
from tests.fakes.learning_engine import LearningEngine
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.vllm_fixture import LoopThread


class WitnessedEngine(Witnessing, LearningEngine):
    """vLLM, and a trainer beside it."""

    def __init__(self, inference: VllmInference, model: ModelFolder, log_path: Path, witness: Witness) -> None:
        super().__init__(inference, model, log_path)
        self.witness = witness


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def served(
    vllm: VllmInference, vllm_loop: LoopThread, witness: Witness, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """With a run whose steps leave the weights as they are."""
    folder, spec = tmp_path_factory.mktemp("conformance"), spec_of(OptimizerSpec(learning_rate=0.0))
    engine = WitnessedEngine(vllm, resolve("smollm2-135m"), folder / "trainer.log", witness)
    vllm_loop.run(engine.boot())
    with served_by(vllm_loop, engine, folder, spec.model_dump(mode="json")) as running:
        yield running
    vllm_loop.run(engine.shutdown())


@pytest.fixture(scope="module")
def bare(vllm: VllmInference) -> Iterator[Bare]:
    """The same vLLM without a swarm server."""
    note = vllm.settings.log_path.with_suffix(".socket-dir")
    with served_bare(Path(note.read_text()) / "vllm.sock") as url:
        yield Bare(url, vllm.settings.model_name)


QUICK = ("openai", "anthropic", "curl")


@pytest.mark.parametrize("name", QUICK)
def test_a_framework_is_recorded_as_it_was_sampled(name: str, served: Served, bare: Bare, witness: Witness) -> None:
    (framework,) = declared([name])
    with SwarmClient(str(served.http.base_url)) as swarm:
        judgement = rehearse(
            framework, swarm, run_id=served.run_id, bare=bare, witness=witness, python=Path(sys.executable)
        )
    assert judgement.conforms, (judgement.faults, judgement.swarm, judgement.bare)


@pytest.mark.campaign
@pytest.mark.parametrize("name", QUICK)
def test_all_that_a_framework_samples_is_trained(name: str, served: Served) -> None:
    (framework,) = declared([name])
    with SwarmClient(str(served.http.base_url)) as swarm:
        trained = train_on(framework, swarm, served.run_id, python=Path(sys.executable))
    assert trained.faults == [], trained
    assert trained.trained == trained.drawn > trained.forced > 0


@pytest.mark.campaign
def test_all_frameworks_conform_each_in_its_own_environment() -> None:
    """Makes the environments that are not there yet: it needs the package index."""
    done = subprocess.run([sys.executable, "-m", "tests.conformance"], capture_output=True, text=True, check=False)
    judged = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in judged if not each["conforms"]] == [], done.stderr[-2000:]
    assert len(judged) == len(declared()), done.stderr[-2000:]


@pytest.mark.campaign
def test_what_all_frameworks_sample_is_trained() -> None:
    command = [sys.executable, "-m", "tests.conformance", "--train"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *trained, whole = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in trained if each["faults"]] == [], done.stderr[-2000:]
    assert len(trained) == len(declared()), done.stderr[-2000:]
    assert whole["share"] >= LEAST_SHARE
