"""How big is the code, how is it built, and how many of its files does one chat request pass?

Prints a JSON line for each package: files, lines, functions and how long they are, the share of functions whose arguments and result
all have types, and modules that import one another in a circle. `--trace` serves a tiny model for real (vLLM and the trainer), asks one
chat request, rewards it, and lists the project's files that were entered in any of the server's processes from the request until the
trained weights are served; what runs by itself meanwhile (leases, health) counts as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import networkx

from bench.command import run
from bench.gpu_check import TINY, make_model
from bench.serving import ServerProcess
from foundation.paths import packages_root

ROOT = packages_root()
PACKAGES = ("foundation", "swarm", "researcher", "studies", "bench", "tests")
_LONG_FILE, _LONG_FUNCTION = 450, 60
_TRACER = """
import atexit, os, pathlib, sys, threading, time
folder, root = pathlib.Path({folder!r}), {root!r}
entered, counting = set(), False
def note(frame, event, argument):
    if counting and event == "call":
        entered.add(frame.f_code.co_filename)
def watch():
    global counting
    while True:
        counting = (folder / "on").exists()
        if (folder / "off").exists():
            break
        time.sleep(0.01)
    found = sorted(name for name in entered if name.startswith(root))
    (folder / f"{{os.getpid()}}.files").write_text("\\n".join(found))
threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""
_LIMIT_S = 300.0


def figures(package: str, root: Path = ROOT) -> dict[str, Any]:
    """Figures of one package of the project, without its data files."""
    files = sorted((root / package).rglob("*.py"))
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    lines = {file: source.count("\n") for file, source in sources.items()}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    return {
        "package": package,
        "files": len(files),
        "lines": sum(lines.values()),
        "files_under_60": sum(count < 60 for count in lines.values()),
        "long_files": {str(file.relative_to(root)): count for file, count in lines.items() if count > _LONG_FILE},
        "functions": len(functions),
        "function_median": median(lengths) if lengths else 0,
        "function_p90": quantiles(lengths, n=10)[-1] if len(lengths) > 1 else 0,
        "long_functions": sum(length > _LONG_FUNCTION for length in lengths),
        "typed": round(sum(map(_is_typed, functions)) / max(1, len(functions)), 4),
        "cycles": cycles(trees, root),
    }


def cycles(trees: dict[Path, ast.Module], root: Path) -> list[list[str]]:
    """Import cycles between modules at load time. Imports inside functions or for types do not count."""
    graph = networkx.DiGraph()
    modules = {_module_of(file, root): tree for file, tree in trees.items()}
    for name, tree in modules.items():
        for wanted in _imported(tree.body, name):
            while wanted and wanted not in modules:
                wanted = wanted.rpartition(".")[0]
            if wanted and wanted != name and not name.startswith(wanted + "."):
                graph.add_edge(name, wanted)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def _imported(body: Sequence[ast.stmt], module: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            yield from (f"{base}{node.module or ''}.{alias.name}".strip(".") for alias in node.names)
        elif isinstance(node, ast.Try):
            yield from _imported(node.body, module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _imported([*node.body, *node.orelse], module)


def _module_of(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_typed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    named = [one for one in arguments if one is not None and one.arg not in ("self", "cls")]
    return node.returns is not None and all(one.annotation is not None for one in named)


# -- one request ------------------------------------------------------------------------------------------------------


def traced(scratch: Path) -> dict[str, Any]:
    """The project's files that run for one rewarded chat request, without those of clients and of the echo engine."""
    folder = scratch / "trace"
    folder.mkdir()
    (scratch / "site").mkdir()
    (scratch / "site" / "sitecustomize.py").write_text(_TRACER.format(folder=str(folder), root=str(ROOT)))
    make_model(scratch / "model", TINY, "cpu")
    environ = {"PYTHONPATH": os.pathsep.join([str(scratch / "site"), str(ROOT)])}
    options = ("--max-model-len", "512")
    with (
        ServerProcess(
            scratch / "state", *options, engine="local", model=str(scratch / "model"), environ=environ
        ) as server,
        server.client() as http,
    ):
        _wait(http, lambda status: status["engine"]["warm"])
        spec = {"batch": {"tasks": 1, "group_size": 2}, "sampling": {"max_tokens": 8}}
        started = http.post("/swarm/v1/runs", json={"spec": spec})
        run_id = started.raise_for_status().json()["run_id"]
        _wait(http, lambda status: status["phase"] == "rolling")
        first, second = _claim(http, run_id), _claim(http, run_id)
        _ask(first)
        _end(http, first, 0.0)
        with _counting(folder):
            _ask(second)
            _end(http, second, 1.0)
            _wait(http, lambda status: status["step"] == 1 and status["phase"] == "rolling")
        (folder / "off").touch()
        time.sleep(1.0)
    found = {name for file in folder.glob("*.files") for name in file.read_text().split("\n") if name}
    ours = sorted(str(Path(name).relative_to(ROOT)) for name in found if "/.venv/" not in name)
    return {"trace": "chat request to published weights", "files": len(ours), "entered": ours}


@contextmanager
def _counting(folder: Path) -> Iterator[None]:
    (folder / "on").touch()
    time.sleep(0.1)
    yield
    (folder / "on").unlink()


def _wait(http: httpx.Client, reached: Any) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not reached(status := http.get("/swarm/v1/status").json()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server never got there: {status}")
        time.sleep(0.2)


def _claim(http: httpx.Client, run_id: str) -> dict[str, Any]:
    body = {"run_id": run_id, "client_id": "house", "task_id": "sum"}
    return dict(http.post("/swarm/v1/episodes:claim", json=body).raise_for_status().json())


def _ask(episode: dict[str, Any]) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 1+2?"}]}
    key = {"authorization": f"Bearer {episode['api_key']}"}
    httpx.post(f"{episode['base_url']}/chat/completions", json=body, headers=key, timeout=60).raise_for_status()


def _end(http: httpx.Client, episode: dict[str, Any], reward: float) -> None:
    body = {"lease": episode["lease"], "reward": reward}
    http.post(f"/swarm/v1/episodes/{episode['episode_id']}:end", json=body).raise_for_status()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", action="store_true", help="follow one request, too (half a minute)")
    args = parser.parse_args()
    for package in PACKAGES:
        print(json.dumps(figures(package)), flush=True)
    if args.trace:
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch:
            print(json.dumps(traced(Path(scratch))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
