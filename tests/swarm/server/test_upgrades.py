"""Clients that offer another protocol beside HTTP/1.1."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.serving import ServerProcess
from swarm.server.process import without_upgrade

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def test_a_body_beside_an_offer_of_http_2_is_read_and_the_connection_stays(tmp_path: Path) -> None:
    body = json.dumps({"spec": {"batch": {"tasks": 1, "group_size": 2}}, "idempotency_key": "k"}).encode()
    length = b"Host: s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ExitStack() as opened:
        at = urlsplit(opened.enter_context(ServerProcess(tmp_path / "state")).url)
        line = opened.enter_context(socket.create_connection((at.hostname, at.port), timeout=30))
        for _ in range(2):
            line.sendall(b"POST /swarm/v1/runs HTTP/1.1\r\n" + OFFER + length + body)
            answer = line.recv(65_536)
            while b"run_id" not in answer:
                answer += line.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 201")


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nhost: s\r\n\r\na body\r\nUpgrade: h2c\r\n",
        b"a body that goes on\r\nUpgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Upgrade: h2c\r\n\r\n",
    ],
)
def test_nothing_but_a_head_is_touched(data: bytes) -> None:
    assert without_upgrade(data) == data
