"""Reads forms sent by browsers: limits their size and checks the page's form token."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import Depends
from starlette.requests import Request

from researcher.serving import Access

_LARGEST_FORM = 65_536
_LONGEST_WORDS = 4_000
_LONG = ("text", "topic")
"""Fields that are not shortened, because the code that reads them has its own limits."""


class FormRefused(Exception):
    """Raised when a form cannot be accepted. The text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _fields(request: Request) -> dict[str, str]:
    """Parse the fields of an urlencoded form; the first of duplicate fields wins. Raises: FormRefused."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise FormRefused(415, "send answers with the page's own forms")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise FormRefused(413, "the form is too long; shorten its text")
    try:
        found = parse_qs(body.decode(), errors="strict", max_num_fields=20)
    except ValueError as error:
        raise FormRefused(400, "the form is not valid; go back and send it again") from error
    return {name: values[0].strip()[: None if name in _LONG else _LONGEST_WORDS] for name, values in found.items()}


Form = Annotated[dict[str, str], Depends(_fields)]


def check(access: Access, request: Request, form: dict[str, str]) -> None:
    """Check the form's token. Raises: FormRefused for a form that does not come from this session's pages."""
    if not access.form_fits(request.state.session, form.get("token", "")):
        raise FormRefused(403, "this form is from an earlier visit; go back, reload the page, and answer again")


def person(form: dict[str, str]) -> str:
    """Return the sender's name. Raises: FormRefused."""
    name = " ".join(form.get("by", "").split())
    if not name:
        raise FormRefused(400, "say who you are: the journal shows your name with the answer")
    return name[:100]


def words(form: dict[str, str], name: str, missing: str) -> str:
    """Return the text of a required field. Raises: FormRefused with `missing` if the field is empty."""
    if not form.get(name):
        raise FormRefused(400, missing)
    return form[name]


def whole(form: dict[str, str], name: str) -> int | None:
    """Parse an integer; None for an empty field. Raises: FormRefused."""
    text = form.get(name, "")
    if text and not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise FormRefused(400, f"{name.replace('_', ' ')} must be a whole number, not {text[:40]!r}")
    return int(text) if text else None


def amount(form: dict[str, str], name: str) -> float | None:
    """Parse a positive number; None for an empty field. Raises: FormRefused."""
    text = form.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = -1.0
    if value is not None and not 0 < value < float("inf"):
        raise FormRefused(400, f"{name.replace('_', ' ')} must be a number above zero, not {text[:40]!r}")
    return value


def local_path(path: str) -> str:
    """Return the path if it stays on this page's site, else the path of the list."""
    safe = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return quote(path) if safe else "/"
