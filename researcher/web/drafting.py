"""Drafting a study on the page: what has to be injected for it, and its routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from foundation.commandline import UsageError
from researcher.refusals import PlanningRefused
from researcher.serving import Access
from researcher.web.forms import Form, FormRefused, check, words
from researcher.web.rendering import Renderer
from swarm.protocol.errors import SwarmError

ENGINES = ("local", "echo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What the planner made of a topic. asks: its question, where it needs an answer first; then there is no text."""

    text: str = ""
    problems: tuple[str, ...] = ()
    asks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A setting that is wrong. line: of the text, from 1; None where it does not stand there."""

    field: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A text as it would be carried out. problems: why it cannot be; then there is no plan."""

    problems: tuple[Problem, ...] = ()
    plan: tuple[str, ...] = ()
    price: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a study is to run. servers: addresses; none: one is started on this machine, with `engine`."""

    servers: tuple[str, ...] = ()
    engine: str = "local"


class Drafting(Protocol):
    """The planner, and whoever carries out what it plans."""

    def instruments(self) -> Sequence[str]:
        """Names of those that are installed."""

    def draft(self, topic: str, instrument: str | None, answers: Sequence[str]) -> Drafted:
        """Ask the planner. answers: to its earlier questions. Raises: PlanningRefused, UsageError."""

    def check(self, text: str, places: Places) -> Checked:
        """Plan and price a study file's text; nothing is recorded."""

    def start(self, text: str, places: Places) -> str | Checked:
        """Record the study and hand it to the daemon; returns its id, or what is wrong. Raises: UsageError for its servers."""


class DraftPages:
    """What the routes under /draft call."""

    def __init__(self, access: Access, drafting: Drafting, renderer: Renderer) -> None:
        self._access = access
        self._drafting = drafting
        self._render = renderer.page

    def add_routes(self, app: FastAPI) -> None:
        """Under /draft."""
        post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
        app.add_api_route("/draft", self.look, methods=["GET"], response_model=None)
        app.add_api_route("/draft", self.draft, **post)
        app.add_api_route("/draft/check", self.check, **post)
        app.add_api_route("/draft/start", self.start, **post)

    def look(self, request: Request) -> Response:
        """An empty form."""
        return self._page(request, {})

    def draft(self, request: Request, form: Form) -> Response:
        """The planner's draft of a topic, for the person to edit."""
        check(self._access, request, form)
        topic = words(form, "topic", "the topic is empty; ask a question about training agents")
        answers = [line for line in form.get("answers", "").splitlines() if line]
        if form.get("asks") and form.get("answer"):
            answers.append(" ".join(form["answer"].split()))
        given = {**form, "answers": "\n".join(answers)}
        try:
            drafted = self._drafting.draft(topic, form.get("instrument") or None, answers)
        except (PlanningRefused, UsageError, SwarmError) as error:
            return self._page(request, given, refused=str(error), status=400)
        return self._page(request, {**given, "text": drafted.text}, drafted=drafted)

    def check(self, request: Request, form: Form) -> Response:
        """Is it right, and what would it cost?"""
        return self._judged(request, form, self._drafting.check, 200)

    def start(self, request: Request, form: Form) -> Response:
        """Begin the study, and go on to its page."""
        return self._judged(request, form, self._drafting.start, 400)

    def _judged(
        self, request: Request, form: dict[str, str], judge: Callable[[str, Places], str | Checked], unfit: int
    ) -> Response:
        """unfit: the HTTP status where the text cannot be carried out."""
        check(self._access, request, form)
        try:
            found = judge(_text(form), _places(form))
        except (UsageError, SwarmError) as error:
            return self._page(request, form, refused=str(error), status=400)
        if isinstance(found, str):
            return RedirectResponse(f"/studies/{found}", 303)
        return self._page(request, form, checked=found, status=unfit if found.problems else 200)

    def _page(
        self,
        request: Request,
        form: dict[str, str],
        *,
        drafted: Drafted | None = None,
        checked: Checked | None = None,
        refused: str = "",
        status: int = 200,
    ) -> Response:
        names = ("topic", "instrument", "answers", "text", "servers", "engine")
        return self._render(
            request,
            "draft",
            status=status,
            given={name: form.get(name, "") for name in names},
            instruments=self._drafting.instruments(),
            engines=ENGINES,
            drafted=drafted or Drafted(),
            checked=checked,
            refused=refused,
            token=self._access.form_token(request.state.session),
        )


def _text(form: dict[str, str]) -> str:
    """Browsers send line ends of their own. Raises: FormRefused."""
    given = words(form, "text", "there is no study file yet: draft one from a topic, or write it")
    return given.replace("\r\n", "\n") + "\n"


def _places(form: dict[str, str]) -> Places:
    engine = form.get("engine") or ENGINES[0]
    if engine not in ENGINES:
        raise FormRefused(400, f"the engine is {' or '.join(ENGINES)}")
    return Places(servers=tuple(dict.fromkeys(form.get("servers", "").split())), engine=engine)
