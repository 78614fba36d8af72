"""`researcher calibrate`: time a short trial on the servers that a study would use, so that study prices use a measurement."""

from __future__ import annotations

import argparse
import socket
from dataclasses import replace

from foundation import logs
from researcher.cli import FAILED, answer
from researcher.cli.request import Asking, Wanted, check_addresses, teller
from researcher.cli.resume import run_interruptibly
from researcher.cli.servers import check_servers
from researcher.cli.start import planned, with_tasks
from researcher.cli.worker import lone_trials, setup
from researcher.design.pricing import CALIBRATION_STEPS, arm_seconds, calibrating, timed
from researcher.home import open_home
from researcher.instruments.catalogue import OWN_STUDIES
from researcher.models import StudyOptions, TrialRecord, TrialStatus
from researcher.paces import paces_on
from researcher.view import duration

_UNTIMED = ("budget", "seeds", "schedule", "notify", "approve")
"""Fields of a spec that do not affect how long one trial takes."""


def calibrate_command(args: argparse.Namespace) -> int:
    """Run a trial of a few steps for each model, and estimate how long a whole trial takes."""
    check_addresses(args.server)
    if not (args.file or args.vary or args.arm or len(args.model) > 1):
        args.arm = ["first:", "second:"]  # nothing is compared, and a plan has two arms
    home = open_home()
    asking = Asking(args, home)
    wanted = asking.wanted()
    fields = {name: value for name, value in wanted.draft.fields.items() if name not in _UNTIMED}
    whole = Wanted(replace(wanted.draft, fields=fields | {"budget": {"wall": "3650d"}}), wanted.lines)
    _, _, folder, plan = planned(whole, asking.knowledge, None, servers=max(1, len(args.server)))
    plan = with_tasks(plan, folder, home, dry_run=False)
    check_servers(plan, list(args.server), engine=args.engine)
    short = calibrating(timed(plan, folder.instrument))
    options = StudyOptions(
        instrument=None if folder.path.parent == OWN_STUDIES else str(folder.path),
        servers=args.server,
        engine=args.engine,
        machine=socket.gethostname(),
        calibrates=True,
    )
    logs.configure("WARNING")
    topic = f"How long does a trial of {plan.instrument} take here with {plan.models_text}?"
    study_id = home.store.studies.create(topic, options)
    arms = {short.model_of(arm.name).name: arm.name for arm in reversed(short.arms)}
    stage = short.stages[0]
    pairs = [(arm, short.seed_of(arm, stage, 0)) for arm in arms.values()]
    trials = run_interruptibly(
        lone_trials(
            home,
            study_id,
            short,
            setup(home, folder, short),
            stage.id,
            pairs,
            because=f"calibration: timed {CALIBRATION_STEPS} steps with {short.models_text} to price studies",
            tell=teller(args),
        )
    )
    then = timed(plan, folder.instrument)
    now = timed(plan, folder.instrument, paces_on(home.store, args.server, args.engine))
    if study_id not in (now.trial_s_measured or ""):  # an older pace is no success of this trial
        reasons = "; ".join(dict.fromkeys(filter(None, map(_why_no_pace, trials)))) or "its duration is not known"
        answer(args.json, {"study": study_id, "trial_s": None, "reason": reasons}, f"{study_id}: no pace ({reasons})")
        return FAILED
    took, guessed = (max(arm_seconds(each).values()) for each in (now, then))
    steps = max(plan.steps_of(arm.name) for arm in plan.arms)
    text = (
        f"{study_id}: a trial of {plan.instrument} with {plan.models_text}, {steps} steps, takes about {duration(took)} here; "
        f"the estimate for two CPU cores was {duration(guessed)}. Studies with the same models, tasks and "
        "call lengths use this time for their price."
    )
    return answer(args.json, {"study": study_id, "trial_s": took, "estimated_s": guessed, "steps": steps}, text)


def _why_no_pace(trial: TrialRecord) -> str | None:
    """Say why a pace cannot be measured with this trial; None if it can."""
    if trial.status is not TrialStatus.DONE:
        return trial.reason or f"{trial.key} is {trial.status} after attempt {trial.attempt}"
    if trial.attempt > 1:
        return (
            f"{trial.key} is done after attempt {trial.attempt}, but only a first attempt shows how long a trial takes"
        )
    timed_steps = len(trial.series.get("step_s", ()))
    if timed_steps < 2:
        return f"{trial.key} is done, but timed only {timed_steps} of {CALIBRATION_STEPS} steps; a pace needs the second, as the first is slow"
    return None
