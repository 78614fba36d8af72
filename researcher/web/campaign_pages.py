"""Routes of the campaigns: decode, call, encode. `researcher.campaign.people` carries out what people ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from researcher.campaign import people
from researcher.campaign.report import short
from researcher.home import Home
from researcher.orphans import halt_newest
from researcher.ownership import owned_at_rest, owned_now
from researcher.refusals import SpecRefused
from researcher.serving import Access
from researcher.study.file import read_study_text
from researcher.web.campaigns import CampaignSheets
from researcher.web.forms import Form, FormRefused, amount, check, person, whole, words
from researcher.web.rendering import Renderer, default_person, report_file

_MINUTE_S = 60.0


def campaign_at(reference: str) -> tuple[str, str]:
    """Return the link back to a campaign's page: path and text."""
    return f"/campaigns/{quote(reference)}", "the campaign"


class CampaignPages:
    """Handlers of the campaigns' routes. `ensure_daemon` starts the daemon unless it runs."""

    def __init__(
        self, home: Home, access: Access, sheets: CampaignSheets, renderer: Renderer, ensure_daemon: Callable[[], None]
    ) -> None:
        self._home = home
        self._access = access
        self._sheets = sheets
        self._page = renderer.page
        self._ensure_daemon = ensure_daemon

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes under /campaigns."""
        get: dict[str, Any] = {"methods": ["GET"], "response_model": None}
        post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
        one = "/campaigns/{reference}"
        app.add_api_route("/campaigns", self.campaigns, **get)
        app.add_api_route(one, self.campaign, **get)
        app.add_api_route(f"{one}/report", self.report, **get)
        app.add_api_route(f"{one}/tell", self.tell, **post)
        app.add_api_route(f"{one}/study", self.study, **post)
        app.add_api_route(f"{one}/answer", self.answer, **post)
        app.add_api_route(f"{one}/amend", self.amend, **post)
        app.add_api_route(f"{one}/carry", self.carry, **post)

    # -- reading ------------------------------------------------------------------------------------------------------

    def campaigns(self, request: Request) -> Response:
        """Show the list of campaigns."""
        return self._page(request, "campaigns", campaigns=self._sheets.campaigns())

    def campaign(self, request: Request, reference: str) -> Response:
        """Show one campaign, given its id, a prefix of its id, or `latest`."""
        campaign_id = self._home.store.campaigns.resolve(reference)
        if campaign_id != reference:
            return RedirectResponse(f"/campaigns/{campaign_id}", 307)
        sheet = self._sheets.campaign(campaign_id)
        return self._page(
            request,
            "campaign",
            sheet=sheet,
            short=short,
            person=default_person(self._access),
            token=self._access.form_token(request.state.session),
        )

    def report(self, reference: str) -> Response:
        """Serve the report as it was written."""
        campaign_id = self._home.store.campaigns.resolve(reference)
        folder = self._home.studies / campaign_id
        return report_file(
            folder, f"{campaign_id} has no report yet; it will be written when the first study has ended"
        )

    # -- deciding -----------------------------------------------------------------------------------------------------

    def tell(self, request: Request, reference: str, form: Form) -> Response:
        """Leave a message for the next decision, and update the list of factors to keep fixed."""
        campaign_id = self._asked(request, reference, form)
        said = words(form, "words", "write a message: the next decision quotes it")
        leave: list[str] | None = people.names_in(form.get("leave", ""))
        if leave == people.names_in(form.get("left_alone", "")):
            leave = None  # the form did not change the list, so keep what others may have changed since
        try:
            people.tell(self._home.store, campaign_id, said, person(form), leave=leave)
        except SpecRefused as error:
            raise FormRefused(400, str(error)) from error
        return self._changed(campaign_id)

    def study(self, request: Request, reference: str, form: Form) -> Response:
        """Request a study."""
        campaign_id = self._asked(request, reference, form)
        text = words(form, "text", "write in YAML what to compare: compare: {FACTOR: {levels: [A, B]}}")
        said = words(form, "words", "say what you expect of the study: this becomes its hypothesis")
        spec, lines = read_study_text(text.replace("\r\n", "\n") + "\n", self._home.root)
        try:
            people.request_study(self._home.store, campaign_id, spec, said, person(form))
        except SpecRefused as error:
            raise FormRefused(400, lines.located(error)) from error
        return self._changed(campaign_id)

    def answer(self, request: Request, reference: str, form: Form) -> Response:
        """Approve the waiting study, or veto the waiting or running one. The form names the study's decision."""
        campaign_id = self._asked(request, reference, form)
        verdict, said, by = form.get("verdict", ""), form.get("words", ""), person(form)
        if verdict not in ("approve", "veto"):
            raise FormRefused(400, "the answer must be approve or veto")
        if verdict == "veto" and not said:
            raise FormRefused(400, "say why you veto it: the next decision reads the reason")
        decision = whole(form, "decision")
        if decision is None:
            raise FormRefused(400, "the form has no decision number; reload the page")
        if verdict == "veto":
            people.veto(self._home.store, campaign_id, said, by, decision=decision)
        else:
            people.approve(self._home.store, campaign_id, said, by, decision=decision)
        return self._changed(campaign_id)

    def amend(self, request: Request, reference: str, form: Form) -> Response:
        """Change the limits of the budget."""
        campaign_id = self._asked(request, reference, form)
        minutes = amount(form, "minutes")
        given = {
            "wall": None if minutes is None else _MINUTE_S * minutes,
            "trials": whole(form, "trials"),
            "llm_tokens": whole(form, "llm_tokens"),
            "money": amount(form, "money"),
        }
        limits = {name: float(value) for name, value in given.items() if value is not None}
        if not limits or not all(limits.values()):
            raise FormRefused(400, "say what to amend, in numbers above zero: minutes, trials, tokens or money")
        because = words(form, "because", "say why the budget is amended: the journal and the report show the reason")
        try:
            people.amend_budget(self._home.store, campaign_id, limits, because, person(form))
        except SpecRefused as error:
            raise FormRefused(400, str(error)) from error
        return self._changed(campaign_id)

    def carry(self, request: Request, reference: str, form: Form) -> Response:
        """Pause, stop or resume the campaign."""
        campaign_id = self._asked(request, reference, form)
        store, what, halt = self._home.store, form.get("what", ""), partial(halt_newest, self._home)
        if what == "pause":
            people.pause(store, campaign_id, owned_at_rest, halt)
        elif what == "stop":
            people.check_open(store, campaign_id, "stopped")
            people.stop(store, campaign_id, self._home.studies, owned_at_rest, halt)
        elif what == "resume":
            people.withdraw_requests(store, campaign_id, owned_now)
            store.campaigns.hand_over(campaign_id)
            self._ensure_daemon()
        else:
            raise FormRefused(400, "ask the campaign to pause, stop or resume")
        return self._changed(campaign_id)

    def _asked(self, request: Request, reference: str, form: dict[str, str]) -> str:
        """Check the form's token. Returns the campaign's id."""
        check(self._access, request, form)
        return self._home.store.campaigns.resolve(reference)

    def _changed(self, campaign_id: str) -> Response:
        self._sheets.forget(campaign_id)
        return RedirectResponse(f"/campaigns/{campaign_id}", 303)
