"""`researcher mcp`: offers the commands as tools to coding agents, over standard input and output or over HTTP."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
from pathlib import Path

from foundation import logs
from foundation.commandline import UsageError
from researcher.cli import DONE
from researcher.cli.drafting import TextDrafting
from researcher.home import open_home
from researcher.mcp.server import create_server
from researcher.mcp.tools import Research
from researcher.mcp.transports import PATH, http_app, serve_stdio
from researcher.serving import MCP_TOKEN, Access, listening, load_token, serve

_OF_HTTP = ("host", "port", "token_file", "public_url")
_HOST, _PORT = "127.0.0.1", 8644


def mcp_command(args: argparse.Namespace) -> int:
    """Serve until the agent disconnects or, over HTTP, until interrupted."""
    given = [f"--{name.replace('_', '-')}" for name in _OF_HTTP if getattr(args, name) is not None]
    given += ["--json"] if args.json else []
    if given and not args.http:
        raise UsageError(f"{', '.join(given)} only works with --http; add --http, or leave this out")
    logs.configure("WARNING")
    home = open_home()
    drafting = TextDrafting(home, folder=None if args.http else Path.cwd())
    research = Research(home, drafting, args.limit, f"{getpass.getuser()} through MCP")
    try:
        if args.http:
            _over_http(research, args)
        else:
            if sys.stdin.isatty():
                sys.stderr.write(
                    "an agent starts this command and talks to it over stdin and stdout; remote agents need --http. Ctrl-C ends it\n"
                )
            serve_stdio(create_server(research))
    finally:
        research.closing.set()
    return DONE


def _over_http(research: Research, args: argparse.Namespace) -> None:
    token = load_token(os.environ, args.token_file, MCP_TOKEN)
    host, port = args.host or _HOST, _PORT if args.port is None else args.port
    with listening(host, port) as listener:
        public_url = args.public_url and args.public_url.rstrip("/")
        access = Access(
            host=host, port=listener.getsockname()[1], token=token, public_url=public_url, variable=MCP_TOKEN
        )
        app = http_app(create_server(research), access)
        serve(app, listener, lambda: _show(f"{access.url}{PATH}", as_json=args.json))


def _show(url: str, *, as_json: bool) -> None:
    sys.stdout.write((json.dumps({"url": url}) if as_json else url) + "\n")
    sys.stdout.flush()
