"""Writes docs/performance.md from the kept results: `python -m bench.page`. Imports no benchmark, so it takes a moment."""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench.command import run
from bench.gate import GATES, ROOT, Line, kept, summary

PAGE = ROOT / "docs" / "performance.md"
HEAD = """# Performance, measured

`python -m bench.page` writes this page from `bench/results/*.jsonl`, and a test compares the two. Each section shows one run of `python -m bench.NAME`, on two CPU cores or on
one NVIDIA H200. Seconds apply only to that machine; both sides of a ratio were measured in one run. The docstring of `bench/NAME.py` says how.

## What must not get worse
`make bench` runs these on an otherwise idle machine, and fails if a ratio is worse than the stored one by more than the tolerance. `python -m bench.gate NAME` runs one of them; with `--keep`, its result
becomes the stored one. A `+` after a commit means that there were uncommitted changes; results without a commit are older than this rule. `false_positives` has its own limits.

"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a kept result's lines: those that have the table's first field, and the values in `where`.

    columns: `field heading | field heading | …`.
    """

    file: str
    columns: str
    title: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)

    def shown(self) -> str:
        """The table in Markdown. A cell is empty if the line lacks the field."""
        fields, headings = zip(*(column.split(maxsplit=1) for column in self.columns.split("|")), strict=True)
        rows = [
            [text(line.get(name)) for name in fields]
            for line in lines_of(self.file)
            if fields[0] in line and all(line.get(name) == value for name, value in self.where.items())
        ]
        return (f"{self.title}:\n\n" if self.title else "") + markdown([heading.strip() for heading in headings], rows)


_STEP = "s_per_step ours on sums, s | trl_s_per_step TRL, s | ratio ratio | ratio_at_floor ratio at our floor"
_TURNS = "turns_s_per_step ours on turns, s | trl_turns_s_per_step TRL, s | ratio_turns ratio | dtype ours in | trl_precision TRL in"
_TREE = (
    "workload batch | tokens_called tokens called | tokens_tree in the tree | calls_s call by call, s | merged_s merged, s "
    "| tree_s tree, s | ratio_vs_calls calls ÷ tree | ratio_vs_merged merged ÷ tree"
)
_FLOOR = "step_s train phase, s | floor_s only its products, s | train_share_of_floor share"
_LEARNING = (
    "setting settings | arm arm | seeds seeds | before held-out reward before | after after | seconds seconds per trial"
)
_H200 = {"check": "engine", "result": "step"}

SECTIONS: dict[str, list[Table]] = {
    "grpo_step": [Table("grpo_step", _STEP), Table("grpo_step", _TURNS)],
    "tree_training": [
        Table("tree_training", _TREE, "135M weights in float32, two cores"),
        Table("tree_training-h200-llama-1b", _TREE, "The shape of Llama 3.2 1B in bfloat16, H200"),
        Table("tree_training-h200-smollm2-135m", _TREE, "135M weights in float32, H200"),
        Table(
            "tree_training-masks",
            "workload batch | dtype in | mask_overhead_grammar a grammar's masks | mask_overhead_nucleus top-p's masks",
            "Seconds with sampling masks ÷ without, two cores",
        ),
    ],
    "train_floor": [
        Table("grpo_step", _FLOOR, "Two cores, in a run of `grpo_step`"),
        Table("train_floor-h200-llama-1b", _FLOOR, "H200"),
    ],
    "gateway_overhead": [
        Table(
            "gateway_overhead",
            "agents agents | streaming streams | gateway_tokens_per_s tokens/s | direct_tokens_per_s straight to vLLM | ratio ratio "
            "| ratio_95 95 % interval | ttft_added_ms added time to first token, ms",
        )
    ],
    "async_overlap": [
        Table(
            "async_overlap",
            "ratio ratio | reward_difference held-out reward, difference | noise_floor its noise floor | steps steps",
        )
    ],
    "boot": [Table("boot", "spawned_boot_s spawned, s | forked_boot_s forked, s | ratio ratio")],
    "run_switch": [
        Table("run_switch", "median_s switch, s | seconds slowest, s | boot_s boot of the server, s | ratio ratio")
    ],
    "episode_end": [
        Table("episode_end", "clients clients | per_s episodes/s | alone_per_s with one client | ratio ratio")
    ],
    "swarm_scale": [
        Table(
            "swarm_scale",
            "clients clients | per_s episodes/s | claim_p99_ms claim p99, ms | call_p99_ms call p99, ms | end_p99_ms end p99, ms "
            "| rss_peak_mb peak memory, MB",
        ),
        Table(
            "swarm_scale",
            "soak episodes so far | per_s episodes/s | rss_mb memory, MB | pool_mb on disk, MB",
            "Soak test",
        ),
    ],
    "dry_run": [Table("dry_run", "case input | median_s median, s | most_s maximum, s | bar_s limit, s")],
    "gpu_check": [
        Table(
            "gpu_check-h200",
            "number step | generate_s generate, s | train_s train, s | sync_s sync, s | step_s step, s",
            "Steps in the shape of Qwen3-0.6B, H200 ([more](gpu.md#what-a-gpu-has-run))",
            _H200,
        )
    ],
    "false_positives": [
        Table(
            "false_positives",
            "design design | effect_margins planted effect, margins | studies studies | supported_rate supported "
            "| equivalent_rate called equivalent | interval 99 % interval | covered intervals that contain the truth",
        )
    ],
    "campaigns": [
        Table(
            "campaigns",
            "world world | strategist strategist | campaigns campaigns | false_claims false claims | found best found | regret regret "
            "| trials trials",
        )
    ],
    "topics": [
        Table(
            "topics",
            "n topics | right right | draft drafted | declined declined | wrong_silently silently wrong",
        )
    ],
    "restricted_sampling": [
        Table(
            "restricted_sampling",
            "kind kind | tokens tokens | mean mean difference | p99 p99 | ratio p99 ÷ plain sampling's | mask_bytes mask, bytes per token",
            "Recorded minus recomputed log-probabilities",
        )
    ],
    "learning": [
        Table("learning-arithmetic", _LEARNING, "`arithmetic`; means over seeds, as below"),
        Table("learning-cocktail", _LEARNING, "`cocktail`"),
        Table("learning-team", _LEARNING, "`team`, the solver"),
    ],
}
"""Tables to show, by benchmark."""


def lines_of(file: str) -> list[Line]:
    """Lines of a kept result; those of `bench.learning` as means over their seeds."""
    lines = kept(file)
    return list(means(lines)) if file.startswith("learning") else lines


def means(trials: Sequence[Line]) -> Iterator[Line]:
    """One line for each setting and arm of `bench.learning`."""

    def key(line: Line) -> tuple[str, str]:
        _, *setting, arm, _ = line["key"].split("/")
        return " ".join(part for part in setting if part != "{}"), arm

    for (setting, arm), group in itertools.groupby(sorted(trials, key=key), key):
        same = list(group)
        figures = {"before": "heldout_before", "after": "heldout_after", "seconds": "seconds"}
        found = {name: round(fmean(line[column] for line in same), 3) for name, column in figures.items()}
        yield {"setting": f"`{setting}`" if setting else "defaults", "arm": arm, "seeds": len(same), **found}


def text(value: object) -> str:
    """Text of a table cell."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case [int(some), int(of_all)]:
            return f"{some} of {of_all}"
        case [float(low), float(high)]:
            return f"{text(low)} to {text(high)}"
    return str(value)


def question(name: str) -> str:
    """The first line of a benchmark's docstring."""
    said = ast.get_docstring(ast.parse((ROOT / "bench" / f"{name}.py").read_text())) or ""
    return said.split("\n\n")[0].replace("\n", " ")


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [headings, ["---"] * len(headings), *rows])


def gates() -> str:
    """Table of the gated ratios and their tolerances."""
    rows = []
    for name, gate in GATES.items():
        line = summary(kept(name), name) or {}
        found = [text(line.get(gate.ratio)), gate.better, f"{gate.tolerance:.0%}", str(line.get("commit", ""))]
        rows.append([f"[`{name}`](#{name})", gate.says, *found])
    return markdown(["benchmark", "ratio", "kept", "better", "tolerance", "commit"], rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD + gates()]
    for name, tables in SECTIONS.items():
        parts.append("\n".join([f"## {name}\n{question(name)}\n", *(each.shown() for each in tables)]))
    return "\n".join(parts)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    sys.exit(run(main))
