"""The driver: a process that holds the Ray cluster's ranks and replicas, and carries out requests of the control process.

    python -m swarm.engine.verl.driver_process --settings JSON --fingerprint SHA256 --socket FD

Requests come through a socket. Errors that it cannot report end it, and so does the death of a rank or a replica: the control
process sees the socket close and restarts the driver. The driver's log has the reason.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from foundation import logs
from foundation.clock import SystemClock
from swarm.engine.seam import EngineError
from swarm.engine.training.channel import READY, Place, Publish, Reply, Request, Resume, frame, received
from swarm.engine.verl.settings import HUNG_STATUS, LOOK_EVERY_S, VerlSettings

if TYPE_CHECKING:
    from swarm.engine.verl.cluster import Cluster

_LOG = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Answer requests until the socket is closed."""
    parser = argparse.ArgumentParser(prog="swarm.engine.verl.driver_process", allow_abbrev=False)
    parser.add_argument("--settings", type=VerlSettings.model_validate_json, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of a connected stream socket")
    args = parser.parse_args(argv)
    logs.configure()
    with socket.socket(fileno=args.socket) as connection:
        return _serve(args.settings, args.fingerprint, connection)


def _serve(settings: VerlSettings, fingerprint: str, connection: socket.socket) -> int:
    import ray

    from swarm.engine.verl.cluster import Cluster, ClusterHung, ClusterLost
    from swarm.engine.verl.session import VerlSession

    try:
        cluster = Cluster(settings)
        cluster.start()
        session = VerlSession(cluster, fingerprint, SystemClock(), pad_token=_pad_token(settings))
        places = [Place(address=at, key=key) for at, key in zip(cluster.addresses, cluster.keys(), strict=True)]
        connection.sendall(frame(Reply(number=READY, places=places, device=cluster.device)))
        while (request := _next_request(connection, cluster)) is not None:
            with _replicas_watched(cluster, request):
                reply = session.answer(request)
            connection.sendall(frame(reply))
    except ClusterHung as error:
        _end_hung(error)
    except (EngineError, ClusterLost) as error:
        _LOG.error("%s", error)
        return 1
    finally:
        ray.shutdown()
    return 0


def _next_request(connection: socket.socket, cluster: Cluster) -> Request | None:
    """Return the next request; None if the other side is gone. While waiting, check that all ranks and replicas are alive.

    Raises: ClusterLost.
    """
    while not select.select([connection], [], [], LOOK_EVERY_S)[0]:
        _look(cluster.check)
    return received(connection)


def _look(check: Callable[[], None]) -> None:
    """Run the check. If a rank or replica does not answer, end this process immediately. Raises: ClusterLost."""
    from swarm.engine.verl.cluster import ClusterHung

    try:
        check()
    except ClusterHung as error:
        _end_hung(error)


def _end_hung(error: Exception) -> NoReturn:
    _LOG.error("%s", error)
    os._exit(HUNG_STATUS)


@contextmanager
def _replicas_watched(cluster: Cluster, request: Request) -> Iterator[None]:
    """Check that replicas are alive while the ranks work, because replicas continue to sample. A change of weights has its own
    limit."""
    if isinstance(request.command, Publish | Resume):
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            _look(cluster.check_replicas)

    watching = threading.Thread(target=watch, name="replicas", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _pad_token(settings: VerlSettings) -> int:
    """Return the model's padding token. If it names none, any token will do, because attention never looks at padding."""
    config = json.loads((settings.model_dir / "config.json").read_bytes())
    return max(0, int(config.get("pad_token_id") or 0))  # some models say -1 for none


if __name__ == "__main__":
    sys.exit(main())
