"""Runs clients as jobs on a Ray cluster, whose machines lack our code. Each job gets one archive, with these files:

    swarm/client, swarm/protocol, foundation    the client library: pure Python; it also needs httpx and pydantic
    instrument/                                 the version of the instrument's code that the client runs

and a few more beside them. The client's working directory is the folder in which the archive is unpacked. The same content
always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from foundation.paths import packages_root, visible_files, write_atomically
from researcher.executor.jobs import BLUEPRINT, Ending, Order, Started
from researcher.executor.ray_cluster import ClusterRefused, RayCluster, SeenJob

INSTRUMENT = "instrument"
_LIBRARY = ("foundation", "swarm/client", "swarm/protocol")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Fixed timestamp of every file, so that the same content gives the same archive."""


def packed(code: Path, files: Mapping[str, bytes]) -> bytes:
    """Build a zip of the client library, the instrument's folder and `files` (content by name), which only the owner may read."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(
            [*_library(), *((f"{INSTRUMENT}/{name}", file) for name, file in visible_files(code))]
        ):
            _add(archive, name, file.read_bytes(), 0o644 | (file.stat().st_mode & 0o111))
        for name, content in sorted(files.items()):
            _add(archive, name, content, 0o600)
    return data.getvalue()


def _library() -> Iterator[tuple[str, Path]]:
    root = packages_root()
    yield "swarm/__init__.py", root / "swarm" / "__init__.py"
    for room in _LIBRARY:
        for name, file in visible_files(root / room):
            yield f"{room}/{name}", file


def _add(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100000 | mode) << 16
    archive.writestr(entry, content)


_CLIENT = f"exec python -m swarm.client.trial {BLUEPRINT}"
_TOKEN = "token"
_WITH_TOKEN = f"read -r SWARM_TOKEN < {_TOKEN} && rm {_TOKEN} && export SWARM_TOKEN && {_CLIENT}"
_FORWARDED = ("SWARM_LOG_LEVEL",)
_STATE, _ARCHIVE, _JOB = "ray.json", "client.zip", "job"
_CPUS = 1.0
"""CPUs per client. Ray would place a job that asks for none on the cluster's head."""
_LOOK_S, _READ_S = 1.0, 30.0
"""Intervals for polling a job, and for fetching its output."""
_REHEARSAL_LIMIT_S = 600.0
"""Time limit of a rehearsal. It is long because packages may have to be installed first."""
_SLACK_S = 20.0
"""Seconds to wait, beyond a job's own stop time, before abandoning a stopped job that still waits for resources."""
_UNPACKED = re.compile(r"""[^\s"']*/_ray_pkg_[0-9a-f]+/""" + INSTRUMENT + "/")
"""Path of a client's files on a node."""
_LONGEST_NAME = 60


class RayPlace:
    """Runs clients as Ray jobs.

    Args:
        pins: packages (`name==version`) that pip installs on the workers.
        stop_s: how long a stopped job may take to end before it is killed.
        environ: environment variables, with the tokens.
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

    @property
    def token(self) -> str | None:
        """The client's token for servers. A client token is preferred to an admin token."""
        given = (self._environ.get(name) for name in ("SWARM_CLIENT_TOKEN", "SWARM_TOKEN", "SWARM_ADMIN_TOKEN"))
        return next((token for token in given if token), None)

    async def submit(
        self, name: str, entrypoint: str, folder: Path, archive: bytes, metadata: Mapping[str, str]
    ) -> bool:
        """Submit a job with this archive, which is written to `folder` and deleted afterwards.

        Return False if a job of that name exists.
        """
        file = folder / _ARCHIVE
        try:
            _write_for_us(file, archive)
            env = {name: self._environ[name] for name in _FORWARDED if name in self._environ}
            runtime_env: dict[str, Any] = {"env_vars": {**env, "RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_s)}}
            if self._pins:
                runtime_env["pip"] = {"packages": self._pins, "pip_install_options": ["--no-deps"]}
            return await self.cluster.submit(
                name, entrypoint, archive=file, runtime_env=runtime_env, metadata=metadata, cpus=_CPUS
            )
        finally:
            file.unlink(missing_ok=True)

    async def rehearse(self, code: Path, workflow: str, asked: Mapping[str, Any], folder: Path, name: str) -> None:
        """Draw the instrument's tasks on the cluster, to check that its Python has what a client needs.

        `asked` is as for `swarm.client.rehearsal`. The archive is written to `folder` and deleted afterwards. Raises:
        ClusterRefused, with the end of the job's output; ClusterUnreachable."""
        clock = self.cluster.clock
        deadline = clock.monotonic() + _REHEARSAL_LIMIT_S
        files = {"asked.json": json.dumps(asked).encode()}
        command = f"python -m swarm.client.rehearsal {INSTRUMENT} {shlex.quote(workflow)} < asked.json"
        await self.submit(name, command, folder, packed(code, files), {})
        while (seen := await self.cluster.look(name)) is not None and not seen.over:
            if clock.monotonic() > deadline:
                await self.cluster.stop(name)
                raise ClusterRefused(
                    f"the Ray cluster at {self.cluster.name} drew no tasks within {_REHEARSAL_LIMIT_S:.0f} s (job status: "
                    f"{seen.status}): does it have a free CPU? See `ray status`"
                )
            await clock.sleep(_LOOK_S)
        said = await self.cluster.logs(name) or (seen.message if seen is not None else "")
        lines = said.strip().splitlines() or ["nothing"]
        if seen is None or seen.status != "SUCCEEDED":
            why = seen.lost if seen is not None and seen.lost else lines[-1]
            raise ClusterRefused(
                f"a client cannot run on the Ray cluster at {self.cluster.name}: {why}. `python` on its nodes must be 3.11 or "
                "newer, with httpx, pydantic and what the instrument imports (docs/guides/ray.md)"
            )
        if "problem" in (answer := json.loads(lines[-1])):
            raise ClusterRefused(f"on the Ray cluster at {self.cluster.name}: {answer['problem']}")


class RayJob:
    """A client that runs as a Ray job. Its folder records the newest job (`ray.json`) and the output of each job."""

    def __init__(self, place: RayPlace, folder: Path, name: str) -> None:
        self.folder = folder
        self._place = place
        self._cluster = place.cluster
        words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:_LONGEST_NAME]
        self._name = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
        self._read: set[int] = set()

    async def start(self, order: Order) -> Started:
        if order.code.sandboxed:
            raise ValueError("code written by an LLM needs a sandbox, and Ray jobs have none: use --clients local")
        seen = await self._seen()
        if seen is not None and not self._over(seen):
            raise BlockingIOError(f"the job {self._id()} is still running")
        if seen is not None or not self._number:
            self._remember(self._number + 1)
        while not await self._submitted(order):
            self._remember(self._number + 1)
        return Started(name=f"Ray job {self._id()} at {self._cluster.name}")

    async def _submitted(self, order: Order) -> bool:
        """Submit the newest job, and return whether the cluster has it.

        A killed researcher may have submitted a job under that name. Keep it if it is the same job, else end it and return False.
        """
        blueprint = order.blueprint.model_copy(update={"instrument_dir": INSTRUMENT})
        files = {BLUEPRINT: (blueprint.model_dump_json(indent=2) + "\n").encode(), _JOB: f"{self._id()}\n".encode()}
        sent, token = hashlib.sha256(packed(order.code.folder, files)).hexdigest(), self._place.token
        if token is not None:
            files[_TOKEN] = f"{token}\n".encode()
        archive, command = packed(order.code.folder, files), _CLIENT if token is None else _WITH_TOKEN
        metadata = {"code": order.code.version, "sent": sent}
        if await self._place.submit(self._id(), command, self.folder, archive, metadata):
            return True
        found = await self._seen()
        if found is not None and not found.over and found.metadata.get("sent") == sent:
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
                # The cluster remembers the stop request, so the job ends as soon as it begins.
                self._remember(self._number, let_go=True)
                return
            await clock.sleep(_LOOK_S / 4)

    async def ending(self) -> Ending:
        seen = await self._seen()
        if seen is None:
            return Ending(lost="the cluster no longer knows its job" if self._number else "")
        return Ending(exit_code=seen.exit_code, lost=seen.lost)

    def said(self, length: int = 2000) -> str:
        log = self._log
        return log.read_text(encoding="utf-8", errors="replace")[-length:].strip() if log.exists() and length else ""

    def as_here(self, text: str, code: Path) -> str:
        return _UNPACKED.sub(lambda _: f"{code}/", text)

    # -- recorded state -----------------------------------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any]:
        file = self.folder / _STATE
        return dict(json.loads(file.read_bytes())) if file.exists() else {}

    @property
    def _number(self) -> int:
        """Number of the newest job; 0 before the first."""
        return int(self._state.get("number", 0))

    @property
    def _log(self) -> Path:
        return self.folder / f"job-{self._number}.log"

    def _id(self) -> str:
        return f"{self._name}-{self._number}"

    def _remember(self, number: int, *, let_go: bool = False) -> None:
        state = {"number": number, "job": f"{self._name}-{number}", "cluster": self._cluster.name, "let_go": let_go}
        write_atomically(self.folder / _STATE, (json.dumps(state, indent=2) + "\n").encode())

    # -- the cluster's state ------------------------------------------------------------------------------------------

    async def _seen(self) -> SeenJob | None:
        """Return the newest job, if there is one. If it is over, fetch its output first."""
        if not self._number:
            return None
        seen = await self._cluster.look(self._id())
        if seen is not None and seen.over and self._number not in self._read:
            await self._fetch(seen.message)
            self._read.add(self._number)
        return seen

    def _over(self, seen: SeenJob) -> bool:
        return seen.over or (seen.waiting and bool(self._state.get("let_go")))

    async def _fetch(self, instead: str = "") -> None:
        """Fetch the job's output into its log. If it is not available, write `instead`."""
        said = await self._cluster.logs(self._id())
        if said or instead:
            write_atomically(self._log, (said or instead).encode())


def _write_for_us(file: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(data)
