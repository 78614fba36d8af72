"""What asyncio's futures lack."""

from __future__ import annotations

import asyncio
from typing import Any


def take_exception(future: asyncio.Future[Any]) -> None:
    """As its done callback: a future that nobody waits for any more does not complain of its failure."""
    if not future.cancelled():
        future.exception()
