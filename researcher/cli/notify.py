"""`researcher notify`: send a test notice."""

from __future__ import annotations

import argparse
import os

from foundation.clock import SystemClock
from researcher.cli import FAILED, answer
from researcher.models import Notice, NoticeKind
from researcher.notify.services import NotSent, notifier_of


def notify_command(args: argparse.Namespace) -> int:
    """Send a test notice to one service, or say why the service did not accept it."""
    notifier = notifier_of(args.name, os.environ)
    notice = Notice(
        kind=NoticeKind.TEST,
        subject_id="test",
        key=f"test/{SystemClock().now():.0f}",
        title="A test of researcher",
        body=f"Studies with `notify: [{args.name}]` will send their notices here.",
    )
    try:
        notifier.send(notice)
    except NotSent as error:
        answer(
            args.json, {"service": args.name, "sent": False, "reason": str(error)}, f"{args.name}: not sent: {error}"
        )
        return FAILED
    return answer(args.json, {"service": args.name, "sent": True}, f"{args.name}: sent")
