"""The table of `docs/conformance.md`, written from judgements. The rows of frameworks that did not run stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.conformance.frameworks import Framework
from tests.conformance.judgement import Judgement

_HEAD = (
    "| framework | version | exercised | tool call forced by | calls | recorded = sampled | timelines | forks (cap) | on bare vLLM |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
_BEGIN, _END = "<!-- table -->", "<!-- /table -->"


def write_row(page: Path, framework: Framework, judgement: Judgement, order: Sequence[Framework]) -> None:
    """Put a framework's new row between the page's marks. Raises: ValueError when the page has none."""
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    old, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {_BEGIN} and {_END}, between which the table stands")
    rows = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[2:]}
    rows[framework.name] = row(framework, judgement)
    lines = [_HEAD, *(rows[each.name] for each in order if each.name in rows)]
    page.write_text("\n".join([before + begin, *lines, end + after]))


def row(framework: Framework, judgement: Judgement) -> str:
    cells = [
        framework.name,
        judgement.version or "any",
        framework.exercised,
        framework.forced,
        str(judgement.calls),
        _recorded(judgement),
        str(judgement.timelines),
        _forks(framework, judgement),
        _bare(judgement),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _recorded(judgement: Judgement) -> str:
    if judgement.conforms:
        return "yes" if judgement.witnessed else "consistent (no witness)"
    return "**no**: " + "; ".join(" ".join(fault.split())[-200:] for fault in judgement.faults)


def _forks(framework: Framework, judgement: Judgement) -> str:
    causes = sorted({*framework.forks, *judgement.forks})
    told = [f"{cause}: {judgement.forks.get(cause, 0)} ({framework.forks.get(cause, 0)})" for cause in causes]
    return ", ".join(told) or "0 (0)"


def _bare(judgement: Judgement) -> str:
    if judgement.bare is None:
        return "not asked"
    how = "succeeds" if judgement.bare.succeeded else "fails"
    return f"{how}, same answers" if judgement.same_answers else f"{how}, other answers"
