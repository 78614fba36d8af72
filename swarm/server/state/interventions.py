"""What an operator may do to a run beside changing its config: go back to a checkpoint, keep a client version out of training."""

from __future__ import annotations

from swarm.protocol.episodes import Cause, DropReason
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.server.state.rows import MixRow, PutEpisode, PutRun, SupersedeAfter
from swarm.server.state.runs import Run
from swarm.server.state.state import BookState, Restoration
from swarm.server.state.teams import give_up


class Interventions:
    """Over one `BookState`; pure bookkeeping."""

    def __init__(self, state: BookState) -> None:
        self._state = state

    def judge(self, wish: Restoration) -> Run:
        """The run, when it can go back so far. Codes: over_limit, not_found{checkpoints}."""
        run = self._state.run
        if run is None or run.run_id != wish.run_id:
            detail = f"run {wish.run_id} was replaced by another; only the newest run of a server can be restored"
            raise Refusal(ErrorCode.OVER_LIMIT, detail)
        if run.row.stop_requested_at is not None and not run.row.released:
            raise Refusal(ErrorCode.OVER_LIMIT, f"run {run.run_id} is being stopped; restore it when it is")
        kept = [0, *run.row.checkpoints]
        if wish.step not in kept:
            known = ", ".join(map(str, kept))
            detail = (
                f"run {run.run_id} keeps no checkpoint of step {wish.step}; there are {known} (0 is the hosted model)"
            )
            raise Refusal(ErrorCode.NOT_FOUND, detail, checkpoints=kept)
        return run

    def restore(self, wish: Restoration, mix: MixRow) -> None:
        """Begin a new branch of the run at a checkpoint. Episodes of the old one that came after it are superseded.

        Codes: as `judge`. The engine must be opened again, at this checkpoint; once all this is on disk, before the next
        claim, the numbers of the evaluations that ended at this step are to be read from there (`state.number_evals`).
        """
        state, run = self._state, self.judge(wish)
        row = run.row
        detail = f"the run was restored to step {wish.step} on branch {row.branch + 1} by {wish.by}"
        run.step, state.journalled = wish.step, None
        row.branch, row.branched_at, row.restore_key, row.mix = row.branch + 1, wish.step, wish.key, mix
        if wish.key is not None:
            row.restored_by[wish.key] = wish.step
        row.checkpoints = [step for step in row.checkpoints if step <= wish.step]
        row.status, row.reason, row.ended_at = "running", None, None
        row.stop_requested_at, row.released = None, False
        give_up(state, detail, reason=DropReason.SUPERSEDED)
        for live in list(state.live.values()):
            state.close(live, DropReason.SUPERSEDED, detail, cause=Cause.SERVER)
        for group in state.groups:
            state.drop_group(group, DropReason.SUPERSEDED, detail)
        for waiting in [prepared.row for prepared in state.prepared.values()]:  # for another server's decision
            if waiting.run_id == run.run_id and (waiting.kind == "train" or waiting.claimed_step > wish.step):
                waiting.reason = DropReason.SUPERSEDED
                state.changes.append(PutEpisode(waiting))
        state.eval_ordinals = {}
        state.number_evals([])
        state.changes += [PutRun(row), SupersedeAfter(run.run_id, wish.step, detail)]
        state.awaited.clear()
        state.flat_groups = 0
        state.situation.opened_run = None
        state.situation.checkpoint_wanted = False
        state.turned = state.stirred = True
        state.log.append(f"{run.run_id}: {detail}")

    def quarantine(self, client_version: str, *, wanted: bool, reason: str, by: str) -> None:
        """Let nothing of this client version be trained that no batch has taken yet, or let it in again. Again: nothing.

        Codes: over_limit. Its running episodes may end, and are dropped then; it can claim eval episodes.
        """
        state, run = self._state, self._state.run
        assert run is not None
        if run.row.status != "running":
            detail = f"run {run.run_id} is {run.row.status}; only a running one trains anything"
            raise Refusal(ErrorCode.OVER_LIMIT, detail, run_status=run.row.status)
        if wanted == (client_version in run.row.quarantined):
            return
        if wanted:
            run.row.quarantined[client_version] = f"{reason or 'no reason was given'} (by {by})"
        else:
            del run.row.quarantined[client_version]
        state.changes.append(PutRun(run.row))
        state.settle_all()
        state.turned = True
        done = "quarantined" if wanted else "no longer quarantined"
        state.log.append(f"client version {client_version!r} is {done} by {by}")
