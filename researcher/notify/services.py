"""Notification services: a study file names them, and environment variables hold their addresses.

An address is a secret. Nothing here prints, logs, stores or raises it; apprise's own log lines, which may contain it, are
discarded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from researcher.executor.processes import NOTIFY_PREFIX
from researcher.models import Notice, NoticeKind
from researcher.refusals import SpecRefused

_STATUS = re.compile(r"\berror=(\d{3})\b")


class NotSent(Exception):
    """Raised when the service did not accept the notice. The text is our own and does not contain the address."""


class Notifier(Protocol):
    """One service. `send` blocks for a few seconds at most and may be called from any thread."""

    def send(self, notice: Notice) -> None:
        """Send the notice. Raises only NotSent."""


class AppriseNotifier:
    """A service with an apprise URL.

    Raises: ValueError for a URL that apprise does not know; the text does not quote the URL.
    """

    def __init__(self, url: str) -> None:
        import apprise  # takes longer to import than most commands take

        _hush()
        asset = apprise.AppriseAsset(app_id="researcher", async_mode=False, storage_mode="memory")
        self._service = apprise.Apprise(asset=asset)
        if not self._service.add(url) or len(self._service) == 0:
            raise ValueError(
                "apprise does not recognise this URL; its documentation lists the URL format for each service"
            )

    def send(self, notice: Notice) -> None:
        import apprise

        picture = notice.picture if notice.picture is not None and notice.picture.is_file() else None
        _hush()  # again: another library may have reconfigured logging since
        lines: list[str] = []
        try:
            sent = self._service.notify(
                title=notice.title,
                body=notice.body,
                notify_type=apprise.NotifyType(_TYPES[notice.kind]),
                body_format=apprise.NotifyFormat.TEXT,
                attach=None if picture is None else str(picture),
                log_callback=lambda entry, service: lines.append(entry.message),
            )
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and its text may hold the address
            raise NotSent(f"apprise raised {type(error).__name__}") from None
        if not sent:
            raise NotSent(_why(lines))


_TYPES = {
    NoticeKind.GATE: "warning",
    NoticeKind.FAILURE: "failure",
    NoticeKind.STALLED: "warning",
    NoticeKind.CONCLUSION: "success",
    NoticeKind.DIGEST: "info",
    NoticeKind.TEST: "info",
}


def _hush() -> None:
    """Silence apprise's loggers, because their lines may contain the address."""
    log = logging.getLogger("apprise")
    log.handlers[:], log.propagate = [logging.NullHandler()], False


def _why(lines: Iterable[str]) -> str:
    """Say why sending failed. Uses only a status code from apprise's log lines."""
    codes = [found[1] for line in lines if (found := _STATUS.search(line))]
    return (
        f"the service answered with HTTP {codes[-1]}"
        if codes
        else "the service cannot be reached, or it refused the notice"
    )


def variable_of(name: str) -> str:
    return f"{NOTIFY_PREFIX}{name}"


def named(environ: Mapping[str, str]) -> list[str]:
    """List the names of the services whose addresses are set."""
    return sorted(
        key.removeprefix(NOTIFY_PREFIX)
        for key, value in environ.items()
        if key.startswith(NOTIFY_PREFIX) and value.strip()
    )


def notifier_of(name: str, environ: Mapping[str, str]) -> Notifier:
    """Return the service of this name. Raises: SpecRefused if its address is missing or unknown to apprise."""
    variable, url = variable_of(name), environ.get(variable_of(name), "").strip()
    if not url:
        others = named(environ)
        said = f"the address of {name} is not set: set {variable} to its apprise URL (slack://…, mailto://…, json://…)"
        raise SpecRefused("notify", said, others)
    try:
        return AppriseNotifier(url)
    except ValueError as error:
        raise SpecRefused("notify", f"{variable}: {error}") from error


def check_names(names: Iterable[str], environ: Mapping[str, str]) -> None:
    """Check the names before a study starts. Raises: SpecRefused for the first service that cannot be used."""
    for name in names:
        notifier_of(name, environ)
