"""A watched server in words: the lines that `swarm top` is made of. Plain text, no terminal needed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from foundation.streams import one_line
from swarm.cli.watch import ServerView
from swarm.protocol.status import ServerStatus

CELLS = 60
CLIENTS_SHOWN = 20
FAILURES_SHOWN = 5
_BLOCKS = "▁▂▃▄▅▆▇█"
Row = tuple[str, ...]


def server_text(view: ServerView) -> str:
    """Everything, as `swarm top --once` prints it."""
    lines = [headline(view)]
    if view.error is not None:
        lines.append(f"  {view.error}")
    if view.status is None:
        return "\n".join(lines)
    lines += [f"  {line}" for line in (*view.notes, pool_line(view), rate_line(view), *standing_lines(view.status))]
    lines += [f"  mix {'  '.join(row)}" for row in mix_rows(view)]
    if view.steps:
        lines.append(f"  {curve_line(view)}")
    lines += [f"  client {'  '.join(row)}" for row in client_rows(view)]
    lines += [f"  last {line}" for line in failure_lines(view)]
    return "\n".join(lines)


def headline(view: ServerView) -> str:
    """Where it is, what it hosts, what it is doing."""
    status = view.status
    if status is None:
        return f"{view.url}  not reached yet" if view.error is None else f"{view.url}  unreachable"
    phase = "unreachable" if view.error else str(status.phase)
    reason = f" ({status.trouble})" if status.trouble else ""
    run = "no run"
    if status.run_id is not None:
        wanted = "" if view.steps_wanted is None else f"/{view.steps_wanted}"
        run = f"run {status.run_id} {view.run_status}  step {status.step}{wanted}  config {view.config_version}"
    return f"{view.url}  {phase}{reason}  {status.model} on {status.engine.computes}  {run}"


def pool_line(view: ServerView) -> str:
    """The pool, by group."""
    assert view.status is not None
    pool = view.status.pool
    return (
        f"pool: {pool.running} running, {pool.ended} ended; groups: {pool.groups_open} open, "
        f"{pool.groups_ready} of {pool.groups_needed} ready"
    )


def rate_line(view: ServerView) -> str:
    """How fast it goes."""
    assert view.status is not None
    engine = view.status.engine
    episodes = "-" if view.episodes_per_s is None else f"{view.episodes_per_s:.1f}"
    step_s = view.steps[-1].values.get("step_s") if view.steps else None
    step = "" if step_s is None else f", last step {step_s:.1f} s"
    failures = f", engine failures {engine.failures}" if engine.failures else ""
    return f"rates: {engine.tokens_per_s:.0f} tokens/s, {episodes} episodes/s{step}{failures}"


def standing_lines(status: ServerStatus) -> list[str]:
    """What the run waits for, and the newest hang of its engine; none where there is neither."""
    lines = []
    if (waiting := status.waiting_for) is not None:
        who = "no client plays it" if waiting.client_id is None else f"client {one_line(waiting.client_id)}"
        lines.append(f"waits for task {one_line(waiting.task_id)} ({who}) since {clock_time(waiting.since)}")
    if (hang := status.engine.hang) is not None:
        over = "not over yet" if hang.over_at is None else f"over at {clock_time(hang.over_at)}"
        lines.append(f"hung since {clock_time(hang.since)} while {hang.phase}, {over}: {one_line(hang.reason)}")
    return lines


def clock_time(at: float) -> str:
    """A Unix time, as a clock shows it."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


def curve_line(view: ServerView) -> str:
    """The learning curve, oldest to newest."""
    rewards = view.rewards
    return f"reward {sparkline(rewards)} {rewards[0]:.3f} → {rewards[-1]:.3f}"


def mix_rows(view: ServerView) -> list[Row]:
    """By family: name, running, ended, trained groups, debt."""
    assert view.status is not None
    return [
        (
            name,
            f"{mix.running} running",
            f"{mix.ended} ended",
            f"{mix.trained_groups} groups trained",
            f"debt {mix.debt:+.2f}",
        )
        for name, mix in sorted(view.status.pool.by_mix.items())
    ]


def client_rows(view: ServerView) -> list[Row]:
    """By client and version: episodes, mean reward, failures."""
    return [
        (
            one_line(one.client_id),
            f"version {one_line(one.client_version)}",
            f"{one.episodes} episodes",
            "reward -" if one.reward_mean is None else f"reward {one.reward_mean:.3f}",
            f"{one.failed} failed",
        )
        for one in view.clients[:CLIENTS_SHOWN]
    ]


def failure_lines(view: ServerView) -> list[str]:
    """The last failure of each client, in one line each."""
    lines = []
    for failure in view.failures[:FAILURES_SHOWN]:
        said = (failure.detail or "").strip().splitlines()
        last = one_line(said[-1]) if said else ""
        lines.append(f"{failure.reason} {failure.episode_id} {one_line(failure.client_id)}: {last}")
    return lines


def sparkline(values: Sequence[float], cells: int = CELLS) -> str:
    """Mean values of neighbours as blocks, lowest to highest."""
    if not values:
        return ""
    width = max(1, -(-len(values) // cells))
    means = [sum(part) / len(part) for part in (values[at : at + width] for at in range(0, len(values), width))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((mean - low) / span * len(_BLOCKS)))] for mean in means)
