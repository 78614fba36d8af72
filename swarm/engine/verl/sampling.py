"""Sampling from replicas over their HTTP servers: each call goes to the one with the fewest. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.engine.sampling.client import VllmClient
from swarm.engine.sampling.sampler import CallInFlight, Sampler
from swarm.engine.seam import EngineDown
from swarm.engine.training.channel import Place
from swarm.protocol.episodes import WeightsVersion


@dataclass(slots=True)
class _Replica:
    client: VllmClient
    calls: int = 0


class ReplicaSampling(Sampler):
    """The driver boots the replicas and changes their weights; this knows where they are and what they serve.

    known: whether it is known which weights are served; after a restart it is not, until a run is opened again.
    """

    def __init__(self, model_dir: Path, model_name: str) -> None:
        super().__init__(model_dir, model_name)
        self._replicas: list[_Replica] = []
        self.known = True

    async def found(self, places: list[Place]) -> None:
        """Replicas were started: these take every call from now on."""
        again = bool(self._replicas) or not self.known
        await self.lost()
        self._replicas = [_Replica(VllmClient.at(place.address, place.key)) for place in places]
        self.known = not again

    async def lost(self) -> None:
        """The replicas are gone."""
        gone, self._replicas = self._replicas, []
        if gone:
            self.known = False
        for replica in gone:
            await replica.client.close()

    def changed(self, version: WeightsVersion, sampled_counts: dict[str, int]) -> None:
        """The replicas have these weights now; what each request had sampled before, by vLLM's own id."""
        self._spans.change(version, sampled_counts)
        self.known = True

    @contextmanager
    def _call(self) -> Iterator[CallInFlight]:
        if not self.known:
            raise EngineDown("the replicas were started anew and do not serve the run's weights yet")
        with super()._call() as call:
            yield call

    @contextmanager
    def _server(self) -> Iterator[VllmClient]:
        if not self._replicas:
            raise EngineDown("no replica is there; the engine is booting or has crashed")
        replica = min(self._replicas, key=lambda replica: replica.calls)
        replica.calls += 1
        try:
            yield replica.client
        finally:
            replica.calls -= 1
