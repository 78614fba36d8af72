"""Formats plans, findings, repairs and events as text for a terminal."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from foundation.streams import one_line
from researcher.analysis.knowledge import told
from researcher.instruments.levels import level_text
from researcher.models import EXCUSED, KINDS, MODELS_KEPT, MODELS_NOT_KEPT, Attrition, Event, RepairRecord
from researcher.study.plan import Arm, Known, Plan
from researcher.view import duration


def engine_lines(plan: Plan | None, engine: str) -> list[str]:
    """Return a warning to print before a plan for the echo engine. `plan` is None if the study has no plan yet."""
    if engine != "echo":
        return []
    paid = (
        "" if plan is None or plan.trial_s_measured else "; the price below is for real trials, but these take seconds"
    )
    return [f"engine      echo: no model is trained, so nothing it finds is a result{paid}"]


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    length = "steps as the arm says" if plan.steps_vary else f"{_many(plan.steps, 'step')} a trial"
    lines = [
        f"question    {one_line(plan.question)}",
        f"hash        {plan.digest()}  (version {plan.version})",
        f"instrument  {plan.instrument} {plan.instrument_version}, {plan.models_text}, {length}",
    ]
    lines += [f"folder      {model.name}: {model.path}" for model in plan.hosted if model.path is not None]
    lines += [f"starts from {model.origin}" for model in plan.hosted if model.origin is not None]
    lines += [f"and         {role}: {each.model}, on its own server" for role, each in plan.roles.items()]
    lines += [f"arm         {_arm_text(arm)}" for arm in plan.arms]
    if plan.heldout_from:
        first, last = plan.heldout_from + 1, plan.heldout_upto
        lines.append(f"held out    tasks {first} to {last}; other studies may score those before them")
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
        from researcher.design.pricing import arm_seconds, expected_tokens
        from researcher.design.stages import cost  # scipy takes longer to import than most commands take

        each = arm_seconds(plan)
        (few, least_s), (many, most_s) = (cost(plan, each, at_most=at_most) for at_most in (False, True))
        least_s, most_s = least_s + boots_s(plan, at_most=False), most_s + boots_s(plan, at_most=True)
        lines.append(
            f"price       {_span(few, many)} trials of {_about(each.values())} ({plan.trial_s_source}): {_span(duration(least_s), duration(most_s))} "
            f"one after the other{', with the boots of each model' if plan.models else ''}"
        )
        if (tokens := expected_tokens(plan)) is not None:
            lines.append(
                f"            {_span(*(f'{each:,.0f}' for each in tokens))} tokens of the agents' calls, roughly"
            )
    limits = [f"{plan.budget.trials} trials", duration(plan.budget.wall_s)]
    if plan.budget.tokens is not None:
        limits.append(f"{plan.budget.tokens:,} tokens of the agents' calls")
    lines.append(f"budget      at most {', '.join(limits)}")
    return lines


def _arm_text(arm: Arm) -> str:
    """Format an arm as `NAME: FACTOR=LEVEL`, with the seed offset if the arm has its own seeds."""
    own = f"; its own seeds: each stage's plus {arm.seed_offset}" if arm.seed_offset else ""
    return f"{arm.name}: {', '.join(f'{name}={level_text(level)}' for name, level in arm.levels.items()) or 'the defaults'}{own}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _span(least: object, most: object) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _about(seconds: Collection[float]) -> str:
    """Format trial durations: `about 2 min`, or `about 2 min to 4 min` if they differ between arms."""
    shortest, longest = (duration(of(seconds)) for of in (min, max))
    return f"about {longest}" if shortest == longest else f"about {shortest} to {longest}"


def known_text(known: Known | str) -> str:
    """Return a finding of an earlier study as a sentence. Old plans stored the sentence itself."""
    return known if isinstance(known, str) else told(known)


def repair_lines(record: RepairRecord) -> list[str]:
    """Return a repair made while the study ran, with its full diff, as lines."""
    return [
        f"repaired    {when(record.at)} by {record.by}: {record.reason}",
        f"            code {record.old[:12]} → {record.new[:12]} ({', '.join(record.files)}), after {record.trial}",
        f"            failed: {record.failed}",
        f"            {record.rehearsed}",
        *(f"    {line}" for line in record.diff.splitlines()),
    ]


def event_text(event: Event) -> str:
    """Return a journal event as a sentence."""
    detail = event.detail
    if event.kind == "decision":
        to = f" {detail['to']}" if detail.get("to") else ""
        seeds = f" on {detail['seeds']} seeds per arm" if detail.get("seeds") else ""
        return f"after {detail['after']}: {detail['action']}{to}{seeds} ({detail['reason']})"
    if event.kind == "repaired":
        files = ", ".join(detail.get("files", ()))
        return f"the code was repaired by {detail['by']} ({files}) after {detail['trial']}: {detail['reason']}"
    if event.kind == "amended":
        changed = f" ({detail['changed']})" if detail.get("changed") else ""
        return f"the plan was amended by {detail['by']} to version {detail['version']}{changed}: {detail['because']}"
    if event.kind == "moved":
        before = ", ".join(detail["before"]) or "its own servers"
        return f"it continues with {', '.join(detail['after'])} instead of {before}"
    if event.kind == EXCUSED:
        lost = Attrition.model_validate(detail["attrition"])
        count = sum(sum(lost.of(kind).lost.values()) for kind in KINDS)
        return f"{count} attempts of {detail['trial']} were lost to code that has since been repaired"
    if event.kind == MODELS_KEPT:
        return f"{detail['models']} models are kept in {detail['in']}"
    if event.kind == MODELS_NOT_KEPT:
        return str(detail["because"])
    if event.kind == "report":
        return f"report written: {detail.get('markdown', '')}"
    told = ", ".join(f"{name} {value}" for name, value in detail.items() if value is not None)
    return f"{event.kind.replace('_', ' ')}{f': {told}' if told else ''}"


def when(at: float) -> str:
    """Format a time in this machine's zone, or as seconds since 1970 if it lies outside the calendar."""
    try:
        return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # outside the years 1 to 9999, or too large for the platform
        return f"{at:g} s after 1970"
