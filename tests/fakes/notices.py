"""Services of notices: a webhook that apprise posts to, and one without any network."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from researcher.models import Notice
from researcher.notify.services import NotSent
from tests.contracts.notifier_contract import Received

SECRET = "swordfish"
"""In the webhook's address, which must appear nowhere else."""


class FakeNotifier:
    """Keeps what it is sent; `away`: it takes nothing."""

    def __init__(self, *, away: bool = False) -> None:
        self.sent: list[Notice] = []
        self.away = away

    def send(self, notice: Notice) -> None:
        if self.away:
            raise NotSent("it is away")
        self.sent.append(notice)

    def received(self) -> list[Received]:
        pictures = [each.picture is not None and each.picture.is_file() for each in self.sent]
        return [Received(each.title, each.body, int(shown)) for each, shown in zip(self.sent, pictures, strict=True)]


class Webhook:
    """status: what it answers with. posts: the bodies that it took, and `refused` those that it did not."""

    def __init__(self, port: int) -> None:
        self.url = f"json://127.0.0.1:{port}/{SECRET}"
        self.status = 200
        self.posts: list[dict[str, Any]] = []
        self.refused = 0

    def received(self) -> list[Received]:
        return [Received(each["title"], each["message"], len(each["attachments"])) for each in self.posts]


@contextmanager
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if hook.status == 200:
                hook.posts.append(body)
            else:
                hook.refused += 1
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook = Webhook(server.server_address[1])
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield hook
        finally:
            server.shutdown()
            serving.join()
