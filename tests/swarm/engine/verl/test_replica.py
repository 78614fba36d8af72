"""Who is answered by a replica: vLLM's own application, with no engine behind it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: `make verl`"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="module")
def app(cpu_platform: None) -> Any:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from swarm.engine.verl.replica import require_key

    flags = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    require_key("its key", args)
    return build_app(args, supported_tasks=("generate",))


def answered(app: Any, **headers: str) -> set[str]:
    """METHOD path of all that is not refused."""
    from starlette.testclient import TestClient

    client = TestClient(app, raise_server_exceptions=False, headers=headers)
    asked = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()]
    assert len(asked) > 20
    asked += [("OPTIONS", "/tokenize"), ("POST", "/no-such-path")]
    return {f"{method} {path}" for method, path in asked if client.request(method, path).status_code != 401}


def test_every_path_but_health_and_version_asks_for_the_key(app: Any) -> None:
    opened = {"GET /health", "GET /version"}
    assert answered(app) <= opened | {"HEAD /health", "HEAD /version"}
    assert opened <= answered(app)
    assert answered(app, authorization="Bearer another") == answered(app)
    assert answered(app, authorization="Basic its key") == answered(app)


def test_who_knows_the_key_is_answered(app: Any) -> None:
    assert {"POST /tokenize", "POST /invocations", "POST /no-such-path"} <= answered(
        app, authorization="Bearer its key"
    )
