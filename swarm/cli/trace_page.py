"""A trace as one HTML page that needs nothing else: tokens coloured by loss, logprob, weights or agent."""

from __future__ import annotations

import html
import math
from importlib import resources
from string import Template

from swarm.cli.trace import call_line, entry_line
from swarm.cli.trace_view import CallView, Origin, TokenView, views
from swarm.protocol.episodes import EpisodeTrace


def page(trace: EpisodeTrace) -> str:
    """The whole page."""
    calls = views(trace)
    agents = list(dict.fromkeys(view.call.agent for view in calls))
    template = Template(resources.files("swarm.cli").joinpath("trace_page.html").read_text(encoding="utf-8"))
    sections = "\n".join(_section(view, agents.index(view.call.agent)) for view in calls)
    detail = f"\n{trace.entry.detail}" if trace.entry.detail else ""
    return template.substitute(
        episode=html.escape(trace.entry.episode_id),
        entry=html.escape(entry_line(trace.entry) + detail),
        calls=sections or "<p>There are no calls, or they were freed.</p>",
    )


def _section(view: CallView, agent: int) -> str:
    marks = ["fork"] * (view.fork is not None) + ["failed"] * (view.call.failure is not None)
    shown = f' class="{" ".join(marks)}"' if marks else ""
    notes = f'<p class="note">No loss on what it sampled: {html.escape(view.untrained)}</p>' if view.untrained else ""
    earlier = ""
    if view.inherited:
        tokens = _spans(view.tokens[: view.inherited], view, agent)
        earlier = (
            f"<details><summary>{view.inherited} tokens as in call {view.parent}</summary>"
            f'<pre class="tokens">{tokens}</pre></details>'
        )
    new = f'<pre class="tokens">{_spans(view.new, view, agent)}</pre>'
    return f'<section{shown} id="call-{view.call.index}"><h2>{html.escape(call_line(view))}</h2>{notes}{earlier}{new}</section>'


def _spans(tokens: list[TokenView], view: CallView, agent: int) -> str:
    return "".join(_span(token, view, agent) for token in tokens)


def _span(token: TokenView, view: CallView, agent: int) -> str:
    text = html.escape(token.text)
    if token.origin in (Origin.PROMPT, Origin.ECHOED):
        return f'<span class="t {token.origin}" title="id {token.token_id}: {token.origin}">{text}</span>'
    chance = math.exp(min(0.0, token.logprob)) if token.logprob is not None else 1.0
    logprob = "unknown" if token.logprob is None else f"{token.logprob:.4f} (p {chance:.3f})"
    title = f"id {token.token_id}: {token.origin}\nlogprob {logprob}\nweights of step {token.step}\nagent {view.call.agent or '-'}"
    style = f"--p:{chance:.3f};--w:{token.step or 0};--a:{agent}"
    return f'<span class="t sampled {token.origin}" style="{style}" title="{html.escape(title)}">{text}</span>'
