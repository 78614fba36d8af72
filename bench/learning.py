"""Does an agent learn on two cores: do held-out rewards rise, compared with a control whose learning rate is zero?

`python -m bench.learning --what NAME [--seeds N] [--limit-s S] [--engine echo] [--results DIR]`: *mix* is the instrument
`cocktail` (three families of tasks, 40/30/30), *team* two models with a server each; *grpo*, *rloo*, *ppo*, *dapo* and *lora*
(GRPO on adapters) are `arithmetic`; so are *json*, *tool* and *top_p* (answers in a JSON schema, by a forced call of a tool, and drawn with
top-p 0.9), whose controls are their own. Trials run as `researcher start` runs them: held-out tasks before and after training,
equal for every seed. They come in turn (the first seed, then its control, then the next seed), so that both meet the same
conditions; what trains nothing is the same for all algorithms, which share their controls.

One JSON line per trial, kept in DIR/learning-INSTRUMENT.jsonl; what stands there already, for the same instrument and settings,
by the same engine and model, on the same device and in the same number type, is not run again, so that the whole may be done in
pieces (`--limit-s`: no trial begins after that). The echo engine learns nothing: it needs a DIR of its own. The last line sums up:
gain is held-out reward after training less before, mean over seeds; against is the mean of gain less the control's gain at
the same seed, with its 95 % t interval over seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import ValidationError
from scipy import stats

from bench.command import run
from bench.serving import ServerProcess
from foundation.arguments import count, number
from foundation.paths import visible_files
from foundation.strict import explain
from researcher.executor.collection import collect_whole
from researcher.instruments.catalogue import DECLARATION, OLD_DECLARATION, InstrumentFolder, read_instrument
from swarm.client import RunSpec, SwarmClient
from swarm.client.trial import client_id, run_blueprint
from swarm.engine.machine import compute_type, device_for
from swarm.protocol.blueprint import HeldOut, PartnerRun, TrialBlueprint
from swarm.protocol.runspec import merge_patch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_SUMS = "arithmetic"
WHAT: dict[str, tuple[str, dict[str, Any]]] = {
    "json": (_SUMS, {}),
    "tool": (_SUMS, {}),
    "top_p": (_SUMS, {}),
    "mix": ("cocktail", {}),
    "team": ("team", {}),
    "grpo": (_SUMS, {}),
    "rloo": (_SUMS, {"algorithm": {"name": "rloo"}}),
    "ppo": (_SUMS, {"algorithm": {"name": "ppo"}}),
    "dapo": (_SUMS, {"algorithm": {"name": "dapo"}}),
    "lora": (_SUMS, {"parameters": {"rank": 16, "alpha": 32.0}, "optimizer": {"learning_rate": 1e-3}}),
}
"""An instrument, and changes to its run's defaults that apply only to the learning arm."""
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json": ({"sampling": {"max_tokens": 24}}, {"answer": "json"}),
    "tool": ({"sampling": {"max_tokens": 48}}, {"answer": "tool"}),
    "top_p": ({"sampling": {"top_p": 0.9}}, {}),
}
"""Settings of both arms that change how the model is asked: changes to the run's defaults, and task parameters."""
ARMS = ("learning", "control")
CONTROL = {"optimizer": {"learning_rate": 0.0}}
MAIN = ""
"""Role of an instrument's main model."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where trials run: an engine with its model, a device, and the compute dtype."""

    engine: str
    model: str
    device: str
    dtype: str

    @classmethod
    def here(cls, trial: Trial, engine: str) -> Setting:
        """The setting of a server on this machine for this trial."""
        device = device_for(None) if engine == "local" else "cpu"
        default = compute_type(device) if engine == "local" else "float32"
        dtype = trial.spec(MAIN).computed_in(default).dtype
        return cls(engine, model_of(trial.folder, engine), device, dtype)

    def made(self, line: dict[str, Any]) -> bool:
        """Whether a kept line was measured in this setting."""
        return asdict(self).items() <= line.items()


@dataclass(frozen=True, slots=True)
class Trial:
    """One seed of one arm. changes: to the instrument's run defaults. task: changed parameters of its tasks."""

    folder: InstrumentFolder
    arm: str
    seed: int
    changes: dict[str, Any]
    task: dict[str, Any]

    def spec(self, role: str) -> RunSpec:
        defaults = self.folder.instrument.defaults
        fields = merge_patch(defaults.run, self.changes)
        if role != MAIN:
            fields = merge_patch(fields, self.folder.instrument.roles[role].run)
        if self.arm == "control":
            fields = merge_patch(fields, CONTROL)
        steps = fields.get("limits", {}).get("steps", defaults.steps)
        return RunSpec.model_validate(merge_patch(fields, {"seed": self.seed, "limits": {"steps": steps}}))

    @property
    def key(self) -> str:
        """Identifies the trial: the instrument's code, its defaults, and changes to them. Other declarations (names of factors,
        words) do not change a trial."""
        code = hashlib.sha256(self.folder.instrument.defaults.model_dump_json().encode())
        for name, file in visible_files(self.folder.path):
            if name not in (DECLARATION, OLD_DECLARATION):
                code.update(f"{name}\0".encode() + file.read_bytes())
        task = f"{json.dumps(self.task, sort_keys=True)}/" if self.task else ""
        return f"{code.hexdigest()[:16]}/{task}{json.dumps(self.changes, sort_keys=True)}/{self.arm}/{self.seed}"


async def carry_out(trial: Trial, urls: dict[str, str]) -> dict[str, Any]:
    """Run the trial on these servers, given by role; returns its results as one line."""
    began, runs = time.monotonic(), {}
    defaults, name = trial.folder.instrument.defaults, f"{trial.key}@{time.time():.0f}"
    clients = {role: SwarmClient(url, client_id=client_id(name)) for role, url in urls.items()}
    try:
        for role, swarm in clients.items():
            runs[role] = (await swarm.start_run(trial.spec(role))).run_id
        blueprint = TrialBlueprint(
            trial_key=name,
            server_url=urls[MAIN],
            run_id=runs[MAIN],
            partners={
                role: PartnerRun(server_url=urls[role], run_id=run_id) for role, run_id in runs.items() if role != MAIN
            },
            instrument_dir=str(trial.folder.path),
            workflow=trial.folder.instrument.workflow,
            code_version=trial.folder.code,
            parameters=defaults.task | trial.task,
            seed=trial.seed,
            group_size=trial.spec(MAIN).batch.group_size,
            concurrency=defaults.concurrency,
            heldout=HeldOut(
                tasks=defaults.heldout_tasks,
                episodes=defaults.heldout_episodes,
                temperature=defaults.heldout_temperature,
            ),
        )
        await run_blueprint(blueprint, token=None, out=io.StringIO())
        others = {role: swarm for role, swarm in clients.items() if role != MAIN}
        series = (await collect_whole(clients[MAIN], others, blueprint)).series
        for role, swarm in clients.items():
            await swarm.stop_run(runs[role])
    finally:
        for swarm in clients.values():
            await swarm.close()
    seconds = round(time.monotonic() - began, 1)
    return {"key": trial.key, "arm": trial.arm, "seed": trial.seed, "seconds": seconds, **_told(series, runs)}


def _told(series: dict[str, list[tuple[int, float]]], runs: dict[str, str]) -> dict[str, Any]:
    """Held-out means and learning curves. Those of further models are nested under their roles."""
    told: dict[str, Any] = {}
    for role in runs:
        before = role and f"{role}/"
        values = {name: [value for _, value in series[f"{before}{name}"]] for name in ("reward_mean", "weights_change")}
        own = {
            "heldout_before": round(fmean(value for _, value in series[f"{before}eval_reward_before"]), 4),
            "heldout_after": round(fmean(value for _, value in series[f"{before}eval_reward_after"]), 4),
            "curve": [round(value, 4) for value in values["reward_mean"]],
            "weights_changed": any(change > 0 for change in values["weights_change"]),
        }
        told |= {role: own} if role else own
    return told


def summary(what: str, lines: Sequence[dict[str, Any]], role: str = MAIN) -> dict[str, Any]:
    """Gains of one model, alone and relative to the control at the same seeds."""
    gains = {
        (line["arm"], line["seed"]): own["heldout_after"] - own["heldout_before"]
        for line in lines
        for own in [line[role] if role else line]
    }
    seeds = sorted({seed for arm, seed in gains if all((each, seed) in gains for each in ARMS)})
    told: dict[str, Any] = {"bench": "learning", "what": what, "role": role or "main", "seeds": len(seeds)}
    if not seeds:
        return told
    against = [gains["learning", seed] - gains["control", seed] for seed in seeds]
    for arm in ARMS:
        told[f"gain_{arm}"] = round(fmean(gains[arm, seed] for seed in seeds), 4)
    told |= {"against": round(fmean(against), 4), "rose_in": sum(value > 0 for value in against)}
    if len(seeds) > 1:
        half = float(stats.t.ppf(0.975, len(seeds) - 1)) * stdev(against) / math.sqrt(len(seeds))
        told |= {"against_low": round(fmean(against) - half, 4), "against_high": round(fmean(against) + half, 4)}
    return told


def trials(
    folder: InstrumentFolder,
    seeds: int,
    changes: dict[str, Any],
    learning: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
) -> Iterator[Trial]:
    """Trials of both arms. changes, task: for both arms. learning: changes for the learning arm only."""
    for seed in range(seeds):
        for arm in ARMS:
            own = changes if arm == "control" else merge_patch(changes, learning or {})
            yield Trial(folder, arm, seed, own, task or {})


def model_of(folder: InstrumentFolder, engine: str) -> str:
    return folder.instrument.model if engine == "local" else "echo"


def serve(folder: InstrumentFolder, setting: Setting, scratch: Path, stack: ExitStack) -> dict[str, str]:
    """Start a server for every model of the instrument; returns URLs by role. Sequential, so that each server sees the free memory."""
    urls: dict[str, str] = {}
    longest = folder.instrument.defaults.run.get("max_model_len")
    arguments = ["--log-level", "warning", *(["--max-model-len", str(longest)] if longest else [])]
    for role in (MAIN, *folder.instrument.roles):
        server = ServerProcess(scratch / f"server-{role}", *arguments, engine=setting.engine, model=setting.model)
        urls[role] = stack.enter_context(server).url
        asyncio.run(_ready(urls[role], setting))
    return urls


async def _ready(url: str, setting: Setting) -> None:
    async with SwarmClient(url) as swarm:
        async for status in swarm.statuses():
            if status.phase == "failed":
                raise SystemExit(f"{url}: {status.failed.reason if status.failed else 'its engine failed'}")
            if status.phase != "booting":
                if status.engine.device != setting.device:
                    raise SystemExit(
                        f"{url}: computes on {status.engine.device}, and was to compute on {setting.device}"
                    )
                return


def as_changes(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises: ArgumentTypeError."""
    try:
        changes = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error
    if not isinstance(changes, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return changes


def faults(wanted: Sequence[Trial]) -> str:
    """Faults in the runs of these trials, as text; empty if there are none."""
    try:
        for trial in wanted:
            for role in (MAIN, *trial.folder.instrument.roles):
                trial.spec(role)
    except ValidationError as error:
        return "; ".join(str(fault) for fault in explain(error, RunSpec))
    return ""


def parsed() -> tuple[argparse.Namespace, list[Trial]]:
    """Parse the options; returns them and the requested trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=sorted(WHAT), required=True)
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--engine", choices=("local", "echo"), default="local")
    parser.add_argument("--limit-s", type=number, default=math.inf, help="begin no trial after that")
    parser.add_argument("--set", type=as_changes, default={}, metavar="JSON", help="changes to the run's defaults")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    if args.engine == "echo" and args.results.resolve() == RESULTS:
        parser.error(
            "--engine echo: its figures do not belong among the measured ones; name another folder by --results"
        )
    study, learning = WHAT[args.what]
    asked, task = ASKED.get(args.what, ({}, {}))
    folder = read_instrument(ROOT / "studies" / study)
    wanted = list(trials(folder, args.seeds, merge_patch(asked, args.set), learning, task))
    if wrong := faults(wanted):
        parser.error(f"--set: {wrong}")
    return args, wanted


def kept(file: Path, setting: Setting) -> dict[str, dict[str, Any]]:
    """Kept lines of a file that were measured in this setting, by key."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["key"]: line for line in lines if setting.made(line)}


def main() -> None:
    args, wanted = parsed()
    began, folder = time.monotonic(), wanted[0].folder
    setting = Setting.here(wanted[0], args.engine)
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / f"learning-{folder.path.name}.jsonl"
    known = kept(file, setting)
    lines = {trial.key: known[trial.key] for trial in wanted if trial.key in known}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        urls: dict[str, str] = {}
        for trial in wanted:
            if trial.key in lines or time.monotonic() - began > args.limit_s:
                continue
            urls = urls or serve(folder, setting, Path(scratch), stack)
            lines[trial.key] = line = asyncio.run(carry_out(trial, urls)) | asdict(setting)
            with file.open("a") as results:
                results.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    for role in (MAIN, *folder.instrument.roles):
        print(json.dumps(summary(args.what, list(lines.values()), role) | asdict(setting)))


if __name__ == "__main__":
    sys.exit(run(main))
