"""Decides which requests get a recorded answer again, and which are sampled anew.

A request with a known Idempotency-Key is a repetition. So is a request that the SDK marks as a retry, if every earlier
request of the agent with the same body was answered, and an answer was not delivered. If all were, the request that is retried
probably never arrived here. If an earlier request has no answer, the retry replaces that request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.gateway.open_episodes import OpenEpisodes

_RETRY_HEADER = "x-stainless-retry-count"
_KEY_HEADER = "idempotency-key"


@dataclass(slots=True)
class Attempt:
    """One open or answered request. `answer` stays None if the request failed or was cut off.

    `delivered` is true if the whole answer was sent to a client that was still connected.
    """

    body_hash: str
    key: str | None
    answer: dict[str, Any] | None = None
    delivered: bool = False
    given_again: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failed(self) -> bool:
        return self.answer is None and self.over.is_set()


@dataclass(slots=True)
class _Episode:
    by_key: dict[str, Attempt] = field(default_factory=dict)
    by_body: dict[str, list[Attempt]] = field(default_factory=dict)


class Retries:
    """All attempts in open episodes."""

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        self._episodes = OpenEpisodes(is_open, _Episode)

    async def begin(
        self, episode_id: str, dialect: str, agent: str | None, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[Attempt, dict[str, Any] | None]:
        """Return this request's attempt, and its recorded answer if it was answered before.

        Waits for an open attempt with the same key. Raises: Refusal(idempotency_conflict) if the key was used with a different
        body or by another agent, unless that attempt failed.
        """
        episode = self._episodes.of(episode_id)
        asked = body_hash(dialect, agent, body)
        key = headers.get(_KEY_HEADER) or None
        while key is not None and (known := episode.by_key.get(key)) is not None:
            if known.body_hash != asked and not known.failed:
                raise Refusal(
                    ErrorCode.IDEMPOTENCY_CONFLICT,
                    "this Idempotency-Key was already used with a different body or by another agent; use a new key",
                )
            await known.over.wait()
            if known.answer is not None:
                return known, known.answer
            if episode.by_key.get(key) is known:
                break  # it failed, and this request is the first to retry it
        attempts = episode.by_body.setdefault(asked, [])
        undelivered = [attempt for attempt in attempts if not attempt.delivered]
        if key is None and is_retry(headers) and undelivered and all(one.answer is not None for one in undelivered):
            lost = min(reversed(undelivered), key=lambda attempt: attempt.given_again)
            lost.given_again += 1
            return lost, lost.answer
        attempt = Attempt(asked, key)
        if is_retry(headers):
            _drop_failed(attempts)
        attempts.append(attempt)
        if key is not None:
            episode.by_key[key] = attempt
        return attempt, None


def body_hash(dialect: str, agent: str | None, body: Mapping[str, Any]) -> str:
    """Return a digest of dialect, agent and body: it is equal if the same agent sends the same request."""
    return hashlib.sha256(orjson.dumps([dialect, agent, body], option=orjson.OPT_SORT_KEYS)).hexdigest()


def is_retry(headers: Mapping[str, str]) -> bool:
    """True if the client's SDK marks the request as a retry."""
    return headers.get(_RETRY_HEADER, "0").strip() not in ("", "0")


def _drop_failed(attempts: list[Attempt]) -> None:
    """Remove one failed attempt from the list; a retry takes its place."""
    for attempt in attempts:
        if attempt.failed:
            attempts.remove(attempt)
            return
