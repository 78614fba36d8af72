"""Does an agent of this framework train here unchanged? `python -m tests.conformance` runs one script per framework.

Each script knows a base_url, an api_key and a model. It runs in an environment of its own, once on bare vLLM and once in
an episode of a swarm server; then the episode's trace is compared with what vLLM sampled, and with the framework's row in
frameworks.toml. Ends with 1 when one does not conform.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from foundation.commandline import Parser
from swarm.client.sync import SwarmClient
from swarm.protocol.runspec import BatchSpec, RunSpec, SamplingSpec
from tests.conformance import environments
from tests.conformance.frameworks import UnknownFramework, declared
from tests.conformance.judgement import Judgement
from tests.conformance.rehearsal import Bare, rehearse
from tests.conformance.relay import served_bare, vllm_socket_of, witnessed
from tests.conformance.table import write_row
from tests.conformance.witness import Witness

SPEC = RunSpec(seed=1, batch=BatchSpec(tasks=64, group_size=2), sampling=SamplingSpec(max_tokens=256))


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the scripts play."""

    url: str
    token: str | None
    bare: Bare | None
    witness: Witness | None
    starts_run: bool


def main() -> int:
    args = _parser().parse_args()
    try:
        frameworks = declared(args.only)
    except UnknownFramework as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.resolve:
        for framework in frameworks:
            environments.resolve(framework)
            sys.stdout.write(f"{framework.name} {environments.version_of(framework)}\n")
        return 0
    for framework in frameworks:
        environments.python_of(framework)
    if args.install:
        return 0
    conforming = True
    with _stage(args) as stage, SwarmClient(stage.url, stage.token, client_id="conformance") as swarm:
        run_id = swarm.start_run(SPEC).run_id if stage.starts_run else None
        for framework in frameworks:
            judgement = rehearse(framework, swarm, run_id=run_id, bare=stage.bare, witness=stage.witness)
            conforming = conforming and judgement.conforms
            sys.stdout.write(json.dumps(_told(judgement)) + "\n")
            sys.stdout.flush()
            if args.table is not None:
                write_row(args.table, framework, judgement, declared())
    return 0 if conforming else 1


def _parser() -> Parser:
    parser = Parser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of frameworks.toml (default: all)")
    parser.add_argument("--base-url", metavar="URL", help="a swarm server with a run (default: start one here)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SWARM_TOKEN"),
        metavar="TOKEN",
        help="that server's client token (default: SWARM_TOKEN)",
    )
    parser.add_argument("--bare", metavar="URL", help="vLLM's own server, with /v1 (default: the one started here)")
    parser.add_argument("--bare-model", metavar="NAME", help="its name for the model (default: the first it lists)")
    parser.add_argument("--model", default="smollm2-135m", metavar="NAME", help="for the server that is started here")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results into this page")
    parser.add_argument("--install", action="store_true", help="make the environments and end")
    parser.add_argument("--resolve", action="store_true", help="choose versions anew, pin them and end")
    return parser


@contextlib.contextmanager
def _stage(args: Any) -> Iterator[Stage]:
    if args.base_url is not None:
        bare = None if args.bare is None else Bare(args.bare, args.bare_model or _first_model(args.bare))
        yield Stage(args.base_url.rstrip("/").removesuffix("/v1"), args.api_key, bare, None, starts_run=False)
        return
    witness = Witness()
    with contextlib.ExitStack() as held:
        scratch = held.enter_context(tempfile.TemporaryDirectory())
        options = ("--max-model-len", "8192", "--log-level", "warning")
        server = held.enter_context(ServerProcess(Path(scratch) / "state", *options, engine="local", model=args.model))
        real = held.enter_context(witnessed(vllm_socket_of(server.state_dir), witness))
        own = args.bare or held.enter_context(served_bare(real))
        with SwarmClient(server.url) as swarm:
            swarm.start_run(SPEC, idempotency_key="conformance")
            for status in swarm.statuses():
                if status.phase in ("rolling", "failed"):
                    break
        bare = Bare(own, args.bare_model or _first_model(own))
        yield Stage(server.url, None, bare, witness, starts_run=False)


def _first_model(base_url: str) -> str:
    return str(httpx.get(f"{base_url}/models", timeout=60).raise_for_status().json()["data"][0]["id"])


def _told(judgement: Judgement) -> dict[str, Any]:
    return asdict(judgement) | {"conforms": judgement.conforms, "same_answers": judgement.same_answers}


if __name__ == "__main__":
    sys.exit(main())
