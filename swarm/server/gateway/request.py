"""The state of one agent's request: its body, its progress and its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from swarm.protocol.episodes import POLICY_MODEL
from swarm.server.gateway.dialect import AnswerStream, Dialect
from swarm.server.gateway.errors import bad_request, unknown_model
from swarm.server.gateway.failures import KeptCall, Progress
from swarm.server.gateway.forms import JsonObject
from swarm.server.gateway.records import Generation
from swarm.server.gateway.retries import Attempt, body_hash
from swarm.server.gateway.sampling import with_defaults
from swarm.server.gateway.token_reuse import Prompt
from swarm.server.state.calls import CallAttempt, OpenCall, Outcome

_AGENT_HEADER = "x-agent-name"


@dataclass(slots=True, kw_only=True)
class AgentRequest:
    """One request of an agent.

    `asked` holds the engine's requests, one for each prompt. `generations` is empty if the request was answered before;
    `answered_before` then holds that answer.
    """

    dialect: Dialect
    body: JsonObject
    agent: str | None
    call: OpenCall
    is_retry: bool
    began: int
    """Position of its beginning among the beginnings and ends of all requests."""
    progress: Progress = field(default_factory=Progress)
    attempt: Attempt | None = None
    asked: list[JsonObject] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    answered_before: JsonObject | None = None
    sampling: bool = False
    """Whether the engine was asked to sample."""
    closed: bool = False
    kept: KeptCall | None = None

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    def ask(self, wanted: list[JsonObject], *, seeded: bool) -> None:
        """Set the engine's requests, with the run's defaults filled in. The engine samples choice i of a prompt with seed + i.

        With `seeded`, the defaults include a seed.
        """
        for number, body in enumerate(wanted):
            seed = self.call.seed + number * self.dialect.form.choices(body) if seeded else None
            self.asked.append(with_defaults(body, self.call.spec.sampling, seed))

    def generation(self, number: int, prompt: Prompt) -> Generation:
        """Return a new generation for the prompt with this 0-based number."""
        body, dialect = self.asked[number], self.dialect
        first = number * dialect.form.choices(body)
        return Generation(call=self.call, agent=self.agent, dialect=dialect, body=body, prompt=prompt, first=first)

    def engine_answer(self) -> JsonObject:
        return self.dialect.form.joined([generation.answer() for generation in self.generations])

    def answer(self, engine_answer: JsonObject) -> JsonObject:
        return self.dialect.answer(self.body, self.asked[0], engine_answer)

    def stream(self) -> AnswerStream:
        return self.dialect.stream(self.body, self.asked[0])

    def replayed(self, stream: AnswerStream, answer: JsonObject) -> Iterator[bytes]:
        """Yield a recorded answer as the frames of a stream."""
        prompt_tokens = int((answer.get("usage") or {}).get("prompt_tokens") or 0)
        for chunk in self.dialect.form.replay(answer, self.asked[0]):
            yield from stream.frames(chunk, prompt_tokens)
        yield from stream.end(answer)

    def ended(self, outcome: Outcome, at: int) -> CallAttempt:
        """Return the record of this attempt. From these records, the state decides whether a later attempt made up for a failure."""
        attempt = self.attempt or Attempt(body_hash(self.dialect.name, self.agent, self.body), None)
        return CallAttempt(
            asked=attempt.body_hash,
            key=attempt.key,
            is_retry=self.is_retry,
            began=self.began,
            ended=at,
            outcome=outcome,
        )

    def delivered(self) -> None:
        """Note that the whole answer was sent to a client that was still connected."""
        if self.attempt is not None:
            self.attempt.delivered = True

    def release(self) -> None:
        """Wake the retries that wait for this request."""
        if self.attempt is not None:
            self.attempt.over.set()


def agent_of(body: JsonObject, headers: Mapping[str, str], hosted: str, *, any_model: bool = False) -> str | None:
    """Return the agent's name, from the header or after the model's name; None if it has none.

    Raises: RequestRefused for a model that is not hosted here, unless `any_model`.
    """
    wanted = body.get("model")
    if not isinstance(wanted, str | None):
        raise bad_request(f"model must be a string, got {wanted!r}", "model")
    agent = agent_behind(wanted, hosted, any_model=any_model) if wanted else None
    return _text(headers.get(_AGENT_HEADER, "")) or agent or None


def agent_behind(wanted: str, hosted: str, *, any_model: bool = False) -> str | None:
    """Return the agent in `model@agent`; None if `wanted` only names a model.

    Raises: RequestRefused for a model that is not hosted here, unless `any_model`.
    """
    if wanted in (POLICY_MODEL, hosted):
        return None
    name, mark, agent = wanted.rpartition("@")
    if not mark or name not in (POLICY_MODEL, hosted):
        if any_model:
            return None
        raise unknown_model(wanted, hosted)
    return agent


def _text(header: str) -> str:
    """Decode a header again, as UTF-8 if its bytes allow that. It arrives decoded as Latin-1."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header
