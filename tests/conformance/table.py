"""The tables of `docs/conformance.md`. The rows of frameworks that did not run stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.frameworks import Framework
from tests.conformance.judgement import Judgement
from tests.conformance.training import Trained


@dataclass(frozen=True, slots=True)
class _Table:
    """Stands between two marks of the page."""

    mark: str
    head: tuple[str, ...]


_RECORDED = _Table(
    "table",
    (
        *("framework", "version", "exercised", "tool call forced by", "calls"),
        *("recorded = sampled", "timelines", "forks (cap)", "on bare vLLM"),
    ),
)
_TRAINED = _Table(
    "training", ("framework", "version", "calls", "sampled tokens", "trained", "forced", "step", "mismatch")
)


def write_judgement(page: Path, framework: Framework, judgement: Judgement, order: Sequence[Framework]) -> None:
    """Put a framework's new row into the table of what is recorded. Raises: ValueError when the page has no place for it."""
    _write(page, _RECORDED, framework, row(framework, judgement), order)


def write_trained(page: Path, framework: Framework, trained: Trained, order: Sequence[Framework]) -> None:
    """Put a framework's new row into the table of what is trained. Raises: as above."""
    _write(page, _TRAINED, framework, trained_row(trained), order)


def _write(page: Path, table: _Table, framework: Framework, new: str, order: Sequence[Framework]) -> None:
    text, opening, closing = page.read_text(), f"<!-- {table.mark} -->", f"<!-- /{table.mark} -->"
    before, begin, rest = text.partition(opening)
    old, end, after = rest.partition(closing)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {opening} and {closing}, between which the table stands")
    rows = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[2:]}
    rows[framework.name] = new
    lines = [
        _line(table.head),
        _line(["---"] * len(table.head)),
        *(rows[each.name] for each in order if each.name in rows),
    ]
    page.write_text("\n".join([before + begin, *lines, end + after]))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


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
    return _line(cells)


def trained_row(trained: Trained) -> str:
    made = trained.mismatch is not None
    return _line(
        [
            trained.framework,
            trained.version or "any",
            str(trained.calls),
            str(trained.drawn),
            f"{trained.share:.1%}",
            str(trained.forced),
            "made" if made else "**none**",
            f"{trained.mismatch:.2g}" if made else "",
        ]
    )


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
