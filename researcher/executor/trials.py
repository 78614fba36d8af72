"""Runs the trials of a stage on a pool of servers, each exactly once, whatever process dies meanwhile. One trial at a time runs
on each server (or on each set of servers, if a trial trains several models).

    async with ServerPool(store, holder=f"study {study_id}", local=LocalServer(...)) as pool:
        records = await Executor(store, pool, setup).run_trials(study_id, plan, trials, on_progress)

`store` is the orchestrator's, fenced with its lease. The executor is a reconcile loop: SQL holds the intent, the servers and the
clients' places show the state, and each round does what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foundation.clock import Clock
from foundation.logs import redact
from researcher.analysis.durations import EVENTS, at_first_attempt_s
from researcher.executor.attempts import INTERRUPTED, AttemptRun, Observation, TrialLimits
from researcher.executor.blueprint import Setup, Work
from researcher.executor.clients import Mender
from researcher.executor.errors import (
    AttemptFailed,
    MendByHand,
    NoServersLeft,
    RunLost,
    ServerUnfit,
    Unmended,
)
from researcher.executor.jobs import ClientPlace, LocalPlace
from researcher.executor.servers import ServerPool, Site
from researcher.executor.tokens import TokenBudget
from researcher.halts import Cause, StudyHalted, check_requests
from researcher.instruments.instrument import HELDOUT_REWARD
from researcher.models import AttemptRecord, TrialRecord, TrialStatus
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.study.plan import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a trial, for views. Times are in seconds since the call of `run_trials`."""

    key: str
    status: str
    attempt: int
    step: int
    note: str
    """The server's phase, or why the last attempt failed."""
    curve: Sequence[tuple[int, float]]
    """`reward_mean` by step."""
    held_out: Sequence[tuple[int, float]]
    """`heldout_reward` by step, from the interim evaluations so far."""
    spent_s: float
    left_s: float | None
    """Estimated seconds until all trials of this call are over."""
    measured: bool
    """Whether `left_s` uses the measured pace of these trials, rather than the plan's estimate."""


_CALIBRATED_STEPS = 2
"""Number of steps after which a running trial predicts its total duration; the first step may be unusually slow."""

OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Round:
    """State of one call of `run_trials`."""

    work: Work
    on_progress: OnProgress
    began: float
    trials: Mapping[str, TrialRecord]
    """The trials as they were at the start, by key."""
    at_once: asyncio.Semaphore
    tokens: TokenBudget
    queue: list[str] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    durations: list[float] = field(default_factory=list)
    """Durations in seconds of the study's trials that succeeded at the first attempt."""
    begun: dict[str, float] = field(default_factory=dict)
    """Start time of each running trial, by key."""
    over: set[str] = field(default_factory=set)
    halted: bool = False
    by_hand: MendByHand | None = None
    running: int = 0
    """Number of running trials. Their share of the budget has been reserved."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a running trial ends."""


class Executor:
    """Runs trials on the servers of a pool.

    Args:
        limits: limits of each attempt. None derives them from the plan.
        attempts: number of failed attempts, over a trial's whole life, after which the trial is recorded as failed.
        may_run: returns whether trials may run now. If not, running trials are paused.
        clients: where clients run, by default as processes of this machine.
        mender: repairs a client's code when that fails. Without it, the client is restarted, as after any other failure.
    """

    def __init__(
        self,
        store: Store,
        pool: ServerPool,
        setup: Setup,
        *,
        limits: TrialLimits | None = None,
        attempts: int = 3,
        may_run: Callable[[], bool] = lambda: True,
        clients: ClientPlace | None = None,
        mender: Mender | None = None,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}")
        self._store = store
        self._pool = pool
        self._setup = setup
        self._clock: Clock = pool.clock
        self._limits = limits
        self._attempts = attempts
        self._may_run = may_run
        self._clients = clients or LocalPlace(self._clock, setup.python)
        self._mender = mender
        self._cause: Cause | None = None

    async def run_trials(
        self, study_id: str, plan: Plan, trials: Sequence[TrialRecord], on_progress: OnProgress = lambda _: None
    ) -> list[TrialRecord]:
        """Run the trials, and return them in the same order, each done or failed with its reason.

        Some stay unfinished if the study is halted. If a person asked for a stop, running trials end; otherwise (a pause, its
        window, `halt`) they are paused with a checkpoint, and the next call continues them.

        Raises: NoServersLeft; ClusterUnreachable; OverBudget; InstrumentChanged; MendByHand; LeaseSuperseded when another process
        now owns the study. The next call continues the trials that were running.
        """
        work = Work(study_id=study_id, plan=plan, setup=self._setup)
        this = _Round(
            work,
            on_progress,
            began=self._clock.monotonic(),
            trials={trial.key: trial for trial in trials},
            at_once=asyncio.Semaphore(self._pool.at_most or len(trials) or 1),
            tokens=TokenBudget(self._store, study_id, plan),
            durations=self._took(study_id),
        )
        while not this.halted:
            this.queue = await self._reconciled(work, trials)
            this.tokens.settle()
            this.over = {trial.key for trial in trials} - set(this.queue)
            if not this.queue:
                break
            self._check_sites(this)
            await self._all_sites(this)
        if this.by_hand is not None:
            raise this.by_hand
        return [self._store.trials.get(study_id, trial.key) for trial in trials]

    def halt(self, cause: Cause) -> None:
        """Make the current `run_trials` return soon, and every later call immediately."""
        self._cause = cause

    async def _reconciled(self, work: Work, trials: Sequence[TrialRecord]) -> list[str]:
        """End attempts that cannot continue on their servers, because these left the pool or host another model now. Return the keys
        of the trials that are not over, running ones first.

        Raises: NoServersLeft when servers take turns and the next one does not start.
        """
        under_way, planned = list[tuple[TrialRecord, AttemptRecord]](), list[TrialRecord]()
        for trial in trials:
            fresh = self._store.trials.get(work.study_id, trial.key)
            if fresh.status.ended or self._given_up(work, fresh):
                continue
            attempt = self._open_attempt(work, trial.key)
            if attempt is None:
                planned.append(fresh)
            else:
                under_way.append((fresh, attempt))
        await self._take_turn(work.plan, [trial for trial, _ in under_way], planned)
        sites = self._pool.sites()
        for trial, attempt in under_way:
            taken = [site for site in sites if site.takes(work.plan, trial.arm)]
            if any(_is_at(attempt, site) for site in taken):
                continue
            stays = any(_is_at(attempt, site) for site in sites)
            if taken or not (stays or self._pool.by_turns):  # else it waits until its model is hosted again
                await self._withdraw(work, trial, attempt, stays=stays)
        return [trial.key for trial, _ in under_way] + [trial.key for trial in planned]

    async def _take_turn(self, plan: Plan, under_way: Sequence[TrialRecord], planned: Sequence[TrialRecord]) -> None:
        """If servers take turns, start the server of the next model.

        Seeds are processed in order, each starting with the previous seed's last model (A B, B A, A B). Arms then meet similar
        conditions, with one boot per seed.
        """
        if not self._pool.by_turns or not (under_way or planned):
            return
        due = under_way or _of_first_seed(plan, planned)
        if not any(site.takes(plan, trial.arm) for trial in due for site in self._pool.sites()):
            await self._pool.turn_to(plan.model_of(due[0].arm))

    async def _withdraw(self, work: Work, trial: TrialRecord, attempt: AttemptRecord, *, stays: bool) -> None:
        """End an attempt, which then starts again on other servers. `stays` says whether its own servers are still in the pool."""
        job = self._clients.job(work.folder(trial, attempt.number), attempt.idempotency_key)
        await job.end(self._limits_of(work.plan).grace_s)
        if not self._store.trials.rests(work.study_id, trial.key):
            self._store.trials.record_rest(work.study_id, trial.key, INTERRUPTED, since=attempt.heartbeat_at)
        reason = f"its server {attempt.server_url} is no longer in the pool"
        if stays:
            reason = f"its server {attempt.server_url} no longer hosts {work.plan.model_of(trial.arm).name}"
        elif self._pool.needed > 1:
            reason = f"its servers ({attempt.server_url} and others) are no longer together in the pool"
        self._store.trials.withdraw_attempt(work.study_id, trial.key, reason)

    def _check_sites(self, this: _Round) -> None:
        """Raise NoServersLeft if none of the remaining trials can run."""
        sites, plan = self._pool.sites(), this.work.plan
        then = (
            f"nothing is lost: continue with `researcher resume {this.work.study_id}`, on other servers with `--server`"
        )
        if not sites:
            raise NoServersLeft(f"{self._pool.reasons() or 'the pool holds too few servers'}; {then}")
        if not any(site.takes(plan, this.trials[key].arm) for key in this.queue for site in sites):
            models = ", ".join(dict.fromkeys(plan.model_of(this.trials[key].arm).name for key in this.queue))
            raise NoServersLeft(
                f"no server is left that hosts {models}: {self._pool.reasons() or 'none was given'}; {then}"
            )

    async def _all_sites(self, this: _Round) -> None:
        """Run one worker per site until each has nothing left to do. The first error ends the other workers."""
        workers = [asyncio.create_task(self._serve(this, site)) for site in self._pool.sites()]
        try:
            await asyncio.gather(*workers)
        except StudyHalted as halt:
            _log.info("%s", halt)
            this.halted = True
        finally:
            for worker in workers:
                if not this.halted and not worker.cancelling():  # only once: a second one would interrupt its cleanup
                    worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception) and not isinstance(outcome, StudyHalted):
                raise outcome

    async def _serve(self, this: _Round, site: Site) -> None:
        """Run trial after trial, until none is left for this site or one of its servers is unfit."""
        while site.fit and this.by_hand is None:
            async with this.at_once:
                key = self._next(this, site)
                if key is None:
                    return
                await self._carry_out(this, site, key)

    async def _carry_out(self, this: _Round, site: Site, key: str) -> None:
        await self._afforded(this, key)
        this.running += 1
        try:
            await self._tried(this, site, key)
        finally:
            this.running -= 1
            this.ended.set()

    async def _afforded(self, this: _Round, key: str) -> None:
        """Reserve the trial's tokens. If too few are left, wait for running trials, which may use less than they reserved.

        Raises: OverBudget; StudyHalted.
        """
        while True:
            self._check_halt(this)
            try:
                this.tokens.reserve(self._store.trials.get(this.work.study_id, key))
                break
            except OverBudget:
                if not this.running:
                    raise
                this.ended.clear()
                await this.ended.wait()
        self._reserve(this.work, key)

    async def _tried(self, this: _Round, site: Site, key: str) -> None:
        this.begun[key] = self._clock.monotonic()
        try:
            await self._attempt(this, site, key)
        except ServerUnfit as error:
            _log.warning("%s", error)
            if site.fit:
                site.lost(error)
        except MendByHand as halt:
            this.by_hand = halt
            raise
        except Unmended as error:
            self._give_up(this.work, key, str(error))
            self._over(this, key, str(error))
        except RunLost as error:
            _log.warning("%s: %s", key, error)
            this.queue.append(key)
            self._tell(this, key, TrialStatus.PLANNED, 0, str(error))
        except AttemptFailed as error:
            self._failed(this, key, str(error))
        else:
            this.durations = self._took(this.work.study_id)
            self._over(this, key, "")
        finally:
            this.tokens.settle()

    async def _attempt(self, this: _Round, site: Site, key: str) -> None:
        trial = self._store.trials.get(this.work.study_id, key)
        this.curves[key], this.held_out[key] = [], []
        self._tell(this, key, TrialStatus.SUBMITTED, 0, "")

        def observe(seen: Observation) -> None:
            this.curves[key] += [(step, value) for name, step, value in seen.fresh if name == "reward_mean"]
            held_out = [(step, value) for name, step, value in seen.fresh if name == HELDOUT_REWARD]
            this.held_out[key] = held_out or this.held_out[key]  # fresh has the whole curve, or none of it
            self._tell(this, key, TrialStatus.RUNNING, seen.step, seen.phase)

        def check_halt() -> None:
            self._check_halt(this)

        limits = self._limits_of(this.work.plan)
        attempt = AttemptRun(
            this.work,
            trial,
            site,
            self._store,
            self._clock,
            limits,
            check_halt,
            self._pool.tell,
            self._clients,
            self._mender,
            this.tokens,
        )
        await attempt.carry_out(observe)

    def _failed(self, this: _Round, key: str, reason: str) -> None:
        _log.warning("an attempt at %s failed: %s", key, reason)
        trial = self._store.trials.get(this.work.study_id, key)
        if self._given_up(this.work, trial):
            self._over(this, key, self._store.trials.get(this.work.study_id, key).reason or reason)
        else:
            this.queue.append(key)
            self._tell(this, key, TrialStatus.PLANNED, 0, reason)

    def _given_up(self, work: Work, trial: TrialRecord) -> bool:
        """Return whether the trial has used up its attempts, in any process. If so, record it as failed."""
        attempts = self._store.trials.attempts(work.study_id, trial.key)
        failed = [attempt for attempt in attempts if attempt.outcome == "failed"]
        if trial.status is not TrialStatus.PLANNED or len(failed) < self._attempts:
            return False
        self._give_up(work, trial.key, f"{len(failed)} attempts failed; the last: {failed[-1].reason}")
        return True

    def _give_up(self, work: Work, key: str, why: str) -> None:
        self._store.trials.fail(work.study_id, key, redact(why)[:4000])
        self._spend(work, key)

    def _limits_of(self, plan: Plan) -> TrialLimits:
        return self._limits or TrialLimits.expecting(plan)

    def _over(self, this: _Round, key: str, note: str) -> None:
        self._spend(this.work, key)
        this.over.add(key)
        trial = self._store.trials.get(this.work.study_id, key)
        this.curves[key] = trial.series.get("reward_mean", [])
        this.held_out[key] = trial.series.get(HELDOUT_REWARD, [])
        self._tell(this, key, trial.status, len(this.curves[key]), note)

    def _next(self, this: _Round, site: Site) -> str | None:
        """Remove the first trial that this site may run from the queue, and return its key.

        A trial under way stays on its servers. If servers take turns, only trials of the first remaining seed may begin: later
        seeds wait until the other models have had their turn.
        """
        trials = [this.trials[key] for key in this.queue]
        due = {trial.key for trial in (_of_first_seed(this.work.plan, trials) if self._pool.by_turns else trials)}
        for key in this.queue:
            if not site.takes(this.work.plan, this.trials[key].arm):
                continue
            attempt = self._open_attempt(this.work, key)
            if (attempt is None and key in due) or (attempt is not None and _is_at(attempt, site)):
                this.queue.remove(key)
                return key
        return None

    def _open_attempt(self, work: Work, key: str) -> AttemptRecord | None:
        attempts = self._store.trials.attempts(work.study_id, key)
        return attempts[-1] if attempts and attempts[-1].outcome == "open" else None

    def _check_halt(self, this: _Round) -> None:
        check_requests(self._store, this.work.study_id)
        if not self._may_run():
            raise StudyHalted("window")
        if self._cause is not None:
            raise StudyHalted(self._cause)
        if this.tokens.is_spent():
            raise StudyHalted("budget")

    def _tell(self, this: _Round, key: str, status: TrialStatus, step: int, note: str) -> None:
        attempts, each_s = self._store.trials.attempts(this.work.study_id, key), self._pace_s(this)
        this.on_progress(
            Progress(
                key=key,
                status=status,
                attempt=len(attempts),
                step=step,
                note=note,
                curve=tuple(this.curves[key]),
                held_out=tuple(this.held_out[key]),
                spent_s=self._clock.monotonic() - this.began,
                left_s=self._left_s(this, each_s),
                measured=each_s is not None,
            )
        )

    def _took(self, study_id: str) -> list[float]:
        """Return the durations, in seconds, of the study's trials that succeeded at the first attempt."""
        trials = self._store.trials.all(study_id, series=())
        return [seconds for _, seconds in at_first_attempt_s(trials, self._store.journal.events(study_id, *EVENTS))]

    def _pace_s(self, this: _Round) -> float | None:
        """Return the measured seconds per trial: of finished trials, or else extrapolated from running trials after a few steps."""
        if this.durations:
            return sum(this.durations) / len(this.durations)
        now, plan = self._clock.monotonic(), this.work.plan
        under_way = [
            (now - this.begun[key]) * plan.steps_of(this.trials[key].arm) / len(curve)
            for key, curve in this.curves.items()
            if len(curve) >= _CALIBRATED_STEPS and this.trials[key].status is TrialStatus.PLANNED
        ]
        return sum(under_way) / len(under_way) if under_way else None

    def _left_s(self, this: _Round, pace_s: float | None) -> float:
        """Estimate the seconds for the remaining trials, at this pace or, without one, at the plan's estimate."""
        plan = this.work.plan
        each_s = pace_s or plan.trial_s or self._setup.instrument.defaults.trial_s
        begun = sum(
            len(curve) / plan.steps_of(this.trials[key].arm)
            for key, curve in this.curves.items()
            if key not in this.over
        )
        return max(0.0, each_s * (len(this.trials) - len(this.over) - begun) / max(1, len(self._pool.sites())))

    # -- budget: trials, if the study limits them ---------------------------------------------------------------------

    def _reserve(self, work: Work, key: str) -> None:
        """Reserve a trial from the budget, if the study limits its trials. Raises: OverBudget."""
        if self._budgeted(work):
            self._store.budgets.reserve(work.study_id, "trials", key, 1)

    def _spend(self, work: Work, key: str) -> None:
        if self._budgeted(work):
            self._store.budgets.spend(work.study_id, "trials", key, 1)

    def _budgeted(self, work: Work) -> bool:
        return any(budget.kind == "trials" for budget in self._store.budgets.all(work.study_id))


def _of_first_seed(plan: Plan, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials with the lowest seed. If an arm has its own seeds, they count by position."""
    places = [plan.shared_seed(trial.arm, trial.seed) for trial in trials]
    first = min(places, default=0)
    return [trial for trial, place in zip(trials, places, strict=True) if place == first]


def _is_at(attempt: AttemptRecord, site: Site) -> bool:
    """Return whether the attempt began on these servers."""
    labels = attempt.spec.get("labels", {})
    return attempt.server_url == site.main.url and all(labels.get(name) == url for name, url in site.labels().items())
