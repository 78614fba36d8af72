"""`swarm top`: servers, live: phase, step, pool, clients, rates, last errors, learning curve. `--once` prints them as text."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from foundation.commandline import UsageError
from swarm.cli import connection

if TYPE_CHECKING:
    from swarm.cli.watch import Watch


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `top` command."""
    parser = subparsers.add_parser("top", help="watch servers: pool, clients, rates, errors, learning curve")
    parser.add_argument("urls", nargs="*", metavar="URL", help="servers (default: --url, SWARM_URL, or this machine's)")
    parser.add_argument("--once", action="store_true", help="print them once, as text or with --json, and end")
    connection.add_options(parser)
    parser.set_defaults(run=watch_servers)


def watch_servers(args: argparse.Namespace) -> int:
    """Until q is pressed. With --once: exit code 1 when a server could not be reached."""
    import asyncio

    urls = [connection.checked(url) for url in args.urls] or [connection.url_of(args)]
    if args.json and not args.once:
        raise UsageError("--json goes with --once")
    if not args.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to draw on; --once prints the state once, as text or with --json")
    return asyncio.run(_once(args, urls) if args.once else _live(args, urls))


async def _once(args: argparse.Namespace, urls: list[str]) -> int:
    import asyncio

    from swarm.cli.watch_text import server_text

    async with AsyncExitStack() as stack:
        views = await asyncio.gather(*(watch.now() for watch in await _watches(args, urls, stack)))
    if args.json:
        print(json.dumps({"servers": [view.model_dump(mode="json") for view in views]}))
    else:
        print("\n\n".join(server_text(view) for view in views))
    return 1 if any(view.error is not None for view in views) else 0


async def _live(args: argparse.Namespace, urls: list[str]) -> int:
    try:
        from swarm.cli.top_app import Top
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        raise UsageError("swarm top needs Textual: pip install 'swarm-researcher[top]'; or print it --once") from error
    async with AsyncExitStack() as stack:
        app = Top(await _watches(args, urls, stack))
        await app.run_async()
    return app.return_code or 0


async def _watches(args: argparse.Namespace, urls: list[str], stack: AsyncExitStack) -> list[Watch]:
    from swarm.cli.watch import Watch
    from swarm.client import Patience, SwarmClient

    token, patience = connection.token_of(args), Patience(connect_s=0.0, later_s=0.0)
    clients = [SwarmClient(url, token, client_id="swarm-top", patience=patience) for url in urls]
    return [Watch(await stack.enter_async_context(client)) for client in clients]
