"""`Evidence` read from the store: what a campaign's studies recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from researcher.campaign.llm.tools import CURVES
from researcher.instruments.instrument import Instrument
from researcher.models import Finding, SampledEpisode, TrialRecord
from researcher.store.store import Store


@dataclass(frozen=True, slots=True)
class StoreEvidence:
    """The evidence in a store.

    `opened` returns an instrument of the campaign by its name. `on_echo` says whether the campaign runs on the echo engine. Such a
    campaign sees only findings from that engine; any other campaign sees none of them."""

    store: Store
    opened: Callable[[str], Instrument]
    on_echo: bool

    def instrument(self, name: str) -> Instrument:
        return self.opened(name)

    def trials(self, study: str) -> list[TrialRecord]:
        return self.store.trials.all(study, series=CURVES)

    def samples(self, study: str) -> dict[str, list[SampledEpisode]]:
        return self.store.trials.samples(study)

    def findings(self) -> Sequence[Finding]:
        return [each for each in self.store.findings.all() if ("echo" in each.models) == self.on_echo]
