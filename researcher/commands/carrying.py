"""`researcher daemon`: carry studies on by themselves."""

from __future__ import annotations

import argparse
import asyncio

from foundation import logs
from researcher.commands import DONE, FAILED
from researcher.commands.home import open_home, say
from researcher.schedule.daemon import carry, only_daemon


def daemon_command(args: argparse.Namespace) -> int:
    """Run until it is ended, or no study is left in its care."""
    logs.configure("WARNING")
    open_home().store.close()
    with only_daemon() as alone:
        if not alone:
            say("a daemon carries the studies of this data directory already")
            return DONE if args.until_idle else FAILED
        asyncio.run(carry(until_idle=args.until_idle))
    return DONE
