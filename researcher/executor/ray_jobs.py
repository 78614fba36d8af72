"""Clients as jobs on a Ray cluster: each takes its code and blueprint along, and is found again by its name.

A client's first job is `NAME-1`; one that is started after it, in the same attempt, is `NAME-2`. The number is in the folder before
the job is submitted, and a cluster takes a name once: so a researcher that is killed while it submits leaves one job or none,
and finds it, or submits it again, under the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.paths import write_atomically
from researcher.executor.jobs import BLUEPRINT, Ending, Order, Started
from researcher.executor.package import INSTRUMENT, packed
from researcher.executor.ray_cluster import ClusterRefused, RayCluster, SeenJob

_CLIENT = f"python -m swarm.client.trial {BLUEPRINT}"
_REHEARSAL = "python -m swarm.client.rehearsal {folder} {workflow} < asked.json"
_FORWARDED = ("SWARM_LOG_LEVEL",)
_STATE, _ARCHIVE = "ray.json", "client.zip"
_CPUS = 1.0
"""Of a client. A job that asks for none stays on the cluster's head."""
_LOOK_S, _READ_S = 1.0, 30.0
"""How often a job is looked at, and its output fetched while it runs."""
_SLACK_S = 20.0
"""On top of a job's own time to end, until one that waits for room on the cluster is let go."""
_UNPACKED = re.compile(r"""[^\s"']*/_ray_pkg_[0-9a-f]+/""" + INSTRUMENT + "/")
"""Where a client's files are on a node."""
_LONGEST_NAME = 60


class RayPlace:
    """A `ClientPlace`. pins: packages (`name==version`) that the instrument needs on the workers; pip installs them there.

    stop_s: how long a job that is stopped may take to end by itself. environ: whence tokens come.
    """

    def __init__(
        self,
        cluster: RayCluster,
        *,
        pins: Sequence[str] = (),
        stop_s: int = 10,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.stop_s = stop_s
        self._pins = list(pins)
        self._environ = os.environ if environ is None else environ

    def job(self, folder: Path, name: str) -> RayJob:
        return RayJob(self, folder, name)

    def runtime_env(self) -> dict[str, Any]:
        """What a job gets beside its files. A client's token goes before an admin's."""
        env = {name: self._environ[name] for name in _FORWARDED if name in self._environ}
        tokens = (self._environ.get(name) for name in ("SWARM_CLIENT_TOKEN", "SWARM_TOKEN", "SWARM_ADMIN_TOKEN"))
        if token := next((token for token in tokens if token), None):
            env["SWARM_TOKEN"] = token
        env["RAY_JOB_STOP_WAIT_TIME_S"] = str(self.stop_s)
        pip = {"pip": {"packages": self._pins, "pip_install_options": ["--no-deps"]}} if self._pins else {}
        return {"env_vars": env, **pip}

    async def rehearse(
        self, code: Path, workflow: str, parameters: Mapping[str, Any], heldout: int, folder: Path, name: str
    ) -> None:
        """Draw a few of the instrument's tasks on the cluster: whether its Python has what a client needs.

        folder: for what is sent. Raises: ClusterRefused with the job's last words; ClusterUnreachable.
        """
        asked = json.dumps({"parameters": [dict(parameters)], "heldout": heldout, "thorough": False})
        archive = folder / _ARCHIVE
        write_atomically(archive, packed(code, {"asked.json": asked.encode()}))
        command = _REHEARSAL.format(folder=INSTRUMENT, workflow=workflow)
        await self.cluster.submit(
            name, command, archive=archive, runtime_env=self.runtime_env(), metadata={}, cpus=_CPUS
        )
        while (seen := await self.cluster.look(name)) is not None and not seen.over:
            await self.cluster.clock.sleep(_LOOK_S)
        lines = ((await self.cluster.logs(name)) or "").strip().splitlines() or ["nothing"]
        if seen is None or seen.status != "SUCCEEDED":
            why = seen.lost if seen is not None and seen.lost else lines[-1]
            raise ClusterRefused(
                f"a client cannot work on the Ray cluster at {self.cluster.name}: {why}. Its Python (`python` on the nodes) must be 3.11 or newer, "
                "with httpx, pydantic and what the instrument imports; docs/ray.md says how"
            )
        if "problem" in (answer := json.loads(lines[-1])):
            raise ClusterRefused(f"on the Ray cluster at {self.cluster.name}: {answer['problem']}")


class RayJob:
    """A `ClientJob`. Its folder holds which job is its newest (`ray.json`), what was sent, and each job's output."""

    def __init__(self, place: RayPlace, folder: Path, name: str) -> None:
        self.folder = folder
        self._place = place
        self._cluster = place.cluster
        words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:_LONGEST_NAME]
        self._name = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
        self._read: set[int] = set()

    async def start(self, order: Order) -> Started:
        if order.code.sandboxed:
            raise ValueError("code that no person wrote runs in a sandbox, and a Ray job has none: use --clients local")
        seen = await self._seen()
        if seen is not None and not self._over(seen):
            raise BlockingIOError(f"the job {self._id()} lives")
        blueprint = order.blueprint.model_copy(update={"instrument_dir": INSTRUMENT})
        data = packed(order.code.folder, {BLUEPRINT: (blueprint.model_dump_json(indent=2) + "\n").encode()})
        write_atomically(self.folder / _ARCHIVE, data)
        metadata = {"code": order.code.version, "archive": hashlib.sha256(data).hexdigest()}
        if seen is not None or not self._number:
            self._remember(self._number + 1)
        while not await self._submitted(metadata):
            self._remember(self._number + 1)
        return Started(name=f"Ray job {self._id()} at {self._cluster.name}")

    async def _submitted(self, metadata: Mapping[str, str]) -> bool:
        """Submit the newest job. What a killed researcher submitted under that name is taken over where it is the same; else it is
        ended, and False."""
        fresh = await self._cluster.submit(
            self._id(),
            _CLIENT,
            archive=self.folder / _ARCHIVE,
            runtime_env=self._place.runtime_env(),
            metadata=metadata,
            cpus=_CPUS,
        )
        if fresh:
            return True
        found = await self._seen()
        if found is not None and not found.over and dict(found.metadata).get("archive") == metadata["archive"]:
            return True
        await self.end(self._place.stop_s)
        return False

    async def alive(self) -> bool:
        seen = await self._seen()
        return seen is not None and not self._over(seen)

    async def ended(self) -> None:
        clock = self._cluster.clock
        read_at = clock.monotonic()
        while await self.alive():
            if clock.monotonic() - read_at >= _READ_S:
                await self._fetch()
                read_at = clock.monotonic()
            await clock.sleep(_LOOK_S)

    async def end(self, grace_s: float) -> None:
        clock = self._cluster.clock
        deadline = clock.monotonic() + max(grace_s, self._place.stop_s) + _SLACK_S
        while (seen := await self._seen()) is not None and not self._over(seen):
            await self._cluster.stop(self._id())
            if seen.waiting and clock.monotonic() >= deadline:
                # It was told, and ends as soon as it begins: the cluster keeps that for it.
                self._remember(self._number, let_go=True)
                return
            await clock.sleep(_LOOK_S / 4)

    async def ending(self) -> Ending:
        seen = await self._seen()
        if seen is None:
            return Ending(lost="the cluster does not know its job any more" if self._number else "")
        return Ending(exit_code=seen.exit_code, lost=seen.lost)

    def said(self, length: int = 2000) -> str:
        log = self._log
        return log.read_text(encoding="utf-8", errors="replace")[-length:].strip() if log.exists() and length else ""

    def as_here(self, text: str, code: Path) -> str:
        return _UNPACKED.sub(lambda _: f"{code}/", text)

    # -- what is remembered -------------------------------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any]:
        file = self.folder / _STATE
        return dict(json.loads(file.read_bytes())) if file.exists() else {}

    @property
    def _number(self) -> int:
        """Of the newest job; 0 before the first."""
        return int(self._state.get("number", 0))

    @property
    def _log(self) -> Path:
        return self.folder / f"job-{self._number}.log"

    def _id(self) -> str:
        return f"{self._name}-{self._number}"

    def _remember(self, number: int, *, let_go: bool = False) -> None:
        state = {"number": number, "job": f"{self._name}-{number}", "cluster": self._cluster.name, "let_go": let_go}
        write_atomically(self.folder / _STATE, (json.dumps(state, indent=2) + "\n").encode())

    # -- what is seen -------------------------------------------------------------------------------------------------

    async def _seen(self) -> SeenJob | None:
        """The newest job. When it is over, its output is here."""
        if not self._number:
            return None
        seen = await self._cluster.look(self._id())
        if seen is not None and seen.over and self._number not in self._read:
            await self._fetch()
            self._read.add(self._number)
        return seen

    def _over(self, seen: SeenJob) -> bool:
        return seen.over or (seen.waiting and bool(self._state.get("let_go")))

    async def _fetch(self) -> None:
        said = await self._cluster.logs(self._id())
        if said is not None:
            write_atomically(self._log, said.encode())
