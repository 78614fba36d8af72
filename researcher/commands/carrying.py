"""`researcher daemon`: carry studies on by themselves."""

from __future__ import annotations

import argparse
import asyncio

from foundation import logs
from researcher.commands import DONE, FAILED
from researcher.commands.home import open_home, say, say_json
from researcher.schedule.daemon import carry, only_daemon

_GLANCE_S = 0.5
"""Whoever asks whether a daemon lives holds its lock for a moment."""
_HANDOVER_S = 5.0
"""How long a daemon that was started for a study waits for one that may just be ending."""


def daemon_command(args: argparse.Namespace) -> int:
    """Run until it is ended, or no study is left in its care."""
    logs.configure("WARNING")
    open_home().store.close()
    with only_daemon(_HANDOVER_S if args.until_idle else _GLANCE_S) as alone:
        if not alone:
            text = "a daemon carries the studies of this data directory and database already"
            say_json({"carries": False, "reason": text}) if args.json else say(text)
            return DONE if args.until_idle else FAILED
        asyncio.run(carry(until_idle=args.until_idle))
    if args.json:
        say_json({"carries": False, "reason": "no study is left to carry on"})
    return DONE
