"""The screen of `swarm top`, with one panel per server. This is the only module that imports Textual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from swarm.cli.top import (
    Row,
    ServerView,
    client_rows,
    curve_line,
    failure_lines,
    headline,
    mix_rows,
    pool_line,
    rate_line,
    standing_lines,
)

_MIX = ("mix", "running", "ended", "trained", "debt")
_CLIENTS = ("client", "version", "episodes", "reward", "failed")


class Watched(Protocol):
    """A server that can be followed."""

    @property
    def url(self) -> str: ...

    def views(self) -> AsyncIterator[ServerView]: ...


class Panel(Vertical):
    """The panel of one server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.border_title = Text(url)

    def compose(self) -> ComposeResult:
        yield Static("waiting for the server", classes="head", markup=False)
        yield Static(classes="pool", markup=False)
        yield Sparkline(classes="curve")
        yield Static(classes="reward", markup=False)
        yield DataTable(classes="mix", cursor_type="none", show_cursor=False)
        yield DataTable(classes="clients", cursor_type="none", show_cursor=False)
        yield Static(classes="failures", markup=False)

    def show(self, view: ServerView) -> None:
        """Draw the server's current state."""
        self.set_class(view.error is not None, "away")
        head = headline(view) if view.error is None else f"{headline(view)}\n{view.error}"
        self.query_one(".head", Static).update(head)
        if view.status is None:
            return
        lines = [*view.notes, pool_line(view), rate_line(view), *standing_lines(view.status)]
        self.query_one(".pool", Static).update("\n".join(lines))
        curve = self.query_one(".curve", Sparkline)
        curve.data = view.rewards
        curve.display = bool(view.steps)
        self.query_one(".reward", Static).update(curve_line(view) if view.steps else "no steps yet")
        self._fill(".mix", _MIX, mix_rows(view))
        self._fill(".clients", _CLIENTS, client_rows(view))
        self.query_one(".failures", Static).update("\n".join(failure_lines(view)))

    def _fill(self, name: str, titles: Row, rows: Sequence[Row]) -> None:
        table: DataTable[Text] = self.query_one(name, DataTable)
        table.display = bool(rows)
        table.clear(columns=True)
        table.add_columns(*titles)
        table.add_rows([Text(cell) for cell in row] for row in rows)  # a plain string would be read as markup


class Top(App[None]):
    """The application: one panel per server, updated as servers change."""

    TITLE = "swarm top"
    BINDINGS = [Binding("q", "quit", "Quit"), Binding("n", "next", "Next server")]
    CSS = """
    Panel { height: auto; border: round $primary; padding: 0 1; margin-bottom: 1; }
    Panel.away { border: round $error; }
    Panel Static { height: auto; } Panel Sparkline { height: 3; }
    Panel DataTable { height: auto; min-height: 1; max-height: 12; }
    .failures { color: $error; }
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        super().__init__()
        self._watched = watched
        self._panels = [Panel(each.url) for each in watched]
        self._shown = 0

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield from self._panels
        yield Footer()

    def on_mount(self) -> None:
        for panel, watched in zip(self._panels, self._watched, strict=True):
            self.run_worker(self._follow(panel, watched), name=watched.url, exit_on_error=True)

    def action_next(self) -> None:
        """Scroll to the next server."""
        self._shown = (self._shown + 1) % len(self._panels)
        self._panels[self._shown].scroll_visible(top=True)

    async def _follow(self, panel: Panel, watched: Watched) -> None:
        async for view in watched.views():
            panel.show(view)
