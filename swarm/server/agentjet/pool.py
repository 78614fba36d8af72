"""A server's state in AgentJet's format: the engine's status, the batch being collected, and the open episodes.

Pure functions over the service's state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swarm.protocol.status import Phase
from swarm.server.agentjet.config import METHOD_LABEL, RULES
from swarm.server.state.batching import groups_needed
from swarm.server.state.leases import LiveEpisode
from swarm.server.state.rows import EpisodeRow
from swarm.server.state.runs import Run
from swarm.server.state.server_state import Moment, ServerState

OFFLINE = "ENGINE.OFFLINE"
BOOTING = "ENGINE.BOOTING"
ROLLING = "ENGINE.ROLLING"
ROLLING_POST = "ENGINE.ROLLING_POST"
WEIGHT_SYNCING = "ENGINE.WEIGHT_SYNCING"
_METHODS = {rule: method for method, rule in RULES.items()}
Json = dict[str, Any]


def current_run(state: ServerState) -> Run | None:
    """Return the run that is being trained; None if there is none."""
    run = state.run
    going_on = run is not None and run.row.status == "running" and not run.row.released
    return run if going_on and state.situation.engine_failed is None else None


def engine_status(state: ServerState) -> str:
    """Return AgentJet's engine status. Its clients claim only during ROLLING, take OFFLINE as the end of the run, and wait
    during any other status."""
    run, situation = current_run(state), state.situation
    if run is None:
        return OFFLINE
    if run.row.stop_requested_at is not None:
        return ROLLING_POST
    if not situation.engine_ready or situation.opened_run != run.run_id:
        return BOOTING
    phase = situation.shown_phase
    if phase in (Phase.DRAINING, Phase.STOPPING):
        return ROLLING_POST
    claims_go_on = state.serving and (phase is not Phase.UPDATING or run.spec.max_staleness > 0)
    return ROLLING if claims_go_on else WEIGHT_SYNCING


def why_offline(state: ServerState) -> str | None:
    """Return why the newest run ended; None while it continues, or if there was no run."""
    if state.situation.engine_failed is not None:
        return f"the engine failed for good: {state.situation.engine_failed.reason}"
    run = state.run
    return None if run is None or run.row.status == "running" else f"run {run.run_id}: {run.row.reason}"


def status_report(state: ServerState, engine_status: str) -> Json:
    run = state.run
    return {
        "engine_status": engine_status,
        "engine_status_detail": why_offline(state),
        "global_step": run.step if run is not None else 0,
    }


def pool_information(state: ServerState, now: Moment) -> Json:
    """Report the running episodes and, by task, the ended ones that no step has used yet. The caller adds status and active clients."""
    run = current_run(state)
    ended = [row for group in state.groups for row in group.in_slot_order()]
    by_task: dict[str, list[EpisodeRow]] = {}
    for row in ended:
        by_task.setdefault(row.task_id, []).append(row)
    repeat, tasks, episodes = _targets(run)
    complete = [rows for rows in by_task.values() if run is not None and len(rows) >= repeat]
    open_ones = [live for live in state.live.values() if live.row.kind == "train"]
    return {
        "sample_collection_method": _method(run) if run is not None else "",
        "completed_episodes": len(ended),
        "completed_episode_target": episodes,
        "completed_tasks": len(complete),
        "completed_task_target": tasks,
        "completed_non_dummy_tasks": sum(len({row.reward for row in rows}) > 1 for rows in complete),
        "completed_non_dummy_task_target": tasks,
        "task_expected_num_repeat": repeat,
        "completed_tasks_details": {task: [row.episode_id for row in rows] for task, rows in by_task.items()},
        "completed_tasks_rewards": {task: [row.reward for row in rows] for task, rows in by_task.items()},
        "completed_tasks_client_uuids": {task: [row.client_id for row in rows] for task, rows in by_task.items()},
        "running_episode_details": _running(state, open_ones, now) or None,
        "booting_start_time": run.row.started_at if run is not None else None,
        "training_model_path": state.info.model,
    }


def episode_buffer(state: ServerState, now: Moment) -> list[Json]:
    """Return the open episodes, without the secrets that would let others call their model."""
    return [
        {
            "episode_uuid": live.row.episode_id,
            "episode_status": "claimed",
            "episode_type": live.row.kind,
            "openai_base_url": "",
            "openai_api_key": "",
            "client_uuid": live.row.client_id,
            "zmq_listen_result_addr": "",
            "latest_activity_timestamp": now.unix - quiet_s(state, live, now.monotonic),
            "discard_episode_timeout": live.idle_limit_s,
            "llm_call_count": live.calls_opened,
            "debug_log": [],
            "optional_task_id": live.row.task_id,
        }
        for live in state.live.values()
    ]


def _method(run: Run) -> str:
    """Return AgentJet's name for the run's collection method, even if the run was not started through AgentJet."""
    return run.spec.labels.get(METHOD_LABEL, _METHODS[run.spec.batch.rule])


def _targets(run: Run | None) -> tuple[int, int, int]:
    """Return the repeats per task, and the tasks and episodes of a batch; zeros without a run."""
    if run is None:
        return 0, 0, 0
    batch = run.spec.batch
    tasks = groups_needed(batch)
    return batch.group_size, tasks, batch.episodes if batch.episodes is not None else tasks * batch.group_size


def _running(state: ServerState, open_ones: Iterable[LiveEpisode], now: Moment) -> dict[str, dict[str, str]]:
    """Return the running episodes' fields by episode id, as strings: AgentJet's client rejects other values."""
    return {
        live.row.episode_id: {
            "episode_status": "claimed",
            "time_since_last_activity": f"{quiet_s(state, live, now.monotonic):.1f}s",
            "discard_episode_timeout": f"{live.idle_limit_s:.1f}s",
            "llm_call_count": str(live.calls_opened),
            "client_uuid": live.row.client_id,
            "optional_task_id": live.row.task_id,
        }
        for live in open_ones
    }


def quiet_s(state: ServerState, live: LiveEpisode, monotonic: float) -> float:
    """Return the seconds since the last request of the episode's client or agent; 0 during a call."""
    last = live.idle_at - live.idle_limit_s
    return 0.0 if live.open_since else max(0.0, state.situation.lease_clock.time(monotonic) - last)
