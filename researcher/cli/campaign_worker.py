"""One process's work on a campaign: runs the campaign loop with the real store, instrument, strategist and studies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from foundation.clock import Clock, SystemClock
from researcher.campaign.builtin import BuiltinStrategist
from researcher.campaign.goal import CampaignGoal
from researcher.campaign.loop import CampaignLoop, CampaignOutcome, Rest
from researcher.campaign.new_instrument import InstrumentWriter, check_approved
from researcher.campaign.planning import CampaignPlanner, InstrumentPlanner
from researcher.campaign.records import JOINED, folders_of, keep_call, kept_calls
from researcher.campaign.strategist import LlmAway, Strategist
from researcher.cli.instrument_llm import writer_of
from researcher.cli.request import campaign_llm
from researcher.cli.worker import in_words, wind_up, work_on
from researcher.conduct import Sink
from researcher.environments import Draw, check_tasks, interpreter, rehearsed
from researcher.executor.errors import ExecutorError, InstrumentChanged
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, open_instrument
from researcher.models import PERSON, RULES, DecisionRecord, Notice, StudyOptions, StudyStatus
from researcher.notify.campaign_watch import CampaignWatch
from researcher.notify.sink import sinks_of
from researcher.ownership import owned
from researcher.refusals import PlanningRefused
from researcher.store.errors import OverBudget, StoreError
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.store import Store
from researcher.study.plan import Plan
from researcher.view import View

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 20.0


async def work_on_campaign(
    home: Home,
    campaign_id: str,
    view: View,
    *,
    wait: bool,
    clock: Clock | None = None,
    copy: Callable[[Store], Sink] = MlflowSink,
) -> CampaignOutcome:
    """Take ownership of the campaign and run it.

    Args:
        wait: keep waiting between the campaign's time windows; else return when one closes.
        copy: creates the sink for records.

    Raises: LeaseHeld when another process works on it; any error that keeps its study from continuing here.
    """
    clock = clock or SystemClock()

    async def run_study(study_id: str, plan: Plan) -> Rest:
        """Run one study. A study that has spent its budget counts as ended: the next decision sees its results."""
        fresh = home.store.studies.get(study_id).plan_version is None
        try:
            outcome = await work_on(home, study_id, view, plan if fresh else None, wait=wait, clock=clock, copy=copy)
        except OverBudget as error:
            return Rest(ended=True, reason=str(error))
        finally:
            await asyncio.to_thread(_copy_the_rest, home.store, campaign_id, copy(home.store))
        return Rest(ended=outcome.status is not StudyStatus.WAITING, reason=outcome.reason)

    async def wind_up_study(study_id: str) -> None:
        await wind_up(home, study_id, view.say, clock)

    async with owned(home.store, campaign_id, clock) as store:
        record = store.campaigns.get(campaign_id)
        goal = goal_as_led(CampaignGoal.model_validate(record.goal), store.campaigns.decisions(campaign_id))

        def opened(name: str) -> InstrumentPlanner:
            joined = store.campaigns.events(campaign_id, JOINED)
            folder = open_instrument(folders_of(record, joined).get(name) or name)
            check_approved(joined, folder)
            return planner_of(home.root, store, record.options, folder)

        planner = CampaignPlanner(opened)
        strategist: Strategist
        write: InstrumentWriter | None
        try:
            strategist = strategist_of(goal, store, planner, record.options, clock, view.say)
            write = writer_of(home, goal, campaign_llm(goal), view.say)
        except PlanningRefused as error:  # it began with an LLM, which this process may lack: the daemon, for example
            away = LlmAway(
                f"the LLM that leads this campaign cannot be asked here: {error} (a daemon has the environment in which it was started); "
                "then run `researcher campaign resume`"
            )
            strategist, write = away, away.write
        view.say(f"{campaign_id}: {goal.goal} (strategist: {strategist.name}); records in {home.root}")

        def notify(notice: Notice) -> None:
            store.notices.record(notice, goal.notify)

        loop = CampaignLoop(
            store, strategist, planner, run_study, wind_up_study, clock, home.studies, view.say, notify, write
        )
        async with _watched(home, campaign_id, goal.notify, clock):
            try:
                planner.on(str(record.aim["instrument"]))  # if that instrument is gone, begin nothing
                return await loop.carry_out(campaign_id)
            except (ExecutorError, InstrumentChanged, PlanningRefused) as error:
                loop.cannot_go_on(campaign_id, str(error), in_words(error, "campaign"))
                raise


def _copy_the_rest(store: Store, campaign_id: str, sink: Sink) -> None:
    """Send records that earlier studies could not send because their sink was unreachable when they ended."""
    try:
        for each in store.campaigns.decisions(campaign_id):
            if each.study_id is not None:
                sink.drain(each.study_id)
    except StoreError as error:
        _log.warning("could not copy the records: %s", error)


@contextlib.asynccontextmanager
async def _watched(home: Home, campaign_id: str, names: tuple[str, ...], clock: Clock) -> AsyncIterator[None]:
    """While the campaign runs, detect stalls and send notices, including daily ones. Send the last ones at the end."""
    if not names:
        yield
        return
    watch = CampaignWatch(home.store, campaign_id, names, home.studies / campaign_id, clock)
    sinks = sinks_of(home.store, names, os.environ, clock)

    def look() -> None:
        try:
            watch.look()
            for sink in sinks:
                sink.drain()
        except StoreError as error:  # the next look catches up
            _log.warning("could not check and send notices: %s", error)

    async def again() -> None:
        while True:
            await clock.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(look)

    looking = asyncio.create_task(again())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await asyncio.to_thread(look)


def planner_of(
    root: Path, store: Store | None, options: StudyOptions, folder: InstrumentFolder, draw: Draw = rehearsed
) -> InstrumentPlanner:
    """Build the planner for one instrument.

    Args:
        root: the user data directory.
        draw: draws tasks for each plan.

    Raises: PlanningRefused if the instrument's packages are missing.
    """
    python = interpreter(folder, root)
    task = dict(folder.instrument.defaults.task)
    return InstrumentPlanner(
        store,
        folder,
        options,
        check=lambda plan: check_tasks(plan, folder, python, draw),
        count_heldout=lambda most: int(draw(folder, python, [task], most, 0)[0]["heldout"]),
    )


def goal_as_led(goal: CampaignGoal, decisions: Sequence[DecisionRecord]) -> CampaignGoal:
    """Return the goal with the strategist that leads the campaign. Goals recorded by earlier versions may say `auto`."""
    leads = [each.strategist for each in decisions if each.strategist not in (RULES, PERSON)]
    if goal.strategist != "auto" or not leads:
        return goal
    return goal.model_copy(update={"strategist": "builtin" if leads[-1] == BuiltinStrategist().name else "llm"})


def strategist_of(
    goal: CampaignGoal,
    store: Store,
    planner: CampaignPlanner,
    options: StudyOptions,
    clock: Clock,
    say: Callable[[str], None],
) -> Strategist:
    """Return the strategist that the goal names; `auto` means an LLM if one is configured. Raises: PlanningRefused."""
    settings = campaign_llm(goal)
    if settings is None:
        return BuiltinStrategist()
    # Imported here: the SDK and LangGraph take seconds to load, and campaigns without an LLM never need them.
    from researcher.campaign.llm.evidence import StoreEvidence
    from researcher.campaign.llm.strategist import LlmStrategist
    from researcher.llm.endpoint import OpenAIEndpoint
    from researcher.store.database import default_url

    return LlmStrategist(
        OpenAIEndpoint(settings),
        settings,
        clock,
        planner=planner,
        evidence=StoreEvidence(store, lambda name: planner.on(name).folder.instrument, options.engine == "echo"),
        checkpoints=default_url(),
        tell=say,
        keep=lambda seen, call: keep_call(store, seen.campaign, seen, call),
        kept=lambda seen: kept_calls(store, seen.campaign, seen),
    )
