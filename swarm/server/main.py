"""`swarm serve`: host one trainable model. This is the only module that names concrete engines.

It is cheap to import: starlette, uvicorn and the engines are imported only when a server starts. The control process never
imports torch or vllm.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.arguments import count, number, port

if TYPE_CHECKING:
    from foundation.clock import Clock
    from swarm.engine.devices import Layout
    from swarm.engine.local.engine import LocalEngine
    from swarm.engine.seam import Engine
    from swarm.models import ModelFolder
    from swarm.server.process import Settings
    from swarm.server.state_dir import StateDir

    MakeEngine = Callable[[StateDir, Clock], Engine]
    _MakeOf = Callable[[ModelFolder, StateDir, Clock], Engine]
    _Hosted = tuple[str, MakeEngine]

DEFAULT_PORT = 8642
ECHO_MODEL_LEN = 32_768


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the `serve` command. Tokens come from SWARM_ADMIN_TOKEN, SWARM_CLIENT_TOKEN or files, never from arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="host a trainable model",
        description="Host a trainable model until SIGTERM or SIGINT. A killed server resumes from its state directory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="a model that `swarm models` lists, or a folder; any name for echo"
    )
    parser.add_argument(
        "--engine",
        choices=("local", "verl", "echo"),
        default="local",
        help="local: one machine; verl: GPU nodes on Ray, experimental (docs/verl.md); echo: no model, for trying things out",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="local: the device to compute on (default: a GPU if vLLM can use one, else the CPU)",
    )
    parser.add_argument(
        "--trainer-device",
        metavar="D",
        help="local: the device that trains, given together with --inference-devices: cuda:0 or cpu (docs/gpu.md)",
    )
    parser.add_argument(
        "--inference-devices",
        metavar="D,D,...",
        help="local: devices that sample, each with a replica of vLLM: cuda:1,cuda:2; cpu:0,cpu:1 means two on this CPU",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="local, verl: precision to compute in (default: bfloat16; local, on CPUs without fast bfloat16: float32)",
    )
    parser.add_argument(
        "--enable-sleep-mode",
        action=argparse.BooleanOptionalAction,
        help="local, verl, on GPUs: inference sleeps and frees its memory while a step is trained (docs/gpu.md, docs/verl.md; "
        "default: only with local, if both do not fit in memory together)",
    )
    parser.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="local, on a GPU: keep the optimizer's moments and the reference weights of the KL in the machine's memory, which "
        "makes a step slower (docs/gpu.md; default: if nothing else fits)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=count,
        metavar="N",
        help="local, verl: maximum number of sequences that a replica samples concurrently (default: 64 on CPUs; 256 on GPUs, or, "
        "with local, as many as fit)",
    )
    parser.add_argument(
        "--kv-cache-gib",
        type=_gib,
        metavar="N",
        help="local: memory for keys and values, in GiB (default: what is left)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        metavar="SHARE",
        help="local, on a GPU: share of its memory for inference, as in vLLM (default: what is left); or use --kv-cache-gib",
    )
    parser.add_argument(
        "--plan",
        type=_gib,
        nargs="?",
        const=0.0,
        metavar="GIB",
        help="print how memory would be divided, and exit; downloads the model first if it is not cached and its shape is unknown "
        "(Qwen3's is known); GIB: plan for a GPU with this much memory, which this machine does not need to have",
    )
    parser.add_argument("--host", default="127.0.0.1", help="any host but loopback needs tokens (default 127.0.0.1)")
    parser.add_argument("--port", type=port, default=DEFAULT_PORT, help="0 picks a free port (default %(default)s)")
    parser.add_argument(
        "--public-url", type=_url, metavar="URL", help="the server's address for clients, if it is behind a proxy"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_url,
        metavar="URL",
        help="a server that may decide for teams with a member on this server; repeatable",
    )
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="default: a folder per model in the user data directory"
    )
    parser.add_argument("--max-model-len", type=count, metavar="N", help="maximum length of prompt + answer, in tokens")
    parser.add_argument(
        "--agentjet-prefix",
        metavar="FILE",
        help="serve AgentJet's clients too, under the two secret prefixes in this file (docs/guides/from-agentjet.md); "
        "none: at the root, without a secret, only on loopback",
    )
    parser.add_argument(
        "--allow-algorithms",
        action="store_true",
        help="execute the algorithm functions that runs bring along (docs/reference/algorithms.md); needs an admin token",
    )
    parser.add_argument("--admin-token-file", type=Path, metavar="FILE")
    parser.add_argument("--client-token-file", type=Path, metavar="FILE")
    parser.add_argument(
        "--echo-latency-s", type=_latency, metavar="S", help="echo: seconds before the first token (default 0)"
    )
    parser.add_argument(
        "--echo-tokens-per-s", type=_pace, metavar="N", help="echo: tokens per second (default: no limit)"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--json", action="store_true", help="print one JSON line with the URL when ready to answer")
    _add_verl_options(parser)
    parser.set_defaults(run="swarm.server.main:serve")
    return parser


def _add_verl_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that fill a `VerlLayout`; see docs/verl.md."""
    group = parser.add_argument_group("verl", "only for --engine verl")
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="a running Ray cluster (default: the server starts one)"
    )
    group.add_argument("--verl-nodes", type=count, metavar="N", help="nodes of the cluster to use (default 1)")
    group.add_argument("--verl-ranks", type=count, metavar="N", help="devices to use on each node (default 1)")
    group.add_argument("--verl-tensor-parallel", type=count, metavar="N", help="devices of each replica (default 1)")
    group.add_argument(
        "--verl-sampling-memory",
        type=float,
        metavar="SHARE",
        help="share of a device's memory for sampling (default 0.45)",
    )
    group.add_argument(
        "--verl-kv-cache-gib",
        type=float,
        metavar="N",
        help="instead of the share: memory for a replica's keys and values, in GiB per device",
    )
    group.add_argument(
        "--verl-tokens-per-rank",
        type=count,
        metavar="N",
        help="tokens of one micro-batch (default 4096, or --max-model-len if that is more)",
    )
    group.add_argument(
        "--verl-offload",
        nargs="+",
        choices=("parameters", "optimizer"),
        help="what ranks keep in the machine's memory while they do not use it for computing",
    )
    group.add_argument(
        "--verl-fused-kernels",
        choices=("torch", "triton"),
        help="verl's kernels for log-probabilities, which do not hold the whole distribution over tokens in memory (triton: on GPUs)",
    )


def serve(args: argparse.Namespace) -> int:
    """Host a trainable model until SIGTERM or SIGINT. A server that was killed resumes from its state directory.

    Raises: SwarmError with a one-line message if the server cannot start or has to stop.
    """
    from foundation import logs
    from foundation.clock import SystemClock
    from foundation.ids import RandomIds
    from swarm.server.process import run_server
    from swarm.server.state_dir import StateDir

    if args.model is None:
        args.model = _model_of(args.engine)
    logs.configure(args.log_level)
    if args.plan is not None:
        _refuse_strange_options(args)
        _print_plan(args)
        return 0
    clock, settings = SystemClock(), _settings(args)
    with settings.listen() as listener:
        _refuse_strange_options(args)
        model, engine = _hosted(args)
        with StateDir.open(_state_path(args), model=model) as state:
            return run_server(settings, listener, state, engine(state, clock), clock, RandomIds())


def _model_of(engine: str) -> str:
    """Return the engine's default model. Raises: UsageError for engines that have no default."""
    from foundation.commandline import UsageError

    if engine != "echo":
        raise UsageError("--model is missing: name a model that `swarm models` lists, or a folder")
    return "echo"


def _settings(args: argparse.Namespace) -> Settings:
    from swarm.server.agentjet.prefix import AT_ROOT, Prefixes
    from swarm.server.keys import ControlTokens
    from swarm.server.process import Settings

    agentjet = args.agentjet_prefix
    if agentjet is not None:
        agentjet = AT_ROOT if agentjet == "none" else Prefixes.load(Path(agentjet))
    tokens = ControlTokens.load(os.environ, args.admin_token_file, args.client_token_file)
    return Settings(
        host=args.host,
        port=args.port,
        tokens=tokens,
        public_url=args.public_url,
        peers=tuple(args.peer),
        agentjet=agentjet,
        print_json=args.json,
        allow_algorithms=args.allow_algorithms,
    )


_ENGINES_OF = {
    "device": ["local"],
    "trainer_device": ["local"],
    "inference_devices": ["local"],
    "max_num_seqs": ["local", "verl"],
    "kv_cache_gib": ["local"],
    "gpu_memory_utilization": ["local"],
    "plan": ["local"],
    "enable_sleep_mode": ["local", "verl"],
    "offload": ["local"],
    "ray_address": ["verl"],
    "dtype": ["local", "verl"],
}


def _refuse_strange_options(args: argparse.Namespace) -> None:
    """Refuse options that do not apply to the chosen engine. Raises: UsageError."""
    from foundation.commandline import UsageError

    for name, given in vars(args).items():
        prefix = name.partition("_")[0]
        engines = [prefix] if prefix in ("echo", "verl") else _ENGINES_OF.get(name, [])
        if engines and args.engine not in engines and given is not None:
            option, fit = "--" + name.replace("_", "-"), " or ".join(engines)
            raise UsageError(f"{option} is for --engine {fit}, but this is --engine {args.engine}: leave one out")


def _hosted(args: argparse.Namespace) -> _Hosted:
    """Return the model's name and a function that creates its engine. Raises: SwarmError if there is no such model."""
    if args.engine == "echo":

        def echo(state: StateDir, clock: Clock) -> Engine:
            state.note_model(None, None)
            return _echo(args, clock)

        return args.model, echo
    from swarm.models import resolve

    make = _local(args) if args.engine == "local" else _verl(args)
    folder = resolve(args.model)

    def engine(state: StateDir, clock: Clock) -> Engine:
        state.note_model(folder.path, folder.fingerprint)
        return make(folder, state, clock)

    return f"{folder.name}@{folder.fingerprint[:12]}", engine


def _echo(args: argparse.Namespace, clock: Clock) -> Engine:
    from swarm.engine.echo.engine import EchoEngine

    return EchoEngine(
        model=args.model,
        max_model_len=args.max_model_len or ECHO_MODEL_LEN,
        latency_s=args.echo_latency_s or 0.0,
        tokens_per_s=args.echo_tokens_per_s,
        clock=clock,
    )


def _local(args: argparse.Namespace) -> _MakeOf:
    devices = _layout(args)

    def engine(folder: ModelFolder, state: StateDir, clock: Clock) -> Engine:
        return _local_engine(args, devices, folder, state.logs_dir, clock)

    return engine


def _layout(args: argparse.Namespace) -> Layout:
    """Return the devices that the engine uses. Raises: UsageError; EngineError if this machine lacks one of them."""
    from foundation.commandline import UsageError
    from swarm.engine.devices import DeviceName, Layout
    from swarm.engine.machine import device_for

    trainer, inference = args.trainer_device, args.inference_devices
    if (trainer is None) != (inference is None):
        raise UsageError("--trainer-device and --inference-devices belong together: give both or neither")
    if args.plan:
        layout = Layout.one("cuda")
    elif trainer is None:
        layout = Layout.one(device_for(args.device))
    elif args.device is not None:
        raise UsageError(
            "--device sets one device for training and inference: leave it out with --trainer-device and --inference-devices"
        )
    else:
        try:
            layout = Layout(
                trainer=DeviceName.parse(trainer), inference=tuple(map(DeviceName.parse, inference.split(",")))
            )
        except ValueError as error:
            raise UsageError(f"--trainer-device, --inference-devices: {error}") from error
        layout.require(os.environ)
    for name in ("enable_sleep_mode", "offload", "gpu_memory_utilization"):
        if layout.kind == "cpu" and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} needs a GPU, but this engine computes on the CPU: leave it out")
    if args.kv_cache_gib is not None and args.gpu_memory_utilization is not None:
        raise UsageError("--kv-cache-gib and --gpu-memory-utilization both set the memory for inference: leave one out")
    if args.enable_sleep_mode and not layout.shared:
        raise UsageError(
            "--enable-sleep-mode is for one GPU that inference and the trainer share, but here each has its own: leave it out"
        )
    return layout


def _local_engine(
    args: argparse.Namespace, devices: Layout, folder: ModelFolder, logs: Path, clock: Clock
) -> LocalEngine:
    """Create the local engine. Raises: EngineError if the model does not fit on the GPU."""
    from foundation.machine import total_memory
    from swarm.engine.local.engine import LocalEngine

    return LocalEngine(
        folder,
        logs=logs,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        devices=devices,
        dtype=args.dtype,
        card=int(args.plan * (1 << 30)) if args.plan else _least_card(devices),
        memory=None if args.plan else total_memory(),
        sleep_mode=args.enable_sleep_mode,
        offload=args.offload,
        kv_cache_bytes=None if args.kv_cache_gib is None else int(args.kv_cache_gib * (1 << 30)),
        gpu_memory_utilization=args.gpu_memory_utilization,
        clock=clock,
    )


def _least_card(devices: Layout) -> int | None:
    """Return the memory of the smallest of these GPUs, in bytes; None for CPUs, or if the driver does not say."""
    from foundation.gpus import cards

    if devices.kind == "cpu":
        return None
    named = {name for device in devices.all for name in device.environment(os.environ).values()}
    return min((card.total for card in cards() if str(card.index) in named), default=None)


def _print_plan(args: argparse.Namespace) -> None:
    """Print how the memory would be divided. Raises: SwarmError if the model does not fit."""
    from tempfile import TemporaryDirectory

    from foundation.clock import SystemClock
    from swarm.models import resolve_to_plan

    with TemporaryDirectory() as outlines:
        model = resolve_to_plan(args.model, Path(outlines))
        engine = _local_engine(args, _layout(args), model, Path(), SystemClock())
        lines = [str(engine.plans)] if engine.plans is not None else []
        sys.stdout.write("\n".join([*lines, f"{engine.info.model} takes {engine.estimate()}", ""]))


def _verl(args: argparse.Namespace) -> _MakeOf:
    from swarm.engine.verl.engine import VerlEngine, VerlLayout

    layout = VerlLayout(
        max_model_len=args.max_model_len,
        ray_address=args.ray_address,
        nodes=args.verl_nodes,
        ranks_per_node=args.verl_ranks,
        tensor_parallel=args.verl_tensor_parallel,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        sampling_memory=args.verl_sampling_memory,
        kv_cache_bytes=None if args.verl_kv_cache_gib is None else int(args.verl_kv_cache_gib * (1 << 30)),
        tokens_per_rank=args.verl_tokens_per_rank,
        sleep=args.enable_sleep_mode,
        offload=None if args.verl_offload is None else frozenset(args.verl_offload),
        fused_kernels=args.verl_fused_kernels,
    )
    return lambda folder, state, clock: VerlEngine(folder, layout, logs=state.logs_dir, clock=clock)


def _state_path(args: argparse.Namespace) -> Path:
    from foundation.paths import user_data_dir

    if args.state_dir is not None:
        return Path(args.state_dir).expanduser().resolve()
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in Path(args.model).name)
    return user_data_dir() / "servers" / (name if args.engine == "local" else f"{name}-{args.engine}")


def _gib(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number of GiB above 0, got {text}")
    return value


def _share(text: str) -> float:
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be a URL such as http://10.0.0.2:8642, got {text!r}")
    return text.rstrip("/")


def _latency(text: str) -> float:
    seconds = number(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return seconds


def _pace(text: str) -> float:
    tokens_per_s = number(text)
    if not 0 < tokens_per_s < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 (leave it out for no limit), got {text}")
    return tokens_per_s
