"""swarm trace: every token with what it is to training, in the terminal and on one page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from swarm.cli.trace import Origin, page, tokens_text, views
from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import CallFailure, Cause, EpisodeTrace
from tests.swarm.cli.conftest import Swarm, ask, spec

ANSI = re.compile(r"\x1b\[[\d;]*m")


def test_sampled_tokens_are_marked_and_forks_and_texts_are_shown(history: dict[str, Any], swarm: Swarm) -> None:
    code, out, _ = swarm("trace", history["trained"])
    assert code == 0
    assert "Grüß <b>me</b>" in out, "characters of several tokens are whole"
    assert "call 0 by planner" in out
    assert "… " in out
    assert "as in call 0" in out
    assert "forked after" in out
    assert "(answer_edited)" in out
    assert out.count("⟦") == 4, "three calls and the legend"
    assert "has a loss" in out
    coloured = swarm("trace", history["trained"], "--color", "always")[1]
    assert "\x1b[1;32m" in coloured
    assert "⟦" not in coloured
    assert "Grüß" in ANSI.sub("", coloured)
    listed = swarm("trace", history["trained"], "--logprobs")[1]
    assert re.search(r'"m" +id 109 +logprob +-?\d+\.\d{4}  step 0', listed)


def test_an_episode_that_was_not_trained_says_why_no_token_carries_loss(history: dict[str, Any], swarm: Swarm) -> None:
    _, out, _ = swarm("trace", history["flat"])
    assert "no loss on its sampled tokens: zero_variance" in out
    assert "⟨" in out
    _, out, _ = swarm("trace", history["aborted"])
    assert "KeyError: 'answer'" in out


def test_a_call_that_failed_on_the_servers_side_stands_out(history: dict[str, Any], swarm: Swarm) -> None:
    trace = EpisodeTrace.model_validate_json(swarm("trace", history["trained"], "--json")[1])
    failure = CallFailure(cause=Cause.SERVER, reason="engine_down", detail="ended by <SIGKILL>")
    call = trace.calls[-1]
    broken = {"failure": failure, "complete": False, "sampled_ids": [], "logprobs": [], "versions": []}
    trace.calls[-1] = call.model_copy(update=broken)
    trace.untrained[call.call_id] = "tainted"
    text = tokens_text(trace, colour=False)
    assert "FAILED because of the server, engine_down: ended by <SIGKILL>" in text
    assert "no loss on its sampled tokens: tainted" in text
    shown = page(trace)
    assert 'class="fork failed"' in shown or 'class="failed"' in shown
    assert "engine_down: ended by &lt;SIGKILL&gt;" in shown


def test_messages_and_json_are_there_for_those_who_want_them(history: dict[str, Any], swarm: Swarm) -> None:
    assert 'user: "once more"' in swarm("trace", history["trained"], "--messages")[1]
    trace = json.loads(swarm("trace", history["trained"], "--json")[1])
    assert trace["vocabulary"]["195,188,195,159"] == "üß"
    assert trace["untrained"] == {}


def test_the_view_knows_the_origin_of_every_token(history: dict[str, Any], swarm: Swarm) -> None:
    trace = EpisodeTrace.model_validate_json(swarm("trace", history["trained"], "--json")[1])
    first, second, third = views(trace)
    assert {token.origin for token in first.sampled} == {Origin.TRAINED}
    assert all(token.logprob is not None and token.step == 0 for token in first.sampled)
    answer = second.tokens[len(first.call.prompt_ids) : len(first.tokens)]
    assert [token.token_id for token in answer] == first.call.sampled_ids
    assert {token.origin for token in answer} == {Origin.ECHOED}
    assert (second.parent, second.inherited) == (0, len(first.tokens))
    assert third.parent is None
    assert third.fork is not None
    assert third.fork.call in (0, 1)
    assert third.fork.at == len(first.call.prompt_ids), "the rewritten answer shares no token with the sampled one"


def test_greedy_calls_carry_no_loss(server: Any, swarm: Swarm) -> None:
    with SwarmClient(server.url) as client:
        client.start_run(spec())
        with client.episode(task_id="t") as episode:
            ask(episode, [{"role": "user", "content": "hi"}], temperature=0)
            assert list(client.trace(episode.id).untrained.values()) == ["greedy"]
            assert client.trace(episode.id).vocabulary == {}
            episode.end(reward=0.0)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.classes: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.classes.append(found.get("class") or "")
        self.outside += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_by_itself_and_escapes_what_agents_say(
    history: dict[str, Any], swarm: Swarm, tmp_path: Path
) -> None:
    file = tmp_path / "trace.html"
    code, out, _ = swarm("trace", history["trained"], "--html", str(file))
    assert (code, str(file) in out) == (0, True)
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    assert page.outside == [], "nothing is fetched from elsewhere"
    assert "Grüß <b>me</b>" in "".join(page.text)
    assert "fork" in page.classes
    assert any("trained" in name and "sampled" in name for name in page.classes)
    assert "agent planner" in file.read_text(encoding="utf-8")


def test_a_trace_that_is_not_there_and_a_page_that_cannot_be_written_are_one_line(
    history: dict[str, Any], swarm: Swarm
) -> None:
    assert swarm("trace", "ep-none")[0] == 1
    code, _, err = swarm("trace", history["flat"], "--html", "/nowhere/page.html")
    assert (code, err.count("\n")) == (2, 1)
