"""The page's routes: decode, call, encode. What is shown is `sheets.py`'s to say, who may ask `access.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import hashlib
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

import uvicorn
from fastapi import Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from foundation.commandline import UsageError
from foundation.event_loop import on_stop_signals
from foundation.logs import redact
from researcher.describe import known_text, when
from researcher.gates import Amendment, amend, answer_gate
from researcher.home import Home
from researcher.models import Answer
from researcher.refusals import PlanningRefused
from researcher.store.errors import Ambiguous, LeaseHeld, NotFound, StoreError, WrongState
from researcher.web.access import Access, Guard, session_cookie
from researcher.web.sheets import Sheets
from researcher.web.tracking import Tracking

_HERE = Path(__file__).parent
_LARGEST_FORM = 65_536
_LONGEST_WORDS = 4_000
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"
"""The report is a document of its own with its style inside; it runs no script and belongs to no origin."""


class FormRefused(Exception):
    """A form that cannot be taken; the text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pages:
    """Everything that the routes call."""

    def __init__(self, home: Home, access: Access, sheets: Sheets, tracking: Tracking) -> None:
        self._home = home
        self._access = access
        self._sheets = sheets
        self._tracking = tracking
        self._templates = _templates()

    # -- to look at ---------------------------------------------------------------------------------------------------

    def studies(self, request: Request, page: Annotated[int, Query(ge=1)] = 1) -> Response:
        """The list."""
        return self._page(request, "studies", sheet=self._sheets.studies(page))

    def study(self, request: Request, reference: str) -> Response:
        """One study, by its id, the beginning of it, or `latest`."""
        study_id = self._home.store.studies.resolve(reference)
        if study_id != reference:
            return RedirectResponse(f"/studies/{study_id}", 307)
        fields: dict[str, Any] = {
            "sheet": self._sheets.study(study_id),
            "person": getpass.getuser() if self._access.local else "",
        }
        return self._page(request, "study", token=self._access.form_token(request.state.session), **fields)

    def report(self, reference: str) -> Response:
        """The report as it was written: one file that needs nothing else."""
        study_id = self._home.store.studies.resolve(reference)
        file = self._home.studies / study_id / "report.html"
        if not file.is_file():
            raise NotFound(f"{study_id} has no report yet; it is written when the study ends, and every night before")
        return FileResponse(file, headers={"content-security-policy": _REPORT_POLICY, "cache-control": "no-store"})

    def mlflow(self, request: Request, reference: str, trial: str | None = None) -> Response:
        """Redirect to MLflow's page of the study or a trial; while it starts, a page that reloads itself."""
        study_id = self._home.store.studies.resolve(reference)
        if trial is not None:
            self._home.store.trials.get(study_id, trial)
        link = self._tracking.link(study_id, trial)
        if link.url is not None:
            return RedirectResponse(link.url, 303)
        if link.starting:
            answer = self._told(request, 202, "MLflow is starting; this page goes on to it by itself.", study_id)
            answer.headers["refresh"] = "2"
            return answer
        return self._told(request, 503, link.reason, study_id)

    # -- to decide ----------------------------------------------------------------------------------------------------

    def answer(self, request: Request, reference: str, form: Form) -> Response:
        """Approve or reject at the gate that the form names."""
        self._check(request, form)
        study_id = self._home.store.studies.resolve(reference)
        verdict, words = form.get("verdict", ""), form.get("words", "")
        if verdict not in ("approve", "reject"):
            raise FormRefused(400, "the answer is approve or reject")
        if verdict == "reject" and not words:
            raise FormRefused(400, "say why it is rejected, for later readers of the study")
        answer = Answer(verdict=verdict, words=words, by=_person(form))
        answer_gate(self._home.store, study_id, answer, gate=form.get("gate", ""))
        return self._changed(study_id)

    def amend(self, request: Request, reference: str, form: Form) -> Response:
        """A new version of a plan that has not begun."""
        self._check(request, form)
        study_id = self._home.store.studies.resolve(reference)
        if not form.get("because"):
            raise FormRefused(400, "say why the plan is amended: the reason stands in the journal and the report")
        change, by = _amendment(form), _person(form)
        version = _whole(form, "version")
        amend(self._home.store, study_id, change, because=form["because"], by=by, version=version)
        return self._changed(study_id)

    def ask_token(self, request: Request) -> Response:
        """The page that asks for the token."""
        return self._page(request, "login", next=_local_path(request.query_params.get("next", "/")), wrong=False)

    def take_token(self, request: Request, form: Form) -> Response:
        """Start a session with the right token."""
        onward = _local_path(form.get("next", "/"))
        if not self._access.knows(form.get("password", "")):
            return self._page(request, "login", status=403, next=onward, wrong=True)
        answer = RedirectResponse(onward, 303)
        answer.headers.append("set-cookie", session_cookie(self._access, self._access.new_session()))
        return answer

    # -- errors -------------------------------------------------------------------------------------------------------

    def refused(self, request: Request, error: Exception) -> Response:
        """A refusal as a page that says what to do, with the way back."""
        reference = request.path_params.get("reference")
        if isinstance(error, HTTPException):
            return self._told(request, error.status_code, str(error.detail), reference)
        if isinstance(error, RequestValidationError):
            return self._told(request, 422, "this address cannot be read; begin at the list of studies")
        if isinstance(error, FormRefused):
            return self._told(request, error.status, str(error), reference)
        missing = isinstance(error, NotFound | Ambiguous)
        conflict = isinstance(error, WrongState | LeaseHeld | PlanningRefused)
        if missing:
            reference = None
        return self._told(request, 404 if missing else 409 if conflict else 503, str(error), reference)

    def _told(self, request: Request, status: int, text: str, study_id: str | None = None) -> Response:
        back = "/" if study_id is None else f"/studies/{quote(study_id)}"
        return self._page(request, "message", status=status, text=redact(text), back=back)

    def _changed(self, study_id: str) -> Response:
        self._sheets.forget(study_id)
        return RedirectResponse(f"/studies/{study_id}", 303)

    def _check(self, request: Request, form: Form) -> None:
        if not self._access.form_fits(request.state.session, form.get("token", "")):
            raise FormRefused(403, "this form is from an earlier visit; go back, reload the page, and answer again")

    def _page(self, request: Request, template: str, *, status: int = 200, **fields: Any) -> Response:
        """Equal content has an equal ETag, so that polling browsers get a few bytes."""
        text = self._templates.get_template(f"{template}.html.jinja").render(**fields)
        tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:24]}"'
        if status == 200 and request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return HTMLResponse(text, status, headers={"etag": tag} if status == 200 else None)


async def _fields(request: Request) -> dict[str, str]:
    """An urlencoded form; of fields that come twice the first one. Raises: FormRefused."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise FormRefused(415, "answers come from the page's own forms")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise FormRefused(413, "that is too long; say it in fewer words")
    try:
        found = parse_qs(body.decode(), errors="strict", max_num_fields=20)
    except ValueError as error:
        raise FormRefused(400, "the form cannot be read; go back and send it again") from error
    return {name: values[0].strip()[:_LONGEST_WORDS] for name, values in found.items()}


Form = Annotated[dict[str, str], Depends(_fields)]


def create_app(home: Home, access: Access, sheets: Sheets, tracking: Tracking) -> Guard:
    """The application behind its guard."""
    pages = Pages(home, access, sheets, tracking)
    app = FastAPI(title="Researcher", docs_url=None, redoc_url=None, openapi_url=None)
    get: dict[str, Any] = {"methods": ["GET"], "response_model": None}
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
    app.add_api_route("/", pages.studies, **get)
    app.add_api_route("/login", pages.ask_token, **get)
    app.add_api_route("/login", pages.take_token, **post)
    app.add_api_route("/studies/{reference}", pages.study, **get)
    app.add_api_route("/studies/{reference}/report", pages.report, **get)
    app.add_api_route("/studies/{reference}/mlflow", pages.mlflow, **get)
    app.add_api_route("/studies/{reference}/answer", pages.answer, **post)
    app.add_api_route("/studies/{reference}/amend", pages.amend, **post)
    app.mount("/static", StaticFiles(directory=_HERE / "static"))
    for kind in (StoreError, PlanningRefused, FormRefused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, pages.refused)
    return Guard(app, access)


def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"when": when, "t": redact, "sentence": _sentence, "known": known_text}
    made.globals["drawing"] = Markup
    return made


def _sentence(text: str) -> Markup:
    """A sentence of ours, without secrets; what stands between backticks as code."""
    parts = redact(text).split("`")
    whole = len(parts) % 2 == 1
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if whole and number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


def _person(form: dict[str, str]) -> str:
    name = " ".join(form.get("by", "").split())
    if not name:
        raise FormRefused(400, "say who you are: the answer stands in the journal with your name")
    return name[:100]


def _amendment(form: dict[str, str]) -> Amendment:
    minutes = _whole(form, "minutes")
    try:
        return Amendment(seeds=_whole(form, "seeds"), wall_s=None if minutes is None else 60.0 * minutes)
    except ValueError as error:
        raise FormRefused(400, str(error)) from error


def _whole(form: dict[str, str], name: str) -> int | None:
    """None for an empty field."""
    text = form.get(name, "")
    if text and not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise FormRefused(400, f"{name} is a whole number, not {text[:40]!r}")
    return int(text) if text else None


def _local_path(path: str) -> str:
    """A path of this page; anything that could lead elsewhere is the list."""
    safe = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return quote(path) if safe else "/"


_STOP_LIMIT_S = 5


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens there; port 0 takes a free one. Raises: UsageError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by its number: where it is left out, asyncio leaves TCP's delay on, and an answer takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for any"
            ) from error
        yield listener


def serve(app: ASGIApp, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM. ready: called once it answers."""
    asyncio.run(_Server(app, ready).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """uvicorn that ends without dying of the signal it handled."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_LIMIT_S,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with on_stop_signals(self._stop):
            yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # asked twice: do not wait for answers under way
        self.should_exit = True
