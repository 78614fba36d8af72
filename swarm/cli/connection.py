"""Which server a command talks to, and how patiently. Tokens come from the environment or a file, never as arguments."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.commandline import UsageError

if TYPE_CHECKING:
    from swarm.client.sync import SwarmClient

DEFAULT_URL = "http://127.0.0.1:8642"


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--url`, `--token-file`, `--json`."""
    parser.add_argument("--url", help=f"the server (default: SWARM_URL, else {DEFAULT_URL})")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the server's token (default: SWARM_TOKEN, if set)"
    )
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def url_of(args: argparse.Namespace) -> str:
    """Raises: UsageError where it is no url."""
    return checked(args.url or os.environ.get("SWARM_URL") or DEFAULT_URL)


def checked(url: str) -> str:
    """Raises: UsageError where it is no url."""
    from swarm.client.errors import NotASwarmServer
    from swarm.client.wire import checked_url

    try:
        return checked_url(url)
    except NotASwarmServer as error:
        raise UsageError(str(error)) from error


def token_of(args: argparse.Namespace) -> str | None:
    """Raises: UsageError when the token file cannot be read, or what it holds is no token."""
    from swarm.client.wire import checked_token

    if args.token_file is None:
        token, place = os.environ.get("SWARM_TOKEN") or None, "SWARM_TOKEN"
    else:
        place = f"the token file {args.token_file}"
        try:
            token = Path(args.token_file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise UsageError(f"cannot read {place}: {error.strerror}") from error
    try:
        return checked_token(token)
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error


def connect(
    args: argparse.Namespace,
    *,
    client_id: str | None = None,
    client_version: str = "0",
    connect_s: float = 0.0,
    later_s: float = 0.0,
) -> SwarmClient:
    """A client that says at once when nobody answers. later_s: how long to wait for a server that is not ready; connect_s:
    for one that answered before, and may be starting again."""
    from swarm.client.sync import SwarmClient
    from swarm.client.wire import Patience

    patience = Patience(connect_s=connect_s, later_s=later_s)
    return SwarmClient(
        url_of(args), token_of(args), client_id=client_id, client_version=client_version, patience=patience
    )
