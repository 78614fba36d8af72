"""Renders templates to responses with a common layout and with ETags for polling browsers."""

from __future__ import annotations

import getpass
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from foundation.logs import redact
from researcher.describe import known_text, when
from researcher.serving import Access
from researcher.store.errors import NotFound

_TEMPLATES = Path(__file__).parent / "templates"
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"
"""Content security policy of the report, which is self-contained: inline style, no scripts, no origin."""


class Renderer:
    """Renders the page's templates."""

    def __init__(self) -> None:
        self._templates = _templates()

    def page(self, request: Request, template: str, *, status: int = 200, **fields: Any) -> Response:
        """Render a page. Equal content has an equal ETag, so that polling browsers receive only a few bytes."""
        text = self._templates.get_template(f"{template}.html.jinja").render(**fields)
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:24]}"'
        if status == 200 and request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return HTMLResponse(text, status, headers={"etag": tag} if status == 200 else None)

    def message(self, request: Request, status: int, text: str, back: tuple[str, str]) -> Response:
        """Render a page with one sentence. `back` is the path and text of the link back."""
        return self.page(request, "message", status=status, text=redact(text), back=back[0], place=back[1])


def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"when": when, "t": redact, "sentence": _sentence, "known": known_text}
    made.globals["drawing"] = Markup
    return made


def _sentence(text: str) -> Markup:
    """Render one of our sentences as HTML, without secrets. Text between backticks becomes code."""
    parts = redact(text).split("`")
    whole = len(parts) % 2 == 1
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if whole and number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


def default_person(access: Access) -> str:
    """Return the default of the name field: the user account if only browsers on this machine have access, else empty."""
    return getpass.getuser() if access.local else ""


def report_file(folder: Path, missing: str) -> Response:
    """Serve the report as it was written: one self-contained file. Raises: NotFound with `missing`."""
    file = folder / "report.html"
    if not file.is_file():
        raise NotFound(missing)
    return FileResponse(file, headers={"content-security-policy": _REPORT_POLICY, "cache-control": "no-store"})
