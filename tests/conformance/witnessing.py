"""An engine that notes what it says that it sampled, before the gateway hears of it: the witness's place where no socket has one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from foundation.clock import SystemClock
from swarm.engine.seam import Sampled, SampledEvent, SampleRequest
from tests.conformance.witness import Seen, Witness
from tests.fakes.parallel_tools import ParallelTools


class Witnessing:
    """To be mixed into an engine, before it in the list of bases."""

    witness: Witness

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled: Sampled = await super().sample(request)  # type: ignore[misc]
        for choice in sampled.choices:
            self.witness.seen.append(Seen(tuple(sampled.prompt_ids), tuple(choice.sampled_ids)))
        return sampled

    def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        return self._noted(super().stream(request))  # type: ignore[misc]

    async def _noted(self, events: AsyncIterator[SampledEvent]) -> AsyncGenerator[SampledEvent, None]:
        prompt: tuple[int, ...] = ()
        places: dict[int, int] = {}
        async for event in events:
            prompt = tuple(event.prompt_ids or prompt)
            for choice in event.choices:
                if choice.index not in places:
                    places[choice.index] = len(self.witness.seen)
                    self.witness.seen.append(Seen(prompt, ()))
                before = self.witness.seen[places[choice.index]]
                self.witness.seen[places[choice.index]] = Seen(prompt, (*before.sampled_ids, *choice.sampled_ids))
            yield event


class WitnessedEcho(Witnessing, ParallelTools):
    """The echo engine with a witness. It calls tools one by one, unless a test says otherwise."""

    def __init__(self, witness: Witness, *, max_model_len: int) -> None:
        super().__init__(max_model_len=max_model_len, clock=SystemClock())
        self.witness = witness
