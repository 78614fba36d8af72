"""A plan as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Collection

from foundation.streams import one_line
from researcher.analysis.knowledge import told
from researcher.instruments.levels import level_text
from researcher.study.plan import Arm, Known, Plan
from researcher.view import duration


def plan_lines(plan: Plan) -> list[str]:
    """A plan as a person reads it."""
    length = "steps as the arm says" if plan.steps_vary else f"{plan.steps} steps a trial"
    lines = [
        f"question    {one_line(plan.question)}",
        f"hash        {plan.digest()}  (version {plan.version})",
        f"instrument  {plan.instrument} {plan.instrument_version}, {plan.models_text}, {length}",
    ]
    lines += [f"folder      {model.name}: {model.path}" for model in plan.hosted if model.path is not None]
    lines += [f"and         {role}: {each.model}, on a server of its own" for role, each in plan.roles.items()]
    lines += [f"arm         {_arm_text(arm)}" for arm in plan.arms]
    if plan.held:
        lines.append(f"the same    {', '.join(f'{name}={value}' for name, value in plan.held)}")
    for hypothesis in plan.hypotheses:
        lines.append(f"{hypothesis.id:11} {hypothesis.statement}")
        lines.append(f"            {hypothesis.metric}, margin {hypothesis.margin:g}, alpha {hypothesis.alpha:g}")
    for stage in plan.stages:
        kept = f"the best {stage.keep} of " if stage.keep else f"{stage.picks} by Optuna of " if stage.picks else ""
        spends = f", may spend {stage.spends:.4f} of alpha" if stage.spends else ""
        seeds = f"{_span(stage.seeds, stage.max_seeds)} seeds per arm"
        lines.append(f"stage       {stage.id}: {kept}{', '.join(stage.arms)}; {seeds}{spends}")
    lines += dict.fromkeys(f"branch      after {branch.stage}: {branch.reason}" for branch in plan.branches)
    lines += [f"assumed     {assumption}" for assumption in plan.assumptions]
    lines += [f"already known: {known_text(each)}" for each in plan.known]
    if plan.trial_s is not None:
        from researcher.design.models import boots_s
        from researcher.design.pricing import arm_seconds
        from researcher.design.stages import cost  # scipy takes longer to import than most commands take

        each = arm_seconds(plan)
        (few, least_s), (many, most_s) = (cost(plan, each, at_most=at_most) for at_most in (False, True))
        least_s, most_s = least_s + boots_s(plan, at_most=False), most_s + boots_s(plan, at_most=True)
        lines.append(
            f"price       {few} to {many} trials of {_about(each.values())}: {duration(least_s)} to {duration(most_s)} "
            f"one after the other{', with the boots of each model' if plan.models else ''}"
        )
    lines.append(f"budget      at the most {plan.budget.trials} trials, {duration(plan.budget.wall_s)}")
    return lines


def _arm_text(arm: Arm) -> str:
    """`NAME: FACTOR=LEVEL`, with what its seeds begin at where they are its own."""
    own = f"; seeds of its own: each stage's plus {arm.seed_offset}" if arm.seed_offset else ""
    return f"{arm.name}: {', '.join(f'{name}={level_text(level)}' for name, level in arm.levels.items()) or 'the defaults'}{own}"


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _about(seconds: Collection[float]) -> str:
    """`about 2 min`, `about 2 min to 4 min`, where arms differ in what a trial takes."""
    shortest, longest = (duration(of(seconds)) for of in (min, max))
    return f"about {longest}" if shortest == longest else f"about {shortest} to {longest}"


def known_text(known: Known | str) -> str:
    """A finding of an earlier study, as a sentence; an old plan has the sentence itself."""
    return known if isinstance(known, str) else told(known)
