"""The page's routes: decode, call, encode. `sheets.py` provides the content, `access.py` the access control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from foundation.commandline import UsageError
from researcher.gates import Amendment, amend, answer_gate
from researcher.home import Home
from researcher.models import Answer
from researcher.refusals import PlanningRefused
from researcher.serving import Access
from researcher.store.errors import Ambiguous, LeaseHeld, NotFound, StoreError, WrongState
from researcher.web.access import Guard, session_cookie
from researcher.web.campaign_pages import CampaignPages, campaign_at
from researcher.web.campaigns import CampaignSheets
from researcher.web.drafting import CAMPAIGN, STUDY, Drafting, DraftPages
from researcher.web.forms import Form, FormRefused, check, local_path, person, whole, words
from researcher.web.rendering import Renderer, default_person, report_file
from researcher.web.servers import Ask, ServerPages
from researcher.web.sheets import Sheets
from researcher.web.tracking import Tracking

_HERE = Path(__file__).parent


class Pages:
    """Handlers of the routes."""

    def __init__(self, home: Home, access: Access, sheets: Sheets, tracking: Tracking, renderer: Renderer) -> None:
        self._home = home
        self._access = access
        self._sheets = sheets
        self._tracking = tracking
        self._page = renderer.page
        self._message = renderer.message

    # -- reading ------------------------------------------------------------------------------------------------------

    def studies(self, request: Request, page: Annotated[int, Query(ge=1)] = 1) -> Response:
        """Show the list of studies."""
        return self._page(request, "studies", sheet=self._sheets.studies(page))

    def study(self, request: Request, reference: str) -> Response:
        """Show one study, given its id, a prefix of its id, or `latest`."""
        study_id = self._home.store.studies.resolve(reference)
        if study_id != reference:
            return RedirectResponse(f"/studies/{study_id}", 307)
        fields: dict[str, Any] = {
            "sheet": self._sheets.study(study_id),
            "person": default_person(self._access),
        }
        return self._page(request, "study", token=self._access.form_token(request.state.session), **fields)

    def report(self, reference: str) -> Response:
        """Serve the report as it was written: one self-contained file."""
        study_id = self._home.store.studies.resolve(reference)
        missing = f"{study_id} has no report yet; one is written every night and when the study ends"
        return report_file(self._home.studies / study_id, missing)

    def mlflow(self, request: Request, reference: str, trial: str | None = None) -> Response:
        """Redirect to MLflow's page of the study or a trial. While MLflow starts, show a page that reloads itself."""
        study_id = self._home.store.studies.resolve(reference)
        if trial is not None:
            self._home.store.trials.get(study_id, trial)
        link = self._tracking.link(study_id, trial)
        if link.url is not None:
            return RedirectResponse(link.url, 303)
        if link.starting:
            text = "MLflow is starting; this page will open it automatically."
            answer = self._message(request, 202, text, _study_at(study_id))
            answer.headers["refresh"] = "2"
            return answer
        return self._message(request, 503, link.reason, _study_at(study_id))

    # -- deciding -----------------------------------------------------------------------------------------------------

    def answer(self, request: Request, reference: str, form: Form) -> Response:
        """Approve or reject the gate that the form names."""
        check(self._access, request, form)
        study_id = self._home.store.studies.resolve(reference)
        verdict, said = form.get("verdict", ""), form.get("words", "")
        if verdict not in ("approve", "reject"):
            raise FormRefused(400, "the answer must be approve or reject")
        if verdict == "reject" and not said:
            raise FormRefused(400, "say why it is rejected, for later readers of the study")
        answer = Answer(verdict=verdict, words=said, by=person(form))
        answer_gate(self._home.store, study_id, answer, gate=form.get("gate", ""))
        return self._changed(study_id)

    def amend(self, request: Request, reference: str, form: Form) -> Response:
        """Make a new version of a plan whose trials have not begun."""
        check(self._access, request, form)
        study_id = self._home.store.studies.resolve(reference)
        because = words(form, "because", "say why the plan is amended: the journal and the report show the reason")
        change, by = _amendment(form), person(form)
        amend(self._home.store, study_id, change, because=because, by=by, version=whole(form, "version"))
        return self._changed(study_id)

    def ask_token(self, request: Request) -> Response:
        """Show the page that asks for the token."""
        return self._page(request, "login", next=local_path(request.query_params.get("next", "/")), wrong=False)

    def take_token(self, request: Request, form: Form) -> Response:
        """Check the token and start a session."""
        onward = local_path(form.get("next", "/"))
        if not self._access.knows(form.get("password", "")):
            return self._page(request, "login", status=403, next=onward, wrong=True)
        answer = RedirectResponse(onward, 303)
        answer.headers.append("set-cookie", session_cookie(self._access, self._access.new_session()))
        return answer

    # -- errors -------------------------------------------------------------------------------------------------------

    def refused(self, request: Request, error: Exception) -> Response:
        """Show a refusal as a page that says what to do, with a link back."""
        back = _back(request)
        if isinstance(error, HTTPException):
            return self._message(request, error.status_code, str(error.detail), back)
        if isinstance(error, RequestValidationError):
            return self._message(request, 422, "this address is invalid; start from the list of studies", _LIST)
        if isinstance(error, FormRefused):
            return self._message(request, error.status, str(error), back)
        if isinstance(error, UsageError):
            return self._message(request, 400, str(error), back)
        if isinstance(error, NotFound | Ambiguous):
            return self._message(request, 404, str(error), _LIST)
        conflict = isinstance(error, WrongState | LeaseHeld | PlanningRefused)
        return self._message(request, 409 if conflict else 503, str(error), back)

    def _changed(self, study_id: str) -> Response:
        self._sheets.forget(study_id)
        return RedirectResponse(f"/studies/{study_id}", 303)


def _study_at(reference: str) -> tuple[str, str]:
    return f"/studies/{quote(reference)}", "the study"


_LIST = ("/", "the list of studies")


def _back(request: Request) -> tuple[str, str]:
    """Return the link back from a refused address: path and text."""
    reference = request.path_params.get("reference")
    if request.url.path.startswith(STUDY.path):
        return (CAMPAIGN if request.url.path.startswith(CAMPAIGN.path) else STUDY).form
    if request.url.path.startswith("/campaigns"):
        return ("/campaigns", "the list of campaigns") if reference is None else campaign_at(reference)
    return _LIST if reference is None else _study_at(reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Services that the page depends on.

    `ensure_daemon` starts the daemon unless it runs. `drafting` and `goals` draft and start studies and campaigns. `ask` asks
    servers for their status.
    """

    ensure_daemon: Callable[[], None]
    drafting: Drafting
    goals: Drafting
    ask: Ask


def create_app(home: Home, access: Access, sheets: Sheets, tracking: Tracking, services: Services) -> Guard:
    """Build the application, wrapped in its guard."""
    renderer = Renderer()
    pages = Pages(home, access, sheets, tracking, renderer)
    campaigns = CampaignPages(home, access, CampaignSheets(home, sheets), renderer, services.ensure_daemon)
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
    app.add_api_route("/servers", ServerPages(home, sheets, renderer, services.ask).servers, **get)
    campaigns.add_routes(app)
    DraftPages(access, STUDY, services.drafting, renderer).add_routes(app)
    DraftPages(access, CAMPAIGN, services.goals, renderer).add_routes(app)
    app.mount("/static", StaticFiles(directory=_HERE / "static"))
    for kind in (StoreError, PlanningRefused, UsageError, FormRefused, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, pages.refused)
    return Guard(app, access)


def _amendment(form: dict[str, str]) -> Amendment:
    minutes = whole(form, "minutes")
    try:
        return Amendment(seeds=whole(form, "seeds"), wall_s=None if minutes is None else 60.0 * minutes)
    except ValueError as error:
        raise FormRefused(400, str(error)) from error
