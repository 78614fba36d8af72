"""`swarm trace EPISODE`: shows every call of an episode, token by token, in the terminal or as one HTML file."""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from foundation.commandline import UsageError
from foundation.streams import one_line, printable
from swarm.cli.options import connect
from swarm.protocol.episodes import DropReason, EpisodeTrace, LedgerEntry, RecordedCall
from swarm.protocol.sampling_mask import RestrictedTraining

LONGEST_LINE = 2_000
_COLOURS = {"prompt": "2", "echoed": "36", "trained": "1;32", "untrained": "33"}
_MARKS = {"prompt": ("", ""), "echoed": ("", ""), "trained": ("⟦", "⟧"), "untrained": ("⟨", "⟩")}
_LEGEND = {
    "trained": "sampled here, has a loss",
    "untrained": "sampled here, has no loss",
    "echoed": "sampled by an earlier call",
    "prompt": "written, not sampled",
}


def show_trace(args: argparse.Namespace) -> int:
    """Print an episode, call by call."""
    with connect(args) as swarm:
        trace = swarm.trace(args.episode_id, text=True)
    if args.html is not None:
        _write_page(trace, args.html)
        print(json.dumps({"page": str(args.html)}) if args.json else f"{args.html} shows episode {args.episode_id}")
    elif args.json:
        print(trace.model_dump_json())
    elif args.messages:
        print(trace_text(trace))
    else:
        print(tokens_text(trace, colour=_wants_colour(args.color), whole=args.whole, logprobs=args.logprobs))
    return 0


def _write_page(trace: EpisodeTrace, path: Path) -> None:
    try:
        path.write_text(page(trace), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _wants_colour(choice: str) -> bool:
    return choice == "always" or (choice == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def entry_line(entry: LedgerEntry) -> str:
    """Describe an episode in one line."""
    evaluated = entry.reason is DropReason.EVAL
    fate = "evaluated" if evaluated else entry.state if entry.step is None else f"{entry.state} at step {entry.step}"
    by = "" if entry.cause is None else f", cause: {entry.cause}"
    why = "" if evaluated or entry.reason is None else f" ({entry.reason}{by})"
    if entry.tainted and entry.despite is not None:
        why += f" (tainted, despite: {one_line(entry.despite)})"
    reward = "-" if entry.reward is None else f"{entry.reward:g}"
    calls = f"{entry.calls} call{'' if entry.calls == 1 else 's'}"
    return f"{entry.episode_id}  {entry.kind}  task {one_line(entry.task_id)}  reward {reward}  {calls}  {fate}{why}"


def trace_text(trace: EpisodeTrace) -> str:
    """Format an episode as its agent saw it, as messages."""
    lines = _opening(trace)
    for view in views(trace):
        lines += ["", call_line(view)]
        lines += [f"  {message_line(message)}" for message in view.call.request.get("messages") or ()]
        for choice in view.call.answer.get("choices") or ():
            lines.append(f"  → {message_line(choice.get('message') or {'content': choice.get('text')})}")
    return printable("\n".join(lines))


def tokens_text(trace: EpisodeTrace, *, colour: bool, whole: bool = False, logprobs: bool = False) -> str:
    """Format an episode as the model saw it, token by token, with prompt, trained and untrained tokens marked."""
    lines = _opening(trace)
    for view in views(trace):
        lines += ["", call_line(view)]
        hidden = 0 if whole else view.inherited
        if hidden:
            lines.append(f"  … {hidden} tokens, the same as in call {view.parent}")
        lines += [f"  {line}" for line in _painted(view.tokens[hidden:], colour=colour).split("\n")]
        if view.note:
            lines.append(f"  {view.note}")
        if logprobs:
            lines += [_token_line(token) for token in view.sampled]
    shown = ((kind, _painted_text(kind, kind, colour=colour)) for kind in _LEGEND)
    lines += ["", "  ".join(f"{word}: {_LEGEND[kind]}" for kind, word in shown if colour or any(_MARKS[kind]))]
    return "\n".join(lines)


def call_line(view: CallView) -> str:
    """Describe a call in one line, without its tokens."""
    call = view.call
    steps = ", ".join(map(str, view.steps)) or "?"
    fork = ""
    if view.fork is not None:
        where = "" if view.fork.call is None else f" after {view.fork.at} tokens of call {view.fork.call}"
        fork = f", forked{where} ({view.fork.cause})"
    agent = f" by {call.agent}" if call.agent else ""
    chance = f", mean logprob {sum(call.logprobs) / len(call.logprobs):.3f}" if call.logprobs else ""
    return (
        f"call {call.index}{agent}: {len(call.prompt_ids)} prompt tokens, {len(call.sampled_ids)} sampled at temperature "
        f"{call.sampling.temperature:g}{chance}, weights of step {steps}, {call.latency_s:.2f} s, "
        f"{_how_it_ended(call)}{fork}"
    )


def _how_it_ended(call: RecordedCall) -> str:
    if call.failure is not None:
        words = f": {call.failure.detail}" if call.failure.detail else ""
        return one_line(f"FAILED because of the {call.failure.cause}, {call.failure.reason}{words}")
    return str(call.finish_reason) if call.complete else "cancelled by its client"


def message_line(message: dict[str, Any]) -> str:
    """Format a chat message, including its tool calls, in one line."""
    parts = [str(message.get("role", "answer")) + ":"]
    if message.get("content"):
        parts.append(json.dumps(message["content"], ensure_ascii=False))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)[:LONGEST_LINE]


def _opening(trace: EpisodeTrace) -> list[str]:
    lines = [entry_line(trace.entry)]
    if trace.entry.detail:
        lines += [f"  {printable(line)}" for line in trace.entry.detail.splitlines()]
    if trace.entry.calls and not trace.calls:
        lost = (
            "an aborted episode's calls are"
            if trace.entry.reason is DropReason.ABORTED
            else "this episode's calls were deleted and are"
        )
        lines.append(f"  {lost} not kept; only their number is")
    return lines


def _painted(tokens: list[TokenView], *, colour: bool) -> str:
    runs = groupby(tokens, lambda token: token.origin)
    return "".join(_painted_text(origin, "".join(token.text for token in run), colour=colour) for origin, run in runs)


def _painted_text(origin: str, text: str, *, colour: bool) -> str:
    text = printable(text)
    if colour:
        return "\n".join(f"\x1b[{_COLOURS[origin]}m{line}\x1b[0m" for line in text.split("\n"))
    opening, closing = _MARKS[origin]
    return f"{opening}{text}{closing}"


def _token_line(token: TokenView) -> str:
    logprob = "-" if token.logprob is None else f"{token.logprob:.4f}"
    return f"    {json.dumps(token.text, ensure_ascii=False):<16} id {token.token_id:<8} logprob {logprob:>9}  step {token.step}"


# -- what each token is ---------------------------------------------------------------------------------------------------


class Origin(StrEnum):
    """Where a token comes from. Only `TRAINED` tokens have a loss in their call."""

    PROMPT = "prompt"
    """Written by the template, the agent or a person."""
    ECHOED = "echoed"
    """Sampled by an earlier call. If it is trained on, that happens in the earlier call."""
    TRAINED = "trained"
    UNTRAINED = "untrained"
    """Sampled by this call, whose sampled tokens have no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token. `text` is empty if an earlier token already shows the character that this token is part of."""

    token_id: int
    text: str
    origin: Origin
    logprob: float | None = None
    step: int | None = None
    """Step of the weights that sampled the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The point where a call departs from earlier calls.

    `call` is the index of the earlier call with the longest common prefix, and `at` is the length of that prefix in tokens.
    """

    cause: str
    call: int | None
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call. Its first `inherited` tokens come from the call that it continues, whose index is `parent`."""

    call: RecordedCall
    tokens: list[TokenView]
    inherited: int
    parent: int | None
    fork: Fork | None
    untrained: str | None
    restricted: RestrictedTraining | None

    @property
    def note(self) -> str:
        """How the call's loss differs from that of an ordinary call; empty if it does not."""
        if self.untrained is not None:
            return f"no loss on its sampled tokens: {self.untrained}"
        if self.restricted is None:
            return ""
        forced = (
            ""
            if self.call.mask is None
            else f"; {self.call.mask.forced} of {len(self.sampled)} tokens had no alternative"
        )
        return f"not sampled from the whole vocabulary; trained: {self.restricted}{forced}"

    @property
    def new(self) -> list[TokenView]:
        return self.tokens[self.inherited :]

    @property
    def sampled(self) -> list[TokenView]:
        return self.tokens[len(self.call.prompt_ids) :]

    @property
    def steps(self) -> list[int]:
        """Steps of the weights that sampled the call, in ascending order."""
        return sorted({span.version.step for span in self.call.versions})


def views(trace: EpisodeTrace) -> list[CallView]:
    """Return views of an episode's calls, in the order in which they were recorded."""
    made: dict[str, CallView] = {}
    for call in trace.calls:
        parent = made.get(call.parent_call_id or "")
        why = trace.untrained.get(call.call_id)
        tokens = list(_tokens(call, parent, trained=why is None, vocabulary=trace.vocabulary))
        made[call.call_id] = CallView(
            call=call,
            tokens=tokens,
            inherited=0 if parent is None else len(parent.tokens),
            parent=None if parent is None else parent.call.index,
            fork=_fork(call, [view.call for view in made.values()]),
            untrained=why,
            restricted=trace.restricted.get(call.call_id),
        )
    return list(made.values())


def _tokens(
    call: RecordedCall, parent: CallView | None, *, trained: bool, vocabulary: Mapping[str, str]
) -> Iterator[TokenView]:
    earlier = [] if parent is None else parent.tokens
    texts = _texts(call.prompt_ids, vocabulary)
    for position, (token, text) in enumerate(zip(call.prompt_ids, texts, strict=True)):
        sampled = position < len(earlier) and earlier[position].origin is not Origin.PROMPT
        yield TokenView(token_id=token, text=text, origin=Origin.ECHOED if sampled else Origin.PROMPT)
    origin = Origin.TRAINED if trained else Origin.UNTRAINED
    steps = {at: span.version.step for span in call.versions for at in range(span.start, span.end)}
    for at, (token, text) in enumerate(zip(call.sampled_ids, _texts(call.sampled_ids, vocabulary), strict=True)):
        logprob = call.logprobs[at] if at < len(call.logprobs) else None
        yield TokenView(token_id=token, text=text, origin=origin, logprob=logprob, step=steps.get(at))


def _texts(ids: Sequence[int], vocabulary: Mapping[str, str]) -> list[str]:
    """Return the text of each token. If several tokens form one character, the first gets it and the others are empty."""
    texts = [vocabulary.get(str(token), f"[{token}]") for token in ids]
    start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and "�" in texts[end]:
            end += 1
        whole = vocabulary.get(",".join(map(str, ids[start:end]))) if end - start > 1 else None
        if whole is not None:
            texts[start:end] = [whole, *[""] * (end - start - 1)]
        start = max(end, start + 1)
    return texts


def _fork(call: RecordedCall, earlier: Sequence[RecordedCall]) -> Fork | None:
    if call.fork_cause is None:
        return None
    shared = [(_shared([*other.prompt_ids, *other.sampled_ids], call.prompt_ids), other.index) for other in earlier]
    at, index = max(shared, default=(0, None))
    return Fork(cause=call.fork_cause, call=index, at=at)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- a self-contained HTML page -------------------------------------------------------------------------------------------


def page(trace: EpisodeTrace) -> str:
    """Return the complete HTML page."""
    calls = views(trace)
    agents = list(dict.fromkeys(view.call.agent for view in calls))
    template = Template(resources.files("swarm.cli").joinpath("trace_page.html").read_text(encoding="utf-8"))
    sections = "\n".join(_section(view, agents.index(view.call.agent)) for view in calls)
    detail = f"\n{trace.entry.detail}" if trace.entry.detail else ""
    return template.substitute(
        episode=html.escape(trace.entry.episode_id),
        entry=html.escape(entry_line(trace.entry) + detail),
        calls=sections or "<p>There are no calls, or they are not kept.</p>",
    )


def _section(view: CallView, agent: int) -> str:
    marks = ["fork"] * (view.fork is not None) + ["failed"] * (view.call.failure is not None)
    shown = f' class="{" ".join(marks)}"' if marks else ""
    notes = f'<p class="note">{html.escape(view.note.capitalize())}</p>' if view.note else ""
    earlier = ""
    if view.inherited:
        tokens = _spans(view.tokens[: view.inherited], view, agent)
        earlier = (
            f"<details><summary>{view.inherited} tokens, the same as in call {view.parent}</summary>"
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
