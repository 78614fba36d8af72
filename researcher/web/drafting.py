"""Drafts studies and campaigns on the page: the interface to the planner, and the routes."""

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
    """The planner's draft for a topic. `asks` is the planner's question if it needs an answer first; then there is no text."""

    text: str = ""
    problems: tuple[str, ...] = ()
    asks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A wrong setting. `line` is its line in the text, counted from 1; None if the setting is not in the text."""

    field: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The plan made from a text. `problems` say why the text cannot be run; then there is no plan."""

    problems: tuple[Problem, ...] = ()
    plan: tuple[str, ...] = ()
    price: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where trials will run. `servers` are addresses; if empty, a server is started on this machine with `engine`."""

    servers: tuple[str, ...] = ()
    engine: str = "local"


class Drafting(Protocol):
    """Plans texts, and starts the studies or campaigns that they describe."""

    def instruments(self) -> Sequence[str]:
        """List the names of the installed instruments."""

    def draft(self, topic: str, instrument: str | None, answers: Sequence[str]) -> Drafted:
        """Ask the planner for a draft. `answers` are the person's answers to its earlier questions. Raises: PlanningRefused,
        UsageError.
        """

    def check(self, text: str, places: Places) -> Checked:
        """Plan and price a file's text, without recording anything."""

    def start(self, text: str, places: Places) -> str | Checked:
        """Record the study or campaign and hand it to the daemon. Returns its id, or the problems.

        Raises: UsageError if its servers cannot be used.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of form: for studies or for campaigns.

    Routes start with `path`; pages of started studies or campaigns start with `shown`. The other fields are texts of the form.
    """

    name: str
    path: str
    shown: str
    asks: str
    hint: str
    file: str
    fields: str
    other: str
    """Sentence that links to the other form, at `other_path`."""
    other_path: str

    @property
    def form(self) -> tuple[str, str]:
        """Link back to the form: path and text."""
        return self.path, f"the form for a new {self.name}"


STUDY = Kind(
    name="study",
    path="/draft",
    shown="/studies",
    asks="What do you want to know?",
    hint="a question about training agents",
    file="study file",
    fields="compare or arms, design, seeds, steps, budget: `researcher schema` describes every field",
    other="A goal that takes several studies, over hours or days, is a campaign.",
    other_path="/draft/campaign",
)
CAMPAIGN = Kind(
    name="campaign",
    path="/draft/campaign",
    shown="/campaigns",
    asks="What do you want to find out?",
    hint="a goal and its budget, such as: What makes GRPO learn one-digit sums fastest? Two hours.",
    file="goal file",
    fields="goal, instruments, objective, factors, set, steps, strategist, budget, schedule, approve, notify",
    other="One question that one comparison answers is a study.",
    other_path="/draft",
)


class DraftPages:
    """Handlers of the routes of one kind of form."""

    def __init__(self, access: Access, kind: Kind, drafting: Drafting, renderer: Renderer) -> None:
        self._access = access
        self._kind = kind
        self._drafting = drafting
        self._render = renderer.page

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes under the kind's path."""
        post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
        path = self._kind.path
        app.add_api_route(path, self.look, methods=["GET"], response_model=None)
        app.add_api_route(path, self.draft, **post)
        app.add_api_route(f"{path}/check", self.check, **post)
        app.add_api_route(f"{path}/start", self.start, **post)

    def look(self, request: Request) -> Response:
        """Show an empty form."""
        return self._page(request, {})

    def draft(self, request: Request, form: Form) -> Response:
        """Show the planner's draft of a topic, for the person to edit."""
        check(self._access, request, form)
        topic = words(form, "topic", f"the topic is empty; write {self._kind.hint}")
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
        """Show whether the text is valid, and what it would cost."""
        return self._judged(request, form, self._drafting.check, 200)

    def start(self, request: Request, form: Form) -> Response:
        """Start the study or campaign, and redirect to its page."""
        return self._judged(request, form, self._drafting.start, 400)

    def _judged(
        self, request: Request, form: dict[str, str], judge: Callable[[str, Places], str | Checked], unfit: int
    ) -> Response:
        """Show the form with the result of the check. `unfit` is the HTTP status if the text cannot be run."""
        check(self._access, request, form)
        try:
            found = judge(self._text(form), _places(form))
        except (UsageError, SwarmError) as error:
            return self._page(request, form, refused=str(error), status=400)
        if isinstance(found, str):
            return RedirectResponse(f"{self._kind.shown}/{found}", 303)
        return self._page(request, form, checked=found, status=unfit if found.problems else 200)

    def _text(self, form: dict[str, str]) -> str:
        """Return the form's text with line endings normalized. Raises: FormRefused."""
        given = words(form, "text", f"there is no {self._kind.file} yet: draft one from a topic, or write one")
        return given.replace("\r\n", "\n") + "\n"

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
            kind=self._kind,
            given={name: form.get(name, "") for name in names},
            instruments=self._drafting.instruments(),
            engines=ENGINES,
            drafted=drafted or Drafted(),
            checked=checked,
            refused=refused,
            token=self._access.form_token(request.state.session),
        )


def _places(form: dict[str, str]) -> Places:
    engine = form.get("engine") or ENGINES[0]
    if engine not in ENGINES:
        raise FormRefused(400, f"the engine must be {' or '.join(ENGINES)}")
    return Places(servers=tuple(dict.fromkeys(form.get("servers", "").split())), engine=engine)
