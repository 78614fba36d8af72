"""The rules that keep a campaign's claims honest, as code that no strategist can bypass.

1. A study proposed after seeing data is an exploration: its effects are shown, but it gives no verdict.
2. Claims come only from confirmations: a frozen plan, a registered prediction, unused seeds, unscored held-out tasks. A claim
   is about the instrument on which it was confirmed: a result from another one may be tested there but is no evidence.
3. The k-th confirmation spends an alpha of 0.05 · 6 / (π² k²), counted when its plan is frozen, whatever its result.
   Confirmations on all instruments are counted together.
4. The metric and margin of a claim are the goal's, and are fixed when the claim is registered.
5. The baseline of a confirmation is the default or the incumbent; any other is labelled.
6. No claim rests on invalid results, on the echo engine, or on rewards that an LLM wrote.
7. The report lists every hypothesis (`researcher.campaign.report`).
8. `verify` recomputes the input of every decision (`researcher.campaign.verify`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foundation.nearest import a_few, nearest
from researcher.campaign.goal import Aim, changed
from researcher.campaign.proposals import NewHypothesis, Proposal
from researcher.campaign.seen import HypothesisSeen, Seen, View
from researcher.design.planning import PLANNED_EFFECT
from researcher.instruments.instrument import Scalar
from researcher.instruments.levels import level_text
from researcher.models import CONFIRMING, STUDIES, Action
from researcher.refusals import SpecRefused, refused_in
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec

ALPHA = 0.05
"""Maximum total alpha of a campaign's confirmations."""
ONE_STUDY, RESERVED = 0.25, 0.30
"""Shares of the budget. One study may spend at most `ONE_STUDY` of what is left; `RESERVED` of the whole is kept for
confirmations."""
FIELDS = (
    "compare",
    "arms",
    "design",
    "set",
    "seeds",
    "steps",
    "secondary",
    "looks",
    "fine",
    "heldout_every",
    "evaluate_on",
)
"""Fields of a study file that a strategist or a person may set. The campaign sets the others."""
MOST_UNWRITTEN = 3
"""Number of failed attempts to write an instrument after which no further one may be requested."""
_CONFIRMED = ("arms", "design", "seeds", "secondary", "looks", "heldout_every", "evaluate_on")
"""Fields that a confirmation may have. Its arms may differ from the campaign's defaults only in the levels they state."""


def alpha_of(number: int) -> float:
    """Return the alpha of the confirmation with this number, counted from 1. All confirmations together spend at most `ALPHA`."""
    return ALPHA * 6 / (math.pi**2 * number**2)


def form_problems(spec: Mapping[str, Any], aim: Aim) -> list[SpecRefused]:
    """Return a problem for each field of a study's spec that a strategist or a person may not set, or that has an invalid value."""
    return [*_not_theirs(spec), *_badly_typed(spec, aim)]


def _not_theirs(spec: Mapping[str, Any]) -> list[SpecRefused]:
    found = []
    for name in spec:
        if name not in FIELDS:
            guess = nearest(name, FIELDS)
            hint = (
                f"did you mean {guess}?"
                if guess
                else f"the campaign sets it, leave it out; a study has {', '.join(FIELDS)}"
            )
            found.append(SpecRefused(name, hint))
    if isinstance(spec.get("seeds"), Mapping) and "first" in spec["seeds"]:
        found.append(SpecRefused("seeds.first", "code chooses seeds that no study has used, leave it out"))
    return found


def kept_apart(spec: Mapping[str, Any], own: str, known: Sequence[str]) -> list[SpecRefused]:
    """Return a problem for each of the campaign's other instruments on which the study would be scored. Their held-out tasks are
    reserved for studies on those instruments, including confirmations. `own` is the study's instrument, `known` has all of the
    campaign's."""
    return [
        SpecRefused(
            "evaluate_on",
            f"{name} is an instrument of this campaign, whose held-out tasks are reserved for studies on it: leave it out, or plan "
            f"a study on {name}",
        )
        for name in spec.get("evaluate_on", ())
        if name in known and name != own
    ]


def _badly_typed(spec: Mapping[str, Any], aim: Aim) -> list[SpecRefused]:
    own = {name: spec[name] for name in spec if name in FIELDS}
    try:
        StudySpec.model_validate({"question": "?", "instrument": aim.instrument, **own})
    except ValidationError as error:
        return refused_in(error, StudySpec)
    return []


def problems_of(proposal: Proposal, seen: Seen) -> list[str]:
    """Return the problems of a proposal that can be found before it is planned."""
    if unknown := instrument_problem(proposal.instrument, seen.instruments):
        return [f"instrument: {unknown}"]
    view = seen.on(proposal.instrument or "")
    found = [str(each) for each in _not_theirs(proposal.spec)]
    if proposal.spec and (wrong := _badly_typed(proposal.spec, view.aim)):
        return [*found, *map(str, wrong)]
    both = view.aim.settings.keys() & proposal.spec.get("set", {}).keys()
    found += [f"set.{name}: is the same in all studies of this campaign, leave it out" for name in sorted(both)]
    if view.aim.steps is not None and "steps" in proposal.spec:
        found.append(f"steps: are {view.aim.steps} in all studies of this campaign, leave them out")
    found += map(str, kept_apart(proposal.spec, view.instrument, seen.instruments))
    found += _touched(proposal.spec, view)
    known = {each.id: each for each in seen.hypotheses}
    if proposal.action in STUDIES:
        found += _hypothesis_problems(proposal, known, view)
        if not proposal.spec:
            found.append(f"{proposal.action} needs a spec that says what is compared")
    else:
        given = [name for name in ("spec", "instrument") if getattr(proposal, name)]
        found += [f"{proposal.action} runs no study: leave the {name} out" for name in given]
    if proposal.action in ("ask", "conclude", "new_instrument") and not proposal.words.strip():
        found.append(f"{proposal.action} needs words")
    if proposal.action == "new_instrument" and sum(said.kind == "unwritten" for said in seen.said) >= MOST_UNWRITTEN:
        found.append(f"new_instrument: {MOST_UNWRITTEN} attempts failed: use the instruments that there are")
    if proposal.action in CONFIRMING:
        found += _confirmation_problems(proposal, view)
    ran = {study.study for study in seen.studies}
    found += [f"rests_on: there is no study {each!r} in this campaign" for each in proposal.rests_on if each not in ran]
    found += [f"drops: there is no hypothesis {name!r}" for name in proposal.drops if name not in known]
    return found


def _touched(spec: Mapping[str, Any], view: View) -> list[str]:
    """Return a problem for each factor that the study would change although people want it left alone."""
    arms = [spec.get("set", {}), *spec.get("arms", {}).values()]
    compared = spec.get("compare", {}).items()
    arms += [{name: level} for name, each in compared for level in each.get("levels", ())]
    arms += [{name: each["baseline"]} for name, each in compared if "baseline" in each]
    names = dict.fromkeys(name for levels in arms for name in view.touched(levels))
    return [f"{name}: a person wants it to stay as it is; leave it out" for name in names]


def instrument_problem(name: str | None, known: Sequence[str]) -> str:
    """Return an error text, with the nearest known names, if the campaign has no instrument of that name; else an empty string."""
    if name is None or name in known:
        return ""
    guess = nearest(name, known)
    return f"no instrument of this campaign is called {name!r}; " + (
        f"did you mean {guess}?" if guess else f"it has {', '.join(a_few(name, known))}"
    )


def _hypothesis_problems(proposal: Proposal, known: dict[str, HypothesisSeen], view: View) -> list[str]:
    asked = proposal.hypothesis
    if asked is None:
        return [f"{proposal.action} needs a hypothesis: an id of an open one, or a new one"]
    if isinstance(asked, NewHypothesis):
        unknown = asked.parent is not None and asked.parent not in known
        return [f"hypothesis.parent: there is no hypothesis {asked.parent!r}"] if unknown else []
    if asked not in known:
        return [f"hypothesis: there is no hypothesis {asked!r}; there are: {', '.join(known) or 'none yet'}"]
    if proposal.action != "replicate" and known[asked].status == "dropped":
        return [f"hypothesis: {asked} was dropped; register a new one that says what changed"]
    about = view.whole.about(asked)
    if about.aim is not view.aim:
        said = f"register a new one that says what is expected on {view.instrument}"
        return [f"hypothesis: {asked} is about {about.instrument}; {said}"]
    return []


def _confirmation_problems(proposal: Proposal, view: View) -> list[str]:
    apart = [name for name in proposal.spec if name in FIELDS and name not in _CONFIRMED]
    found = [f"{name}: not a field of a {proposal.action}: its arms state everything that differs" for name in apart]
    known = {factor.name for factor in view.aim.factors}
    arms = proposal.spec.get("arms", {})
    foreign = {name for levels in arms.values() for name in levels} - known
    found += [f"arms: {name} is not one of the goal's factors" for name in sorted(foreign)]
    sides = [changed(view.aim, levels) for levels in arms.values()]
    elsewhere = [levels for study, levels in view.confirmed_elsewhere() if study.study in proposal.rests_on]
    carried = bool(sides and sides[-1]) and sides[-1] in elsewhere
    found += [
        f"arms: {name} {level_text(level)} is not one of the goal's levels ({', '.join(map(level_text, view.aim.factor(name).levels))})"
        for side in (sides[:-1] if carried else sides)
        for name, level in side.items()
        if name in known and level not in view.aim.factor(name).levels
    ]
    if len(sides) == 2 and sides[0] == sides[1]:
        found.append("arms: both have the same settings, so there is nothing to confirm")
    if proposal.spec.get("design", "compare") != "compare":
        found.append(f"design: a {proposal.action} is a plain comparison of two arms")
    if len(arms) != 2:
        found.append(f"arms: a {proposal.action} needs two: the baseline, and what is claimed to be better")
    if proposal.expects is not None and proposal.expects < PLANNED_EFFECT * view.aim.margin:
        found.append(f"expects: at least {PLANNED_EFFECT * view.aim.margin:g}, 1.5 margins: less would be found anyway")
    at = f" on {view.among}" if view.among else ""
    if proposal.action == "replicate" and not any(study.confirms for study in view.studies):
        found.append(f"replicate: nothing was confirmed{at} yet")
    if proposal.action == "confirm" and not view.studies and not carried:
        instead = ", or rest it on the study that confirmed this setting on another instrument" if at else ""
        found.append(f"confirm: explore first{at}{instead}; what nobody has looked at cannot be claimed")
    return found


def completed(proposal: Proposal, seen: Seen) -> dict[str, Any]:
    """Return the study's complete spec: the strategist's part, overlaid with the campaign's."""
    aim, confirms = seen.on(proposal.instrument or "").aim, proposal.action in CONFIRMING
    spec: dict[str, Any] = {
        **proposal.spec,
        "question": f"{seen.goal} [{proposal.because}]"[:4000],
        "instrument": aim.instrument,
        "metric": aim.metric,
        "margin": aim.margin,
        "claim": aim.direction if confirms else "none",
        "seeds": {**proposal.spec.get("seeds", {}), "first": seen.next_seed},
        "budget": limits(proposal.action, seen),
    }
    spec |= {} if aim.model is None else {"model": aim.model}
    spec |= {} if aim.steps is None else {"steps": aim.steps}
    return spec | ({"set": {**proposal.spec.get("set", {}), **aim.settings}} if aim.settings else {})


def limits(action: Action, seen: Seen) -> dict[str, Any]:
    """Return the spending limits of a study of this kind: a quarter of what is left. An exploration may not touch the reserve."""
    left, confirms = seen.left, action in CONFIRMING
    found: dict[str, Any] = {}
    if left.wall_s is not None:
        free = left.wall_s if confirms else left.wall_s - left.reserved_wall_s
        found["wall"] = max(0.0, min(free, ONE_STUDY * left.wall_s))
    if left.trials is not None:
        spare = left.trials if confirms else left.trials - left.reserved_trials
        found["trials"] = max(0, math.floor(min(spare, ONE_STUDY * left.trials)))
    if left.tokens is not None:
        found["tokens"] = max(0, math.floor(ONE_STUDY * left.tokens))
    return found


def too_little(budget: dict[str, Any]) -> str:
    """Return a text that names the exhausted limits; empty if none is exhausted."""
    spent = [name for name, value in budget.items() if value < 1]
    return f"nothing is left of the budget's {' and '.join(spent)}" if spent else ""


def baseline_of(plan: Plan, view: View) -> str:
    """Return the role of the study's first arm on its instrument: `default`, `incumbent` or `other`."""
    levels: dict[str, Scalar] = changed(view.aim, plan.arms[0].levels)
    if not levels:
        return "default"
    return "incumbent" if levels == view.incumbent else "other"
