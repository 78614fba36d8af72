"""A client of a Ray cluster's job server: submits, looks up, reads and stops jobs, with retries.

This is the only module that imports Ray, and it does so only when a cluster is used. Ray's client (`ray.job_submission`) is
synchronous and runs in threads. It needs `ray` and `requests`, but not the packages of a cluster's head.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from foundation.addresses import is_loopback
from foundation.clock import Clock
from foundation.logs import redact
from researcher.executor.errors import ClusterUnreachable

_ANSWER_S = 30.0
"""Time limit of one request to the job server, in seconds."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 8.0
_OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
_OWN_END = "JOB_ENTRYPOINT_COMMAND_ERROR"
"""Ray's error type for a job whose own command exited with an error."""
_END = 300
"""Number of characters shown of a long message from Ray, both from its beginning and from its end."""
INSTALL = "pip install 'swarm-researcher[ray]'"
T = TypeVar("T")


class ClusterRefused(ValueError):
    """The cluster cannot be used in this way; the message says what to do."""


class JobServer(Protocol):
    """The methods of `ray.job_submission.JobSubmissionClient` that are used here.

    They raise OSError when the server cannot be reached, and RuntimeError when it refuses.
    """

    def submit_job(
        self,
        *,
        entrypoint: str,
        submission_id: str,
        runtime_env: dict[str, Any],
        metadata: dict[str, str],
        entrypoint_num_cpus: float,
    ) -> str: ...

    def get_job_info(self, job_id: str) -> Any: ...

    def list_jobs(self) -> Sequence[Any]: ...

    def get_job_logs(self, job_id: str) -> str: ...

    def stop_job(self, job_id: str) -> bool: ...

    def get_address(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenJob:
    """A job as the cluster knows it.

    Attributes:
        status: Ray's name of the status.
        lost: why the job ended, unless its command ended on its own.
        message: Ray's message, with the end of the output if the command failed.
    """

    status: str
    exit_code: int | None
    lost: str
    message: str
    metadata: Mapping[str, str]

    @property
    def over(self) -> bool:
        return self.status in _OVER

    @property
    def waiting(self) -> bool:
        """Whether the job's command has yet to begin, because the cluster has no room or is still preparing the environment."""
        return self.status == "PENDING"


class RayCluster:
    """Client of one cluster's job server.

    Args:
        address: address of the job server, `http://HOST:8265`. None lets Ray find it by RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or a
            cluster on this machine.
        patience_s: how long to retry if the cluster does not answer.
        connect: how to reach the job server, by default through Ray's own client.
        tell: receives a line of text while the cluster does not answer.
    """

    def __init__(
        self,
        address: str | None,
        clock: Clock,
        *,
        patience_s: float = 60.0,
        connect: Callable[[str | None], JobServer] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.clock = clock
        self._address = address
        self._patience_s = patience_s
        self._connect = connect or _connected
        self._tell = tell
        self._server: JobServer | None = None
        self._given_up = False

    @property
    def name(self) -> str:
        return redact(
            self._address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "this machine"
        )

    async def look(self, submission_id: str) -> SeenJob | None:
        """Return the job, or None if the cluster does not know it."""
        return await self._ask(lambda server: _seen(server, submission_id))

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        *,
        archive: Path,
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
        cpus: float,
    ) -> bool:
        """Submit a job with the archive's files in its working directory. Return False if a job with this id already exists."""

        def submit(server: JobServer) -> bool:
            try:
                server.submit_job(
                    entrypoint=entrypoint,
                    submission_id=submission_id,
                    runtime_env={**runtime_env, "working_dir": str(archive)},
                    metadata=dict(metadata),
                    entrypoint_num_cpus=cpus,
                )
            except RuntimeError:
                if _seen(server, submission_id) is None:
                    raise
                return False
            return True

        return await self._ask(submit)

    async def logs(self, submission_id: str) -> str | None:
        """Return the job's output, or None if its node or log service is gone."""

        def logs(server: JobServer) -> str | None:
            try:
                return server.get_job_logs(submission_id)
            except RuntimeError:
                return None

        return await self._ask(logs)

    async def stop(self, submission_id: str) -> None:
        """Ask the job to end. Do nothing if the cluster does not know the job, or if it is over."""

        def stop(server: JobServer) -> None:
            try:
                server.stop_job(submission_id)
            except RuntimeError:
                if _seen(server, submission_id) is not None:
                    raise

        await self._ask(stop)

    async def check_reach(self, urls: Sequence[str]) -> None:
        """Check, by their addresses, that every node can reach the swarm servers. `urls` is empty for servers started here.

        Raises: ClusterRefused for servers on loopback if the cluster has other machines; ClusterUnreachable.
        """
        near = [url for url in urls if is_loopback(urlsplit(url).hostname or "")]
        if urls and not near:
            return
        away = sorted({address for address in await self._ask(_node_addresses) if not _is_here(address)})
        if away:
            what = f"{near[0]} is" if near else "the server that this study would start is"
            raise ClusterRefused(
                f"{what} only reachable from this machine, but the Ray cluster at {self.name} has others ({', '.join(away[:3])}"
                f"{', ...' if len(away) > 3 else ''}): start `swarm serve --host 0.0.0.0` with SWARM_ADMIN_TOKEN and SWARM_CLIENT_TOKEN set, and "
                "give --server http://THIS-HOST:8642, an address that those machines can reach"
            )

    async def _ask(self, question: Callable[[JobServer], T]) -> T:
        """Send a request to the job server, and retry until it answers. Raises: ClusterUnreachable; ClusterRefused.

        A request that was sent is always awaited, even under cancellation; otherwise a submitted job could be missed.
        """
        deadline, backoff_s = self.clock.monotonic() + (0.0 if self._given_up else self._patience_s), _FIRST_BACKOFF_S
        while True:
            asking = asyncio.ensure_future(asyncio.to_thread(self._asked, question))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                await asyncio.wait({asking})
                raise
            except (OSError, RuntimeError) as error:
                self._server = None
                left_s = deadline - self.clock.monotonic()
                if left_s <= 0:
                    self._given_up = True
                    raise ClusterUnreachable(self._unreachable(error)) from error
                self._tell(f"the Ray cluster at {self.name} does not answer; trying for {left_s:.0f} s more")
                await self.clock.sleep(min(backoff_s, left_s))
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            else:
                self._given_up = False
                return answer

    def _asked(self, question: Callable[[JobServer], T]) -> T:
        if self._server is None:
            self._server = self._connect(self._address)
        return question(self._server)

    def _unreachable(self, error: Exception) -> str:
        said = _shortened(redact(str(error)))
        return (
            f"the Ray cluster at {self.name} cannot be used: {said}. Is it up (`ray status` on its head), and is that the address of its "
            "job server (http://HOST:8265)?"
        )


def check_installed() -> None:
    """Check that Ray's client is installed, without importing it. Raises: ClusterRefused, with the command that installs it."""
    lacking = [name for name in ("ray", "requests") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ClusterRefused(f"--clients ray needs {' and '.join(lacking)}; install with {INSTALL}")


def check_address(address: str | None, environ: Mapping[str, str]) -> None:
    """Check a job server's address.

    Raises: ClusterRefused when it is invalid, or when Ray's environment variables name another cluster.
    """
    if address is None:
        return
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterRefused(
            f"--clients ray={redact(address)} is not a job server's address: write ray=http://HOST:8265"
        )
    if parts.username or parts.password:
        raise ClusterRefused(
            "--clients: a password in the address would end up in the records; pass the token to Ray in RAY_AUTH_TOKEN"
        )
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if environ.get(name, address).rstrip("/") != address.rstrip("/"):
            raise ClusterRefused(
                f"{name} names another cluster, and Ray prefers it to the address you gave: unset it, or write --clients ray"
            )


def _connected(address: str | None) -> JobServer:
    """Connect to the job server through Ray's own client. Raises: OSError, RuntimeError; ClusterRefused."""
    check_installed()
    from ray.exceptions import AuthenticationError, RayError
    from ray.job_submission import JobSubmissionClient

    class Timed(JobSubmissionClient):  # type: ignore[misc]  # Ray is not typed for us
        """Ray's own client, with a time limit per request instead of waiting forever."""

        def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
            try:
                return super()._do_request(method, endpoint, **{"timeout": _ANSWER_S, **more})
            except AuthenticationError as error:
                raise ClusterRefused(
                    f"the Ray cluster asks for a token: {' '.join(str(error).split())[:300]}"
                ) from error

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they log each archive that is sent
    try:
        server: JobServer = Timed(address)
    except RayError as error:
        raise RuntimeError(_shortened(redact(str(error)))) from error
    return server


def _seen(server: JobServer, submission_id: str) -> SeenJob | None:
    """Look up a job, or return None if the server does not know it. Raises: OSError, RuntimeError when the server cannot say."""
    try:
        found = server.get_job_info(submission_id)
    except RuntimeError:  # no such job, or another failure? the list of jobs decides
        found = next((job for job in server.list_jobs() if job.submission_id == submission_id), None)
    if found is None:
        return None
    status, lost = str(getattr(found.status, "value", found.status)), ""
    if status == "FAILED" and found.driver_exit_code is None and found.error_type != _OWN_END:
        lost = _shortened(redact(f"{found.error_type or ''} {found.message or ''}")) or "Ray does not say why"
    return SeenJob(
        status=status,
        exit_code=found.driver_exit_code,
        lost=lost,
        message=found.message or "",
        metadata=found.metadata or {},
    )


def _shortened(text: str) -> str:
    """Join a text into one line. If it is long, keep its beginning and its end, where a traceback has its error."""
    line = " ".join(text.split())
    return line if len(line) <= 2 * _END else f"{line[:_END]} ... {line[-_END:]}"


def _node_addresses(server: JobServer) -> list[str]:
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException

    try:
        found = list_nodes(address=server.get_address(), filters=[("state", "=", "ALIVE")], timeout=int(_ANSWER_S))
    except RayStateApiException as error:
        raise RuntimeError(str(error)) from error
    return [str(node.node_ip) for node in found]


def _is_here(address: str) -> bool:
    """Return whether an address belongs to this machine: only then can a socket bind to it."""
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
            probe.bind(family[4])
    except OSError:
        return False
    return True
