"""The driver as the control process sees it: a supervised child that holds the Ray cluster. Imports neither torch nor ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from foundation.clock import Clock
from swarm.engine.local.vllm_server import child_environment
from swarm.engine.seam import EngineHealth
from swarm.engine.training.channel import Place, Reply
from swarm.engine.training.handle import TrainerHandle
from swarm.engine.training.supervisor import BackOff, ChildCommand, HungStatus
from swarm.engine.verl.settings import HUNG_STATUS, LOOK_EVERY_S, ON_EVERY_NODE, VerlSettings

_IMPORTS_S = 300.0
"""Of every process of the cluster, one after the other on a small machine; and until its groups have found each other."""
_FIRST_STEP_S = 60.0
"""Groups of ranks meet, kernels are compiled."""
_STOP_GRACE_S = 20.0
"""Ray takes a while to end its actors on other nodes."""

Found = Callable[[list[Place]], Awaitable[None]]


class DriverHandle(TrainerHandle):
    """When it does not answer in time, whichever part of its cluster hangs, it is ended with all of it.

    on_places: hears where the replicas of a newly started driver are, before anyone hears that it is ready.
    """

    def __init__(
        self,
        settings: VerlSettings,
        fingerprint: str,
        *,
        log_path: Path,
        clock: Clock,
        on_health: Callable[[EngineHealth], None],
        on_places: Found,
        back_off: BackOff | None = None,
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._on_places = on_places
        super().__init__(
            "driver",
            settings.work("cpu", start_s=_FIRST_STEP_S),
            imports_s=_IMPORTS_S,
            log_path=log_path,
            clock=clock,
            on_health=on_health,
            back_off=back_off,
            stop_grace_s=_STOP_GRACE_S,
            on_greeting=self._greeted,
            hung_status=HungStatus(status=HUNG_STATUS, silent_s=self._silent_s),
        )

    async def _greeted(self, greeting: Reply) -> None:
        self._work = self._settings.work(greeting.device, start_s=_FIRST_STEP_S)
        await self._on_places(greeting.places)

    def _silent_s(self) -> float:
        """How long a part of the cluster has given no sign of life when the driver ends for it."""
        return self._settings.silence_s(self._work.device) + LOOK_EVERY_S

    def _command(self, descriptor: int) -> ChildCommand:
        env = child_environment(os.environ) | ON_EVERY_NODE | {"RAY_USAGE_STATS_ENABLED": "0"}
        del env["VLLM_SERVER_DEV_MODE"]  # replicas listen on the network: nobody there may call into their workers
        argv = [
            *(sys.executable, "-m", "swarm.engine.verl.driver_process"),
            *("--settings", self._settings.model_dump_json(), "--fingerprint", self._fingerprint),
            *("--socket", str(descriptor)),
        ]
        return ChildCommand(name="driver (verl)", argv=argv, env=env, log_path=self._log_path, pass_fds=(descriptor,))
