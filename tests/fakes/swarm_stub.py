"""A swarm server of 150 lines, in memory: enough of the protocol to watch a client behave. It can refuse and lose answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from foundation.clock import Clock, ManualClock
from swarm.client import Patience, RolloutReport, SwarmClient, Task
from swarm.client.tasks import Rollout
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import Problem

RUN = "run-1"


@dataclass
class StubEpisode:
    episode_id: str
    claim: dict[str, Any]
    group_id: str
    slot: int
    state: str = "running"
    reason: str | None = None
    detail: str | None = None
    cause: str | None = None
    reward: float | None = None
    end_key: str | None = None
    claimed_at: float = 0.0
    claimed_step: int = 0
    ended_at: float | None = None

    @property
    def lease(self) -> str:
        return f"swl_{self.episode_id}"

    def entry(self) -> dict[str, Any]:
        names = ("run_id", "kind", "task_id", "mix", "client_id", "client_version")
        return {name: self.claim[name] for name in names} | {
            "episode_id": self.episode_id,
            "config_version": 1,
            "group_id": self.group_id,
            "slot": self.slot,
            "state": self.state,
            "reason": self.reason,
            "detail": self.detail,
            "cause": self.cause,
            "claimed_step": self.claimed_step,
            "reward": self.reward,
            "claimed_at": self.claimed_at,
            "ended_at": self.ended_at,
        }


@dataclass
class SwarmStub:
    """Use `transport()` as a client's transport.

    before: refusals or errors to give out, one per matching request, before it is handled: (path part, what).
    lose: path parts of requests whose answer gets lost after they were handled, once each.
    hold: requests with this path part wait for its event before they are handled.
    train_limit: so many train episodes end, then the run is over.
    dropped: reasons that ends are dropped for, one per end. Time is counted in requests.
    """

    group_size: int = 2
    train_limit: int | None = None
    step: int = 0
    status: str = "running"
    before: list[tuple[str, Exception]] = field(default_factory=list)
    lose: list[str] = field(default_factory=list)
    hold: tuple[str, asyncio.Event] | None = None
    episodes: dict[str, StubEpisode] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    on_claim: Callable[[], None] | None = None
    dropped: list[str] = field(default_factory=list)
    page_size: int = 3

    def transport(self) -> httpx.AsyncBaseTransport:
        return httpx.MockTransport(self._serve)

    def client(
        self,
        url: str = "http://stub",
        *,
        client_id: str = "c-1",
        version: str = "0",
        clock: Clock | None = None,
        patience: Patience | None = None,
    ) -> SwarmClient:
        return SwarmClient(
            url,
            client_id=client_id,
            client_version=version,
            transport=self.transport(),
            clock=clock or ManualClock(),
            patience=patience,
        )

    async def play(
        self,
        stream: Iterable[Task] | AsyncIterable[Task],
        rollout: Rollout,
        *,
        client_id: str = "c-1",
        version: str = "0",
        clock: Clock | None = None,
        **options: Any,
    ) -> RolloutReport:
        """What `run_tasks` of a client of its own reports."""
        async with self.client(client_id=client_id, version=version, clock=clock) as swarm:
            return await swarm.run_tasks(stream, rollout, **options)

    # -- what tests look at -------------------------------------------------------------------------------------------

    def paths(self, part: str) -> list[str]:
        return [path for _, path, _ in self.requests if part in path]

    def by_state(self) -> Counter[str]:
        return Counter(episode.reason or episode.state for episode in self.episodes.values())

    def drop(self, episode_id: str, cause: str, reason: str = "expired", detail: str | None = None) -> None:
        """Close an open episode."""
        episode = self.episodes[episode_id]
        episode.state, episode.reason, episode.detail, episode.cause = "dropped", reason, detail, cause
        episode.ended_at = float(len(self.requests))

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        self.requests.append((request.method, path, body))
        if self.hold is not None and self.hold[0] in path:
            await self.hold[1].wait()
        for index, (part, error) in enumerate(self.before):
            if part in path:
                del self.before[index]
                if isinstance(error, Refusal):
                    return _problem(error)
                raise error
        try:
            answer = self._handle(request, path, body)
        except Refusal as refusal:
            return _problem(refusal)
        for part in self.lose:
            if part in path:
                self.lose.remove(part)
                raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(200, json=answer)

    def _handle(self, request: httpx.Request, path: str, body: dict[str, Any]) -> Any:
        query = request.url.params
        if path.endswith("/episodes:claim"):
            return self._claim(body)
        if path.endswith("/sessions"):
            return self._begin_session(body)
        if path.endswith(":end"):
            return self._end(path, body)
        if path.endswith(":abort"):
            episode = self._held(path, body)
            self.drop(episode.episode_id, body.get("cause") or "rollout", "aborted", body["reason"])
            return episode.entry()
        if request.method == "GET" and "/episodes/" in path:
            return self.episodes[path.split("/")[-1]].entry()
        if path.endswith(":renew"):
            self._held(path, body)
            return {"expires_at": 1.0}
        if path.endswith("/tasks"):
            return self._tasks(query)
        if path.endswith("/ledger"):
            return self._ledger(query)
        if path.endswith("/health"):
            return {"status": "ok"}
        if path.endswith("/status"):
            return _status(self.step)
        if path.endswith("/runs") and request.method == "POST":
            return {"run_id": RUN}
        if path.endswith(f"/runs/{RUN}"):
            return self._report()
        raise Refusal(ErrorCode.NOT_FOUND, f"the stub has no {path}")

    def _begin_session(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["run_id"] != RUN:
            raise Refusal(ErrorCode.NOT_FOUND, "no such run")
        me, before = body["client_id"], self.sessions.get(body["client_id"])
        self.sessions[me] = body["session"]
        held = [one for one in self.episodes.values() if one.state == "running" and one.claim["client_id"] == me]
        older = [one.episode_id for one in held if one.claim.get("session") and before != body["session"]]
        for episode_id in older:
            self.drop(episode_id, "client", "aborted", body["reason"])
        return {"closed": older}

    def _claim(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.on_claim is not None:
            self.on_claim()
        for episode in self.episodes.values():
            if episode.state == "running" and episode.claim["idempotency_key"] == body["idempotency_key"]:
                if episode.claim | {"wait_s": 0} != body | {"wait_s": 0}:
                    raise Refusal(ErrorCode.IDEMPOTENCY_CONFLICT, "another claim")
                return _grant(episode)
        if body["run_id"] != RUN:
            raise Refusal(ErrorCode.NOT_FOUND, "no such run")
        if body.get("session") and body["session"] != self.sessions.get(body["client_id"]):
            raise Refusal(ErrorCode.LEASE_LOST, "another process plays as this client")
        if body["kind"] == "train" and (self.status != "running" or self._full()):
            self.status = "complete"
            raise Refusal(ErrorCode.OVER_LIMIT, "the run is complete")
        mates = [one for one in self.episodes.values() if one.claim["task_id"] == body["task_id"]]
        held = [one for one in mates if one.state != "dropped"]
        number = len(self.episodes)
        episode = StubEpisode(f"ep-{number}", body, f"g-{body['task_id']}", len(held))
        episode.claimed_at, episode.claimed_step = float(len(self.requests)), self.step
        self.episodes[episode.episode_id] = episode
        return _grant(episode)

    def _end(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        known = self.episodes[path.split("/")[-1].partition(":")[0]]
        if known.state == "ended" and known.end_key == body["idempotency_key"]:
            return {"episode_id": known.episode_id, "status": "already_ended"}
        episode = self._held(path, body)
        episode.state, episode.reward, episode.end_key = "ended", body["reward"], body["idempotency_key"]
        episode.ended_at = float(len(self.requests))
        if not self.dropped:
            return {"episode_id": episode.episode_id, "status": "pooled"}
        reason = self.dropped.pop(0)
        self.drop(episode.episode_id, "server" if reason == "tainted" else "rollout", reason)
        return {"episode_id": episode.episode_id, "status": "pooled", "dropped": reason}

    def _held(self, path: str, body: dict[str, Any]) -> StubEpisode:
        episode = self.episodes.get(path.split("/")[-1].partition(":")[0])
        if episode is None or episode.state != "running" or episode.lease != body["lease"]:
            raise Refusal(ErrorCode.LEASE_LOST, "claim a new episode")
        return episode

    def _full(self) -> bool:
        return self.train_limit is not None and self._trained() >= self.train_limit

    def _trained(self) -> int:
        return sum(one.state == "ended" and one.claim["kind"] == "train" for one in self.episodes.values())

    def _tasks(self, query: httpx.QueryParams) -> list[dict[str, Any]]:
        counts = Counter(
            (one.claim["task_id"], one.claim["mix"], one.claim["kind"])
            for one in self.episodes.values()
            if one.state == "ended"
            and all(one.claim[name] == query.get(name, one.claim[name]) for name in ("client_id", "mix"))
        )
        return [
            {"task_id": task, "mix": mix, "kind": kind, "step": self.step if kind == "eval" else None, "ended": ended}
            for (task, mix, kind), ended in counts.items()
        ]

    def _ledger(self, query: httpx.QueryParams) -> dict[str, Any]:
        names = [name for name in ("client_id", "task_id", "kind") if name in query]
        wanted = [one for one in self.episodes.values() if all(one.claim[name] == query[name] for name in names)]
        start = int(query.get("after", 0))
        page = wanted[start : start + self.page_size]
        following = str(start + self.page_size) if start + self.page_size < len(wanted) else None
        return {"entries": [one.entry() for one in page], "next": following}

    def _report(self) -> dict[str, Any]:
        return {
            "run_id": RUN,
            "branch": 0,
            "spec": {"batch": {"group_size": self.group_size, "partial_min": 2}},
            "status": self.status,
            "phase": "rolling",
            "step": self.step,
            "config_version": 1,
            "changes": [],
            "steps": [],
            "started_at": 0.0,
        }


def _grant(episode: StubEpisode) -> dict[str, Any]:
    return {
        "episode_id": episode.episode_id,
        "lease": episode.lease,
        "group_id": episode.group_id,
        "slot": episode.slot,
        "base_url": "http://stub/v1",
        "api_key": f"swk_{episode.episode_id}",
        "weights_version": {"run_id": RUN},
        "expires_at": 0.0,
    }


def _status(step: int) -> dict[str, Any]:
    return {
        "server_id": "stub",
        "revision": 1,
        "phase": "rolling",
        "run_id": RUN,
        "step": step,
        "model": "stub",
        "pool": {},
        "engine": {"backend": "stub", "device": "none"},
    }


def _problem(refusal: Refusal) -> httpx.Response:
    problem = Problem.of(refusal)
    return httpx.Response(
        problem.status, json=problem.model_dump(), headers={"content-type": "application/problem+json"}
    )
