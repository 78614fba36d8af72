"""Did a benchmark's ratio get worse than its kept result?

`python -m bench.gate NAME…` runs benchmarks, one after the other, and passes their lines on. It fails when one of them fails, or when the
ratio of its last line is worse than that of its kept result (bench/results/NAME.jsonl) by more than the tolerance in `GATES`. Only
ratios are compared, both sides of which were measured in one run: seconds differ from machine to machine. With `--keep` the lines
become the kept result instead, the last one with the commit that was measured; then `python -m bench.page` writes docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.command import run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gate:
    """A gated ratio in a benchmark's last line. tolerance: how much worse it may be, as a share of the kept ratio.

    same: fields that say what was measured. If one differs from the kept line, the ratios are not compared.
    """

    ratio: str
    says: str
    tolerance: float
    better: Literal["higher", "lower"] = "higher"
    same: tuple[str, ...] = ()

    def worse(self, found: float, kept: float) -> bool:
        """Whether the new ratio is worse than the kept one by more than the tolerance."""
        if self.better == "higher":
            return found < kept * (1 - self.tolerance)
        return found > kept * (1 + self.tolerance)


GATES = {
    "boot": Gate("ratio", "boot with a spawned core ÷ with a forked one", 0.15),
    "episode_end": Gate("ratio", "episodes per second of 32 clients ÷ of one", 0.40),
    "run_switch": Gate("ratio", "boot of the server ÷ switch to the next run", 0.40),
    "grpo_step": Gate("ratio", "TRL's step ÷ ours", 0.20, same=("dtype", "trl_precision")),
    "tree_training": Gate(
        "ratio_vs_merged", "gradient of *groups* on merged timelines ÷ on the tree", 0.15, same=("dtype",)
    ),
    "async_overlap": Gate("ratio", "episodes per hour with staleness 1 ÷ with 0", 0.20),
    "gateway_overhead": Gate("ratio", "tokens per second through the gateway ÷ straight to vLLM", 0.08),
    "swarm_scale": Gate("ratio", "episodes per second of 1,000 clients ÷ of 10", 0.50),
}
"""Gates by benchmark. Tolerances cover the spread of repetitions, which is largest if the two sides are not measured in turns."""
OWN_BARS = {"false_positives"}
"""Benchmarks whose exit code already says whether they met their bars."""


def summary(lines: Sequence[Line], name: str) -> Line | None:
    """The last line of a benchmark by this name."""
    return next((line for line in reversed(lines) if line.get("bench") == name), None)


def kept(name: str) -> list[Line]:
    """The kept lines; empty if there are none."""
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def judged(name: str, found: Line | None, before: Line | None) -> Line:
    """Compare a benchmark's last line with the kept one; returns `ok` and the reason."""
    if name in OWN_BARS:
        return {"gate": name, "ok": True, "why": "its bars are its own"}
    gate = GATES[name]
    if found is None or gate.ratio not in found:
        return {"gate": name, "ok": False, "why": f"its last line has no {gate.ratio!r}"}
    if before is None or gate.ratio not in before:
        why = f"nothing was kept to compare with: keep it by `python -m bench.gate --keep {name}`"
        return {"gate": name, "ok": False, "why": why}
    now, then = float(found[gate.ratio]), float(before[gate.ratio])
    line: Line = {"gate": name, "ratio": now, "kept": then}
    other = [field for field in gate.same if found.get(field) != before.get(field)]
    if other:
        return line | {"ok": True, "why": f"not compared: the kept line has another {' and another '.join(other)}"}
    worse = gate.worse(now, then)
    why = f"{gate.says}: {gate.better} is better, {gate.tolerance:.0%} worse is allowed"
    return line | {"ok": not worse, "why": why}


def measured(name: str) -> tuple[int, list[Line]]:
    """Run a benchmark and print its lines as they come; returns its exit code and its lines."""
    lines = []
    with subprocess.Popen([sys.executable, "-m", f"bench.{name}"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        try:
            for text in made.stdout:
                print(text, end="", flush=True)
                lines.append(json.loads(text))
        except BaseException:  # such as a signal: the benchmark ends its own servers
            made.terminate()
            raise
    return made.returncode, lines


def keep(name: str, lines: Sequence[Line]) -> None:
    """Write the lines to bench/results, the last one with the commit. A `+` after the commit means uncommitted changes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    marked = [*lines[:-1], {**lines[-1], "commit": commit}]
    (RESULTS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in marked))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted({*GATES, *OWN_BARS}), metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="make these the kept results")
    args = parser.parse_args()
    verdicts: list[Line] = []
    for name in args.names:
        code, lines = measured(name)
        if code:
            verdicts.append({"gate": name, "ok": False, "why": f"it ended with exit code {code}"})
        elif args.keep:
            keep(name, lines)
        else:
            verdicts.append(judged(name, summary(lines, name), summary(kept(name), name)))
    for verdict in verdicts:
        print(json.dumps(verdict), flush=True)
    return 0 if all(verdict["ok"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(run(main))
