"""One attempt at one trial on one server, from intent to recorded numbers, resumed wherever it stopped.

    intent in SQL → run on the server (found again by its key) → client (found again by its folder)
    → followed until it ends → collected from the server's records → one transaction → server free

A SIGKILL may come at any arrow. Steps that are already done are found, not repeated; a client that ended too early is started
again with the same blueprint and continues where it stopped. Nothing that a client prints is believed.

An attempt that is halted before its end is paused: its run stops with a checkpoint, the server is free for other trials, and a
later call continues the same run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from foundation.clock import Clock
from foundation.logs import redact
from researcher.executor.blueprint import Code, Work, run_spec, trial_blueprint
from researcher.executor.clients import Client, Mender
from researcher.executor.collection import Collected, collect_whole, interim, losses, points
from researcher.executor.errors import (
    AttemptFailed,
    ClusterUnreachable,
    EvidenceMissing,
    MendByHand,
    RunLost,
    ServerUnfit,
)
from researcher.executor.jobs import ClientJob, ClientPlace
from researcher.executor.servers import Server, Site
from researcher.executor.slots import Slot
from researcher.executor.tokens import TokenBudget, count_tokens
from researcher.halts import StudyHalted
from researcher.models import (
    EXCUSED,
    AttemptRecord,
    Attrition,
    Event,
    SampledEpisode,
    StudyStatus,
    TrialRecord,
    TrialStatus,
    without,
)
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.client import ServerUnreachable, StorageFull
from swarm.client.interim import interim_id
from swarm.client.trial import client_id
from swarm.protocol.blueprint import PartnerRun, TrialBlueprint
from swarm.protocol.episodes import TaskProgress
from swarm.protocol.errors import SwarmError
from swarm.protocol.runspec import RunSpec
from swarm.protocol.status import Phase, RunReport, ServerStatus

_log = logging.getLogger(__name__)
_SPARE_TIMES = 6
"""An attempt may take this many times its expected duration: machines differ and are shared."""
_SPARE_ATTEMPT_S, _SPARE_STALL_S = 1200.0, 240.0
"""Seconds added to the limit of an attempt and to the stall limit, in case the engine restarts or the machine is busy."""
INTERRUPTED = "interrupted"
"""Reason for a pause that nobody asked for: the researcher was interrupted or killed."""
_TAKE_BACK_S = 30.0
"""Seconds to spend on aborting the open episodes of a client that is being killed. Episodes that stay open end at the idle
limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """Limits that the executor enforces from outside.

    `attempt_s` is the maximum duration of an attempt, `stall_s` the maximum time without an ended episode or a step while the
    engine is up. Both defaults are for plans without an expected trial duration; `expecting` adapts them to plans that have one.
    """

    attempt_s: float = 7200.0
    stall_s: float = 300.0
    client_restarts: int = 2
    first_backoff_s: float = 0.5
    busy_s: float = 600.0
    grace_s: float = 10.0
    look_s: float = 0.25
    """Minimum interval between two reads of a server whose status changes all the time."""
    check_s: float = 5.0
    """Interval at which ended episodes are counted and stop requests are checked."""
    count_s: float = 15.0
    """Interval at which tokens are counted, if the study has a token budget."""

    @classmethod
    def expecting(cls, plan: Plan) -> Self:
        """Return limits for this plan's trials: several times the expected duration, as machines differ and are shared."""
        if plan.trial_s is None:
            return cls()
        step_s = plan.trial_s / plan.steps
        return cls(attempt_s=_SPARE_ATTEMPT_S + _SPARE_TIMES * plan.trial_s, stall_s=_SPARE_STALL_S + 10 * step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of a running attempt. `fresh` has the metrics of new steps, as (name, step, value)."""

    phase: str
    step: int
    episodes: int
    fresh: Sequence[tuple[str, int, float]] = ()


Observer = Callable[[Observation], None]
CheckHalt = Callable[[], None]
"""Called regularly while an attempt runs. Raises: StudyHalted when the attempt has to end or pause."""


class _Stalled(Exception):
    """The client is alive but makes no progress."""


class _Overdue(AttemptFailed):
    """The attempt exceeded its time limit."""


class AttemptRun:
    """Runs one attempt. Use each instance only once; after a crash, a new instance continues the attempt."""

    def __init__(
        self,
        work: Work,
        trial: TrialRecord,
        site: Site,
        store: Store,
        clock: Clock,
        limits: TrialLimits,
        check_halt: CheckHalt,
        tell: Callable[[str], None],
        clients: ClientPlace,
        mender: Mender | None,
        tokens: TokenBudget,
    ) -> None:
        self._work = work
        self._check_halt = check_halt
        self._trial = trial
        self._site = site
        self._swarm = site.main.swarm

        def slot(server: Server) -> Slot:
            return Slot(
                server,
                work.study_id,
                store,
                clock,
                busy_s=limits.busy_s,
                look_s=limits.look_s,
                tell=tell,
                check_halt=check_halt,
            )

        self._slot = slot(site.main)
        self._beside = {role: slot(server) for role, server in site.beside.items()}
        self._store = store
        self._clock = clock
        self._limits = limits
        self._clients = clients
        self._mender = mender
        self._tokens = tokens
        self._counted_at = -math.inf
        """When tokens were last counted."""
        self._number = 0
        self._observe: Observer = lambda _: None
        self._step = 0
        self._followed_since = self._moved_at = 0.0
        """When this process began to follow the run, and when it saw the newest step."""
        self._episodes = 0
        self._blueprint: TrialBlueprint | None = None
        self._interim = set[int]()
        """Steps of the interim evaluations seen so far."""

    async def carry_out(self, observe: Observer) -> TrialRecord:
        """Carry out the attempt and return the finished trial.

        Raises: AttemptFailed, ServerUnfit or RunLost, each of which is recorded; StudyHalted, after which the trial is paused, or
        planned again if a person asked for a stop; ClusterUnreachable, which leaves the trial as it is.
        """
        self._observe = observe
        attempt, begun_before = self._intend()
        self._number = attempt.number
        job = self._clients.job(self._work.folder(self._trial, attempt.number), attempt.idempotency_key)
        client = Client(self._work, self._trial, self._swarm, job, self._store, self._mender)
        try:
            if begun_before:
                await self._note_rest(attempt, job)
            report = await self._submit(attempt)
            blueprint = self._blueprint = await self._hand_over(attempt, report, client)
            if begun_before:
                if self._mended_by_hand(attempt, report.run_id):
                    await self._excuse(blueprint)
                await self._go_on(blueprint, job)
            collected = await self._follow(attempt, report, blueprint, client)
            self._record(collected, report.run_id)
        except (asyncio.CancelledError, MendByHand, ClusterUnreachable):
            await self._leave(job, self._slot.run_id or attempt.run_id)
            raise
        except (AttemptFailed, ServerUnfit, RunLost, StudyHalted, SwarmError) as error:
            run_id = self._slot.run_id or attempt.run_id
            if isinstance(error, StudyHalted) and error.cause != "stop" and run_id is not None:
                await self._pause(job, run_id, str(error))
                raise
            if isinstance(error, ServerUnreachable):
                self._site.lost(error)
            elif isinstance(error, StorageFull):
                self._site.lost(await self._full() or ServerUnfit(str(error)))
            await job.end(self._limits.grace_s)
            with suppress(SwarmError):  # tokens that a lost server sampled after the last count stay unknown
                await self._count_tokens(run_id)
            self._end_attempt(error)
            await self._free(run_id)
            if isinstance(error, SwarmError):
                self._site.check()
                raise AttemptFailed(str(error)) from error
            raise
        await self._free(report.run_id)
        return self._store.trials.get(self._work.study_id, self._trial.key)

    def _end_attempt(self, error: Exception) -> None:
        """Record the attempt as failed, or as withdrawn if the trial was not at fault."""
        own = isinstance(error, AttemptFailed | SwarmError) and self._site.fit
        end = self._store.trials.fail_attempt if own else self._store.trials.withdraw_attempt
        end(self._work.study_id, self._trial.key, redact(str(error))[:4000])

    # -- submit -------------------------------------------------------------------------------------------------------

    def _intend(self) -> tuple[AttemptRecord, bool]:
        """Return the open attempt and True, or a new attempt and False. A new one is recorded before the server is asked for a
        run."""
        study_id, key = self._work.study_id, self._trial.key
        earlier = self._store.trials.attempts(study_id, key)
        if earlier and earlier[-1].outcome == "open":
            return earlier[-1], True
        number = len(earlier) + 1
        spec = run_spec(self._work, self._trial).model_dump(mode="json")
        spec["labels"] |= self._site.labels()
        # The study is part of the key: another study may run the same plan on the same server.
        idempotency_key = f"{study_id}/{key}#{number}"
        intent = self._store.trials.record_intent(study_id, key, number, self._site.main.url, idempotency_key, spec)
        return intent, False

    async def _submit(self, attempt: AttemptRecord) -> RunReport:
        """Start the runs of all the trial's models, or find those that were started before. Return the main run's report.

        Raises: RunLost when the server no longer knows the attempt's run.
        """
        keys = {role: f"{attempt.idempotency_key}/{role}" for role in self._beside}
        for role, slot in self._beside.items():
            model = self._work.plan.model_of_role(role)
            await slot.start(run_spec(self._work, self._trial, role), keys[role], model)
        spec = RunSpec.model_validate(attempt.spec)
        model = self._work.plan.model_of(self._trial.arm)
        report = await self._slot.start(spec, attempt.idempotency_key, model)
        if attempt.run_id not in (None, report.run_id):
            raise RunLost(f"{attempt.server_url} no longer knows run {attempt.run_id}; the trial starts again")
        return report

    async def _hand_over(self, attempt: AttemptRecord, report: RunReport, client: Client) -> TrialBlueprint:
        """Return the client's blueprint: the recorded one if a client is alive, else one with the newest code."""
        if await client.job.alive() and attempt.blueprint is not None:
            return TrialBlueprint.model_validate(attempt.blueprint)
        return self._with_code(attempt, report, client, client.code())

    def _with_code(self, attempt: AttemptRecord, report: RunReport, client: Client, code: Code) -> TrialBlueprint:
        partners = {
            role: PartnerRun(server_url=slot.server.url, run_id=self._partners[role])
            for role, slot in self._beside.items()
        }
        main = self._site.main.url
        blueprint = trial_blueprint(self._work, self._trial, report.spec, main, report.run_id, partners, code)
        client.write(blueprint)
        facts = blueprint.model_dump(mode="json")
        if facts != attempt.blueprint:
            self._store.trials.record_submitted(self._work.study_id, self._trial.key, report.run_id, facts)
        return blueprint

    async def _go_on(self, blueprint: TrialBlueprint, job: ClientJob) -> None:
        """Resume a paused or interrupted attempt where it stopped. Raises: RunLost."""
        if self._trial.status is TrialStatus.PAUSED:
            await self._rest(job, blueprint.run_id)  # finish a pause that was interrupted
        idle = not await job.alive()
        if idle:
            with suppress(EvidenceMissing):
                await self._collect(blueprint)
                return
        rested = await asyncio.gather(*(slot.go_on(run_id) for slot, run_id in self._runs(blueprint.run_id)))
        if idle or any(rested):
            step = (await self._swarm.run(blueprint.run_id, since_step=self._work.plan.steps)).step
            self._store.trials.continue_attempt(self._work.study_id, self._trial.key, step)

    async def _note_rest(self, attempt: AttemptRecord, job: ClientJob) -> None:
        """Record that the attempt was interrupted, if another process left it without a record and its client has ended."""
        if self._trial.status is not TrialStatus.PAUSED and await job.alive():
            return
        study_id, key = self._work.study_id, self._trial.key
        if not self._store.trials.rests(study_id, key):
            self._store.trials.record_rest(study_id, key, INTERRUPTED, since=await self._worked_until(attempt))

    async def _worked_until(self, attempt: AttemptRecord) -> float:
        """Return when work on the attempt stopped: at the last recorded progress, or at the last reward if the client went on
        after that."""
        rewarded = list[float]()
        if attempt.run_id is not None:
            with suppress(SwarmError):
                ledger = self._swarm.ledger(run_id=attempt.run_id)
                rewarded = [entry.ended_at async for entry in ledger if entry.reward is not None and entry.ended_at]
        return max([attempt.heartbeat_at, *rewarded])

    async def _excuse(self, blueprint: TrialBlueprint) -> None:
        """Record the losses so far as excused: the faulty code was repaired, and its tasks are tried again."""
        lost = await losses(self._swarm, {role: slot.swarm for role, slot in self._beside.items()}, blueprint)
        detail = {"trial": self._trial.key, "run": blueprint.run_id, "attrition": lost.model_dump(mode="json")}
        self._store.journal.record(self._work.study_id, EXCUSED, detail)

    def _excused(self, run_id: str) -> Event | None:
        """Return the newest record of this run's excused losses, if any."""
        return self._store.journal.last(self._work.study_id, EXCUSED, run=run_id)

    def _mended_by_hand(self, attempt: AttemptRecord, run_id: str) -> bool:
        """Return whether the study has failed during this attempt since its losses were last excused.

        If so, a person has resumed it after repairing the code. A pause excuses nothing.
        """
        noted = self._excused(run_id)
        failed = self._store.journal.last(self._work.study_id, "study", status=StudyStatus.FAILED.value)
        if failed is None or (noted is not None and failed.seq < noted.seq):
            return False
        return failed.at >= attempt.intent_at

    # -- follow -------------------------------------------------------------------------------------------------------

    async def _follow(
        self, attempt: AttemptRecord, report: RunReport, blueprint: TrialBlueprint, client: Client
    ) -> Collected:
        """Keep a client running until the server's records show a complete trial. If its code fails, it may be replaced; the run
        then continues with a new client.

        Raises: AttemptFailed, ServerUnfit, Unmended, MendByHand, and what `_until_ended` raises.
        """
        self._followed_since = self._moved_at = self._clock.monotonic()
        job, deadline = client.job, self._followed_since + self._limits.attempt_s
        reason, tries, diagnosis = "", 0, None
        while True:
            if not await job.alive():
                try:
                    return await self._collect(blueprint)
                except EvidenceMissing as missing:
                    last = tries > self._limits.client_restarts
                    if tries:
                        began = self._clock.monotonic()
                        diagnosis = await client.diagnosis(blueprint, stalled=bool(reason))
                        code = await self._unless_stopped(client.other_code(blueprint, diagnosis, last=last))
                        deadline += self._clock.monotonic() - began
                        if code is not None:
                            blueprint = self._with_code(attempt, report, client, code)
                            await self._excuse(blueprint)
                            tries, last = 0, False
                    if last:
                        if (full := await self._full()) is not None:
                            self._site.lost(full)
                            raise full from missing
                        raise AttemptFailed(await client.last_words(f"{reason}{missing}", diagnosis)) from missing
                if tries:
                    await self._clock.sleep(self._limits.first_backoff_s * 2 ** (tries - 1))
                if client.code().version != blueprint.code_version:
                    blueprint = self._with_code(attempt, report, client, client.code())
                await client.start(blueprint)
            tries, reason = tries + 1, ""
            try:
                await self._until_ended(blueprint, job, deadline)
            except _Stalled:
                reason = f"no episode ended for {self._limits.stall_s:.0f} s; "
                await self._cut_off(blueprint, job, f"{reason}the researcher killed the client")
            except _Overdue as overdue:
                await self._cut_off(blueprint, job, str(overdue))
                raise

    async def _cut_off(self, blueprint: TrialBlueprint, job: ClientJob, why: str) -> None:
        """Kill a client that hangs or takes too long. Its open episodes count as its own losses, since no person stopped it."""
        try:
            async with asyncio.timeout(_TAKE_BACK_S):
                me = client_id(blueprint.trial_key)
                await self._swarm.fence(blueprint.run_id, me, why)
                if blueprint.heldout.interim is not None:
                    await self._swarm.fence(blueprint.run_id, interim_id(me), why)
        except (SwarmError, TimeoutError) as error:
            _log.warning("open episodes of %s were not closed: %s", self._trial.key, error)
        await job.end(0.0)

    async def _full(self) -> ServerUnfit | None:
        """Return an error if the disk of one of the servers is full, else None.

        A full disk is not the trial's fault, and a retry would not help.
        """
        for server in self._site.servers:
            with suppress(SwarmError):
                full = (await server.swarm.status()).storage_full
                if full is not None:
                    return ServerUnfit(f"{server.url}: {full.reason}", server.url)
        return None

    async def _collect(self, blueprint: TrialBlueprint) -> Collected:
        others = {role: slot.swarm for role, slot in self._beside.items()}
        return await collect_whole(self._swarm, others, blueprint, self._work.plan.metrics)

    async def _until_ended(self, blueprint: TrialBlueprint, job: ClientJob, deadline: float) -> None:
        """Watch until the client has ended. Raises: what `_watch` raises, while the client is still alive; ClusterUnreachable."""
        ended = asyncio.create_task(job.ended())
        watch = asyncio.create_task(self._watch(blueprint.run_id, deadline))
        try:
            await asyncio.wait({ended, watch}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, ended):
                if task.done():
                    task.result()
        finally:
            for task in (ended, watch):
                task.cancel()
            await asyncio.gather(ended, watch, return_exceptions=True)
        await self._note(blueprint.run_id, await self._swarm.status())

    async def _watch(self, run_id: str, deadline: float) -> None:
        """Follow the server by long polling; never return. Raises: _Stalled, AttemptFailed, ServerUnfit, StudyHalted."""
        moved_at = checked_at = self._clock.monotonic()
        status = await self._swarm.status()
        while True:
            self._slot.check(status, run_id)
            now = self._clock.monotonic()
            if status.step > self._step or now - checked_at >= self._limits.check_s:
                checked_at = now
                await asyncio.to_thread(self._check_halt)
                for role, slot in self._beside.items():
                    slot.check(await slot.swarm.status(), self._partners[role])
                if await self._note(run_id, status) or status.phase is Phase.BOOTING:
                    moved_at = now
            if now - moved_at > self._limits.stall_s:
                raise _Stalled
            if now > deadline + self._more_s():
                raise _Overdue(f"the attempt exceeded its limit of {self._limits.attempt_s + self._more_s():.0f} s")
            await self._clock.sleep(self._limits.look_s)
            status = await self._swarm.status(since=status.revision, wait_s=self._limits.check_s)

    def _more_s(self) -> float:
        """Return extra seconds for a trial that is slow but makes progress.

        The plan may have been priced for a faster machine or a smaller model. The extra time extends the limit to six times the
        duration that the steps so far predict.
        """
        if self._step == 0:
            return 0.0
        step_s = (self._moved_at - self._followed_since) / self._step
        return max(0.0, _SPARE_TIMES * step_s * self._work.plan.steps_of(self._trial.arm) - self._limits.attempt_s)

    async def _note(self, run_id: str, status: ServerStatus | None) -> bool:
        """Record and report new steps and episodes, and return whether there were any. `status` is None for a paused run."""
        # What has been seen counts only once it is recorded: a watch that is cancelled in between leaves it to the next look.
        tasks = await self._swarm.tasks(run_id=run_id)
        episodes = max(self._episodes, sum(task.ended for task in tasks))
        step, fresh = self._step, list[tuple[str, int, float]]()
        if status is None or (status.run_id == run_id and status.step > self._step):
            report = await self._swarm.run(run_id, since_step=self._step)
            step, fresh = max(step, report.step), points(report.steps)
        scored, sampled = self._scored(tasks), tuple[SampledEpisode, ...]()
        if self._blueprint is not None and not scored <= self._interim:
            held_out, sampled = await interim(self._swarm, self._blueprint, self._work.plan.metrics)
            fresh += held_out
        moved = episodes > self._episodes or step > self._step
        if moved or fresh:
            record = self._store.trials.record_progress
            await asyncio.to_thread(record, self._work.study_id, self._trial.key, step, fresh, sampled)
        if step > self._step:
            self._moved_at = self._clock.monotonic()
        self._step, self._episodes, self._interim = step, episodes, self._interim | scored
        phase = "paused" if status is None else status.phase
        self._observe(Observation(phase=phase, step=step, episodes=episodes, fresh=tuple(fresh)))
        if status is None or self._clock.monotonic() - self._counted_at >= self._limits.count_s:
            await self._count_tokens(run_id)
        return moved

    def _scored(self, tasks: Sequence[TaskProgress]) -> set[int]:
        """Return the steps whose held-out tasks of a curve have all been scored."""
        asked = None if self._blueprint is None else self._blueprint.heldout.interim
        if self._blueprint is None or asked is None:
            return set()
        ended = Counter[int]()
        for task in tasks:
            if task.kind == "eval" and task.step:
                ended[task.step] += task.ended
        return {step for step, count in ended.items() if count >= min(asked.tasks, self._blueprint.heldout.tasks)}

    async def _count_tokens(self, run_id: str | None) -> None:
        """Count the run's tokens against the study's budget, if it has one. Raises: SwarmError."""
        if not self._tokens.limited or run_id is None:
            return
        found = await count_tokens((slot.swarm, run) for slot, run in self._runs(run_id))
        await asyncio.to_thread(self._tokens.note, self._trial.key, self._number, found)
        self._counted_at = self._clock.monotonic()

    async def _unless_stopped(self, mending: Coroutine[Any, Any, Code | None]) -> Code | None:
        """Wait for `mending` and return its code, unless the study is halted first. A repair may take hours if an LLM does not
        answer.

        Raises: StudyHalted, and whatever `mending` raises.
        """
        task = asyncio.create_task(mending)
        try:
            while not task.done():
                pause = asyncio.create_task(self._clock.sleep(self._limits.check_s))
                await asyncio.wait((task, pause), return_when=asyncio.FIRST_COMPLETED)
                pause.cancel()
                if not task.done():
                    await asyncio.to_thread(self._check_halt)
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _record(self, collected: Collected, run_id: str) -> None:
        """Record the finished trial. Raises: AttemptFailed when a metric cannot be computed from the records."""
        try:
            finals = self._work.setup.finals(self._work.plan.metrics, collected.series)
        except ValidationError:
            raise
        except ValueError as error:
            raise AttemptFailed(f"the recorded trial is incomplete: {error}") from error
        evidence = collected.evidence
        excused = self._excused(run_id)
        if excused is not None and evidence.attrition is not None:
            earlier = Attrition.model_validate(excused.detail["attrition"])
            evidence = evidence.model_copy(update={"attrition": without(evidence.attrition, earlier)})
        if set(collected.code_versions) - {self._work.plan.instrument_code}:
            evidence = evidence.model_copy(update={"code_versions": collected.code_versions})
        study_id, key = self._work.study_id, self._trial.key
        if self._tokens.limited:
            self._tokens.note(key, self._number, collected.tokens)
        self._store.trials.finish(study_id, key, finals, collected.series, evidence, collected.episodes)

    async def _pause(self, job: ClientJob, run_id: str, why: str) -> None:
        """Pause the run, so that the trial can continue from its checkpoint. If the pause fails, it is tried again when the trial
        resumes."""
        self._store.trials.pause_attempt(self._work.study_id, self._trial.key, why)
        try:
            await self._rest(job, run_id)
        except (SwarmError, ServerUnfit, ClusterUnreachable) as error:
            _log.warning("run %s could not be paused: %s", run_id, error)
            with suppress(ClusterUnreachable):
                await job.end(self._limits.grace_s)
        else:
            self._store.trials.record_rest(self._work.study_id, self._trial.key, why)

    async def _rest(self, job: ClientJob, run_id: str) -> None:
        """Stop the runs with a checkpoint. The client may finish its open episodes first but gets no new ones."""
        await asyncio.gather(*(slot.rest(one) for slot, one in self._runs(run_id)))
        await job.end(self._limits.grace_s)
        await self._note(run_id, None)

    @property
    def _partners(self) -> dict[str, str]:
        """Run ids of the further models, by role."""
        return {role: slot.run_id for role, slot in self._beside.items() if slot.run_id is not None}

    def _runs(self, run_id: str) -> list[tuple[Slot, str]]:
        """Return every run of the attempt with its slot. `run_id` is that of the main run."""
        return [(self._slot, run_id), *((self._beside[role], partner) for role, partner in self._partners.items())]

    async def _leave(self, job: ClientJob, run_id: str | None) -> None:
        """After an interrupt, leave the run on a server of our own as it is, to continue later. Pause it on any other server."""
        with suppress(ClusterUnreachable):  # an unreachable client is ended, or found again, when the trial resumes
            await job.end(self._limits.grace_s)
        if self._site.main.owned:
            return
        if run_id is not None:
            await self._pause(job, run_id, INTERRUPTED)
        else:
            self._store.trials.withdraw_attempt(self._work.study_id, self._trial.key, INTERRUPTED)
            await self._free(run_id)

    async def _free(self, run_id: str | None) -> None:
        await self._slot.free(run_id)
        for role, slot in self._beside.items():
            await slot.free(self._partners.get(role))
