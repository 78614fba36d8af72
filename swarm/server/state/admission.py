"""Whether a train claim that no open group can take may open one, and if not yet, what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from foundation.nearest import nearest
from foundation.strict import FieldError
from swarm.protocol.episodes import EpisodeClaim
from swarm.protocol.errors import ErrorCode, Refusal
from swarm.protocol.problem import invalid_spec
from swarm.server.state.batches import horizon, openings
from swarm.server.state.mix import family_of, in_force
from swarm.server.state.runs import Run
from swarm.server.state.state import BookState

LONGEST_RETRY_S = 5.0
"""What a claimant is told to wait when nothing says how long it will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """A claim that may be granted later: what to answer when the claimant will not wait."""

    code: ErrorCode
    detail: str
    retry_after_s: float = 1.0

    def refusal(self) -> Refusal:
        return Refusal(self.code, self.detail, retry_after_s=self.retry_after_s)


class Admission:
    """Over one `BookState`."""

    def __init__(self, state: BookState) -> None:
        self._state = state
        self._openings: tuple[tuple[object, ...], frozenset[str], bool] = ((), frozenset(), False)
        """What was asked last, the families that may open a group, whether the pool is full."""
        self._held_up: set[str | None] = set()
        """Families that were told since then that it is not their turn."""

    def require_trainable(self, claim: EpisodeClaim, run: Run) -> None:
        """Codes: forbidden{client_version} when it is quarantined, invalid_spec{errors} for a mix that the run has not."""
        quarantined = run.row.quarantined.get(claim.client_version)
        if quarantined is not None:
            detail = f"client version {claim.client_version!r} is quarantined: {quarantined}; mend it, and claim under a new one"
            raise Refusal(ErrorCode.FORBIDDEN, detail, client_version=claim.client_version)
        mix = run.spec.batch.mix
        if mix and claim.mix not in mix:
            problem = f"must name a family of the run's mix: {', '.join(mix)}"
            raise invalid_spec([FieldError(field="mix", problem=problem, nearest=nearest(claim.mix or "", mix))])

    def no_room(self, claim: EpisodeClaim, run: Run) -> NotYet | None:
        """Why no group can be opened for the claim now; None when one can.

        A family that is told here that it is not its turn may begin the patience with those whose turn it is.
        """
        state, batch = self._state, run.spec.batch
        ahead = 0 if state.journalled is None else 1
        wanted = horizon(run.spec, step=run.step, versions_ahead=ahead)
        passed = state.passed()
        # Every claim that waits asks this again and again; the answer changes with these alone.
        asked = (run.run_id, run.row.branch, run.config_version, state.groups.revision, run.step, ahead, passed)
        if self._openings[0] != asked:
            balance = in_force(run.row.mix, batch.mix)
            found = openings(batch, balance, state.groups, wanted, passed)
            full = not found and sum(group.expected for group in state.groups) >= batch.max_pool_episodes
            self._openings, self._held_up = (asked, found, full), set()
        _, open_to, full = self._openings
        if family_of(claim.mix, batch.mix) in open_to:
            return None
        if full:
            return NotYet(code=ErrorCode.DRAINING, detail=f"the pool holds its {batch.max_pool_episodes} episodes")
        if wanted and not state.versions.knows((claim.mix, claim.client_version)):
            return None  # edited code shows at once what it does, one group of it, whatever the old one left behind
        if not open_to:
            detail = f"the groups that step {run.step + ahead} and max_staleness allow are taken; wait for the step"
            return NotYet(code=ErrorCode.DRAINING, detail=detail)
        if claim.mix not in self._held_up:
            self._held_up.add(claim.mix)
            state.look_at_mix(held_up=claim.mix)
        ends_at = [at - state.lease_time for at in state.awaited.ends_at(batch.mix).values()]
        retry_s = min([left_s for left_s in ends_at if left_s > 0], default=LONGEST_RETRY_S)
        detail = f"family {claim.mix!r} has its share of the next steps; it is the turn of {', '.join(sorted(open_to))}"
        return NotYet(code=ErrorCode.MIX_FULL, detail=detail, retry_after_s=min(retry_s, LONGEST_RETRY_S))
