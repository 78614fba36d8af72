"""Does an agent of this framework train here unchanged? `python -m tests.conformance` runs one script per framework.

Each script knows a base_url, an api_key and a model. It runs in an environment of its own, once on bare vLLM and once in
an episode of a swarm server; then the episode's trace is compared with what vLLM sampled, and with the framework's row in
frameworks.toml. With `--train` it runs twice in episodes of a run, at the run's temperature, and these make an optimiser
step. Ends with 1 when a framework does not conform, or too little of what was sampled is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serving import ServerProcess
from foundation.commandline import Parser
from swarm.client.sync import SwarmClient
from swarm.protocol.runspec import BatchSpec, RunSpec, SamplingSpec
from swarm.protocol.status import Phase
from tests.conformance import environments
from tests.conformance.frameworks import Framework, UnknownFramework, declared
from tests.conformance.rehearsal import Bare, rehearse
from tests.conformance.relay import served_bare, vllm_socket_of, witnessed
from tests.conformance.table import write_judgement, write_trained
from tests.conformance.training import LEAST_SHARE, share_of, spec_of, train_on
from tests.conformance.witness import Witness

SPEC = RunSpec(seed=1, batch=BatchSpec(tasks=64, group_size=2), sampling=SamplingSpec(max_tokens=256))


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the scripts play."""

    url: str
    token: str | None
    bare: Bare | None
    witness: Witness | None


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.train and (args.base_url or args.bare):
        parser.error("--train plays on a server that is started here: leave out --base-url and --bare")
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
    return _train(frameworks, args) if args.train else _record(frameworks, args)


def _record(frameworks: Sequence[Framework], args: Any) -> int:
    conforming = True
    with _stage(args) as stage, SwarmClient(stage.url, stage.token, client_id="conformance") as swarm:
        for framework in frameworks:
            judgement = rehearse(framework, swarm, bare=stage.bare, witness=stage.witness)
            conforming = conforming and judgement.conforms
            _say(asdict(judgement) | {"conforms": judgement.conforms, "same_answers": judgement.same_answers})
            if args.table is not None:
                write_judgement(args.table, framework, judgement, declared())
    return 0 if conforming else 1


def _train(frameworks: Sequence[Framework], args: Any) -> int:
    all_trained = []
    with _server(args) as server, SwarmClient(server.url, client_id="conformance") as swarm:
        run_id = swarm.start_run(spec_of()).run_id
        _await_rolling(swarm)
        for framework in frameworks:
            trained = train_on(framework, swarm, run_id)
            all_trained.append(trained)
            _say(asdict(trained) | {"share": trained.share, "faults": trained.faults})
            if args.table is not None:
                write_trained(args.table, framework, trained, declared())
    share = share_of(all_trained)
    _say({"share": share, "at_least": LEAST_SHARE})
    return 0 if share >= LEAST_SHARE and not any(trained.faults for trained in all_trained) else 1


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
    parser.add_argument("--train", action="store_true", help="what is trained at a temperature of 1, by a step each")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results into this page")
    parser.add_argument("--install", action="store_true", help="make the environments and end")
    parser.add_argument("--resolve", action="store_true", help="choose versions anew, pin them and end")
    return parser


@contextlib.contextmanager
def _stage(args: Any) -> Iterator[Stage]:
    if args.base_url is not None:
        bare = None if args.bare is None else Bare(args.bare, args.bare_model or _first_model(args.bare))
        yield Stage(args.base_url.rstrip("/").removesuffix("/v1"), args.api_key, bare, None)
        return
    witness = Witness()
    with contextlib.ExitStack() as held:
        server = held.enter_context(_server(args))
        real = held.enter_context(witnessed(vllm_socket_of(server.state_dir), witness))
        own = args.bare or held.enter_context(served_bare(real))
        with SwarmClient(server.url) as swarm:
            swarm.start_run(SPEC, idempotency_key="conformance")
            _await_rolling(swarm)
        bare = Bare(own, args.bare_model or _first_model(own))
        yield Stage(server.url, None, bare, witness)


@contextlib.contextmanager
def _server(args: Any) -> Iterator[ServerProcess]:
    options = ("--max-model-len", "8192", "--log-level", "warning")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess(Path(scratch) / "state", *options, engine="local", model=args.model) as server,
    ):
        yield server


def _await_rolling(swarm: SwarmClient) -> None:
    for status in swarm.statuses():
        if status.phase in (Phase.ROLLING, Phase.FAILED):
            return


def _first_model(base_url: str) -> str:
    return str(httpx.get(f"{base_url}/models", timeout=60).raise_for_status().json()["data"][0]["id"])


def _say(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
