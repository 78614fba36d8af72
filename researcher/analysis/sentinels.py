"""Sentinels: checks that warn about a study's trials or make verdicts invalid.

A trial counts as slowed by a shared machine if it is far slower than others of the same arm, since arms may differ in speed by
design. Only comparisons of wall time become invalid then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from researcher.analysis import opposed
from researcher.analysis.attrition import attrition
from researcher.analysis.proxies import reward_against_success
from researcher.analysis.sentinel_findings import (
    SentinelFinding,
    Severity,
    Unchecked,
    ends,
    finding,
    points,
    series,
    unchecked,
)
from researcher.instruments.instrument import RUN_PARAMETERS, STUDY_MODEL, STUDY_STEPS, TIMED, Factor, leaf_at
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Plan
from swarm.models.catalogue import hosted_name
from swarm.protocol.mismatch import MISMATCH, STALENESS, outgrown

SLOW = 2.0
_SHARED = "steps of some trials took far longer than those of other trials of the same arm: the machine was shared"


def shared_machine(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Compare each trial with the median of its arm's other trials: by median step time, or by total step time if that is the
    metric."""
    timed = _timed(plan)
    unseen: list[TrialRecord] = []
    hits: list[tuple[TrialRecord, float]] = []
    for arm in plan.arms:
        own = [trial for trial in done if trial.arm == arm.name]
        taken = {trial.key: _seconds(trial, whole=timed) for trial in own if trial.series.get("step_s")}
        unseen += [trial for trial in own if trial.key not in taken or len(taken) < 2]
        for trial in own:
            others = [seconds for key, seconds in taken.items() if key != trial.key]
            if trial.key in taken and others and taken[trial.key] > SLOW * float(np.median(others)) > 0:
                hits.append((trial, taken[trial.key] / float(np.median(others))))
    found = [finding(name, "invalid" if timed else "warning", _SHARED, hits)] if hits else []
    return found + ([unchecked(name, unseen)] if unseen else [])


def contention(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Compare each trial's step time with the median of its arm, including the trial itself. This is the predecessor of
    `shared_machine`, which older plans name.
    """
    timed = _timed(plan)
    found = []
    for arm in plan.arms:
        own = [trial for trial in done if trial.arm == arm.name]
        if any("step_s" not in trial.series for trial in own):
            return [unchecked(name)]
        medians = {trial.key: float(np.median(series(trial, "step_s"))) for trial in own}
        usual = float(np.median(list(medians.values()))) if medians else 0.0
        slow = [key for key, median in medians.items() if usual > 0 and median > SLOW * usual]
        if slow:
            hits = [(trial, medians[trial.key] / usual) for trial in own if trial.key in slow]
            found.append(finding(name, "invalid" if timed else "warning", _SHARED, hits))
    return found


def _timed(plan: Plan) -> bool:
    return any(plan.metric(hypothesis.metric).kind in TIMED for hypothesis in plan.hypotheses)


def _seconds(trial: TrialRecord, *, whole: bool) -> float:
    """Return the trial's total seconds in steps if `whole`, else its median seconds per step."""
    step_s = series(trial, "step_s")
    return float(np.sum(step_s) if whole else np.median(step_s))


COLLAPSED_ENTROPY = 0.05
"""A policy counts as collapsed below this share of its initial entropy."""
FAR_KL = 1.0
"""KL divergence from the initial weights, in nats per token, that counts as far away."""
MOSTLY = 0.9
GROWN = 1.5
LOOPING, ALIKE = (0.5, 0.2), (0.6, 0.3)
"""Limits for repetition within answers and between answers, each as (share of repeated n-grams, rise of that share).

Prose repeats a few percent of its 4-grams, worked sums up to a third, and a looping model nearly all.
"""
_DTYPE = "run.dtype"
"""Path of the dtype of matrix products in a trial's settings."""


Seen = tuple[str, float] | None
"""One trial's problem in words, with a number; None if there is no problem."""


def inspect(plan: Plan, trials: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Return the findings of the plan's sentinels, in the plan's order.

    Raises: ValueError when the plan names a sentinel that does not exist.
    """
    unknown = sorted(set(plan.sentinels) - set(SENTINELS))
    if unknown:
        raise ValueError(f"the plan names unknown sentinels {unknown}; known: {sorted(SENTINELS)}")
    done = [trial for trial in trials if trial.status is TrialStatus.DONE]
    return [finding for name in plan.sentinels for finding in SENTINELS[name](name, plan, done)]


# -- what each looks at ---------------------------------------------------------------------------------------------


def _weights_did_not_change(plan: Plan, trial: TrialRecord) -> Seen:
    for role in (None, *plan.roles):
        if _learning_rate(plan, trial, role) == 0:
            continue
        of, whose = ("", "the weights") if role is None else (f"{role}/", f"the weights of the {role}")
        if np.any(series(trial, f"{of}weights_change") > 0):
            continue
        counted = bool(trial.series.get(f"{of}tokens_trained"))
        if counted and np.any(series(trial, f"{of}tokens_trained") > 0):
            return f"{whose} never changed although the run trained{_if_forced(trial, of)}", 0.0
        if np.any(series(trial, f"{of}zero_variance_share") < 1):
            because = ": no token was trained, although rewards differed" if counted else " although rewards differed"
            return f"{whose} never changed{because}", 0.0
        if not counted:
            raise Unchecked
    return None


def _if_forced(trial: TrialRecord, of: str) -> str:
    """Return a note for the finding if all trained tokens were forced, so that none had an alternative; else ""."""
    forced = dict(trial.series.get(f"{of}tokens_forced") or ())
    only = all(forced.get(step, 0) >= trained for step, trained in points(trial, f"{of}tokens_trained"))
    return ": all trained tokens were forced" if only else ""


def _collapse(_plan: Plan, trial: TrialRecord) -> Seen:
    reward, entropy = series(trial, "reward_mean"), series(trial, "entropy")
    if _end(reward) > _start(reward):
        return None
    if entropy[0] > 0 and entropy[-1] < COLLAPSED_ENTROPY * entropy[0]:
        return "entropy collapsed while reward did not rise", float(entropy[-1])
    drift = trial.series.get("kl_to_start")
    if drift and drift[-1][1] > FAR_KL:
        return "the policy drifted far from its initial weights while reward did not rise", drift[-1][1]
    return None


def _no_signal(_plan: Plan, trial: TrialRecord) -> Seen:
    share = float(np.mean(series(trial, "zero_variance_share")))
    return ("nearly all groups had equal rewards: there was little to learn from", share) if share > MOSTLY else None


def _leak(_plan: Plan, trial: TrialRecord) -> Seen:
    evidence = trial.evidence
    if evidence is None or evidence.train_tasks is None or evidence.heldout_tasks is None:
        raise Unchecked
    both = set(evidence.train_tasks) & set(evidence.heldout_tasks)
    return ("held-out tasks are among the training tasks", float(len(both))) if both else None


def _gap(_plan: Plan, trial: TrialRecord) -> Seen:
    """Check whether training reward rose by more than half its spread, and held-out reward by less than half of that rise."""
    reward, spread = series(trial, "reward_mean"), series(trial, "reward_std")
    before, after = series(trial, "eval_reward_before"), series(trial, "eval_reward_after")
    trained, held_out = _end(reward) - _start(reward), float(np.mean(after) - np.mean(before))
    if trained > 0.5 * float(np.mean(spread)) and held_out < 0.5 * trained:
        return "training reward rose far more than held-out reward", trained - held_out
    return None


def _longer(_plan: Plan, trial: TrialRecord) -> Seen:
    reward, length = series(trial, "reward_mean"), series(trial, "sampled_tokens_mean")
    if _start(length) > 0 and _end(length) > GROWN * _start(length) and _end(reward) <= _start(reward):
        return "answers grew longer without more reward", _end(length) / _start(length)
    return None


def _repetitive(plan: Plan, trial: TrialRecord) -> Seen:
    """Check whether training reward rose by more than half its spread while answers became more repetitive.

    A reward that is easy to game is often gamed by repeating one trick.
    """
    for role in (None, *plan.roles):
        of, whose = (f"{role}/", f" of the {role}") if role is not None else ("", "")
        reward, spread = series(trial, f"{of}reward_mean"), series(trial, f"{of}reward_std")
        if _end(reward) - _start(reward) <= 0.5 * float(np.mean(spread)):
            continue
        for name, (most, rise), text in (
            ("repetition_within", LOOPING, "reward rose while the answers{} began to repeat themselves"),
            ("repetition_across", ALIKE, "reward rose while the answers{} to different tasks became the same"),
        ):
            repeated = series(trial, f"{of}{name}")
            if _end(repeated) > most and _end(repeated) - _start(repeated) > rise:
                return text.format(whose), _end(repeated)
    return None


def _other_weights(plan: Plan, trial: TrialRecord) -> Seen:
    unseen = False
    for role in (None, *plan.roles):
        of, whose = (f"{role}/", f"the {role}") if role is not None else ("", "the model")
        stale = dict(points(trial, of + STALENESS))
        steps = [(value, stale[step]) for step, value in points(trial, of + MISMATCH) if step in stale]
        later = outgrown(steps)
        if later is not None:
            return (
                f"the probabilities at which {whose} was sampled departed from its trainer's after the first step",
                later,
            )
        unseen = unseen or sum(staleness == 0 for _, staleness in steps) < 2  # nothing to compare the first step with
    if unseen:
        raise Unchecked
    return None


def _not_applied(plan: Plan, trial: TrialRecord) -> Seen:
    """Compare the plan's settings for the arm with what server and client report."""
    wrong = [path for path, wanted in settings_of(plan, trial).items() if not as_set(path, _used(trial, path), wanted)]
    return (f"never reached the engine: {', '.join(wrong)}", float(len(wrong))) if wrong else None


def _changed(_plan: Plan, trial: TrialRecord) -> Seen:
    if trial.evidence is None or trial.evidence.changes is None:
        raise Unchecked
    if trial.evidence.changes:
        text = "the run was changed while it trained, which the plan does not mention: the trial is exploratory"
        return text, float(len(trial.evidence.changes))
    if trial.evidence.joined:
        text = "the run trained on episodes from clients that the plan does not name: the trial is exploratory"
        return text, float(sum(trial.evidence.joined.values()))
    return None


def _mixed_code(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Find hypotheses whose sides ran different code.

    A repair of the instrument separates the trials before it from those after it. If it also separates the two sides of a
    hypothesis, the code may have caused the difference.
    """
    ran = {trial.key: _code_of(plan, trial) for trial in done if trial.evidence is not None}
    blind = [trial for trial in done if trial.evidence is None]
    found = [unchecked(name, blind)] if blind else []
    if len(_all_of(ran)) < 2:
        return found
    text = "the compared arms ran different code: no version was run by both"
    found += _parted(name, text, plan, done, ran)
    text = "the instrument's code was repaired while the study ran, and not all trials ran the same version"
    mended = [trial for trial in done if trial.evidence is not None and trial.evidence.code_versions]
    return [*found, finding(name, "warning", text, [(trial, float(len(ran[trial.key]))) for trial in mended])]


def _mixed_types(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
    """Find hypotheses whose sides ran with different dtypes.

    Servers on different machines may compute in different dtypes and round differently. If that separates the two sides of a
    hypothesis, it may have caused the difference.
    """
    blind, used = [], {}
    for trial in done:
        try:
            used[trial.key] = frozenset([_types(plan, trial)])
        except Unchecked:
            blind.append(trial)
    found = [unchecked(name, blind)] if blind else []
    if len(_all_of(used)) < 2:
        return found
    text = "the compared arms were computed in different number types: none was used by both"
    found += _parted(name, text, plan, done, used)
    text = "trials were computed in different number types, depending on their servers"
    return [*found, finding(name, "warning", text, [(each, 2.0) for each in done if each.key in used])]


def _types(plan: Plan, trial: TrialRecord) -> str:
    """Return the sampling dtype, and each model's training dtype unless the plan varies it."""
    if trial.evidence is None:
        raise Unchecked
    varied = {target for factor in plan.factors for target in factor.targets}
    paths = [_DTYPE, *(f"roles.{role}.dtype" for role in sorted(trial.evidence.roles or {}))]
    trained = {path: str(_used(trial, path)) for path in paths if path not in varied}
    sampled = trial.evidence.model.dtype if trial.evidence.model is not None else None
    if sampled is None and _DTYPE in varied:
        raise Unchecked
    return str((sampled or trained[_DTYPE], trained))


def _all_of(used: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*used.values())


def _parted(
    name: str, text: str, plan: Plan, done: Sequence[TrialRecord], used: Mapping[str, frozenset[str]]
) -> list[SentinelFinding]:
    """Find hypotheses whose two sides used nothing in common. `used` maps each trial's key to what that trial used."""
    found = []
    for hypothesis in plan.hypotheses:
        sides = [
            _all_of({trial.key: used.get(trial.key, frozenset()) for trial in done if trial.arm in arms})
            for arms in (hypothesis.baselines, hypothesis.treatments)
        ]
        if all(sides) and not sides[0] & sides[1]:
            hits = [(trial, float(len(sides[0] | sides[1]))) for trial in done if trial.arm in hypothesis.sides]
            found.append(finding(name, "invalid", text, hits))
    return found


def _code_of(plan: Plan, trial: TrialRecord) -> frozenset[str]:
    versions = trial.evidence.code_versions if trial.evidence is not None else None
    return frozenset(versions or (plan.instrument_code,))


# -- how sentinels run ----------------------------------------------------------------------------------------------

Sentinel = Callable[[str, Plan, Sequence[TrialRecord]], list[SentinelFinding]]


def _each(look: Callable[[Plan, TrialRecord], Seen], severity: Severity) -> Sentinel:
    """Make a sentinel that checks every trial on its own and merges findings with the same text."""

    def ask(name: str, plan: Plan, done: Sequence[TrialRecord]) -> list[SentinelFinding]:
        seen: dict[str, list[tuple[TrialRecord, float]]] = {}
        blind: list[TrialRecord] = []
        for trial in done:
            try:
                found = look(plan, trial)
            except Unchecked:
                blind.append(trial)
                continue
            if found:
                seen.setdefault(found[0], []).append((trial, found[1]))
        findings = [finding(name, severity, text, hits) for text, hits in seen.items()]
        return findings + ([unchecked(name, blind)] if blind else [])

    return ask


SENTINELS: dict[str, Sentinel] = {
    "weights_did_not_change": _each(_weights_did_not_change, "invalid"),
    "heldout_leak": _each(_leak, "invalid"),
    "factor_not_applied": _each(_not_applied, "invalid"),
    "unplanned_change": _each(_changed, "invalid"),
    "contention": contention,
    "shared_machine": shared_machine,
    "mixed_code": _mixed_code,
    "mixed_types": _mixed_types,
    "attrition": attrition,
    "sampled_by_other_weights": _each(_other_weights, "warning"),
    "collapse": _each(_collapse, "warning"),
    "no_signal": _each(_no_signal, "warning"),
    "heldout_gap": _each(_gap, "warning"),
    "longer_without_reward": _each(_longer, "warning"),
    "repetitive_answers": _each(_repetitive, "warning"),
    "reward_against_success": reward_against_success,
    opposed.NAME: opposed.worse_on_heldout,
}


def _start(values: np.ndarray) -> float:
    return ends(values)[0]


def _end(values: np.ndarray) -> float:
    return ends(values)[1]


# -- plan against evidence ------------------------------------------------------------------------------------------


def settings_of(plan: Plan, trial: TrialRecord) -> dict[str, Any]:
    """Return everything that the plan sets for this trial, by target path."""
    wanted: dict[str, Any] = plan.settings | {STUDY_STEPS: plan.steps}
    factors = {factor.name: factor for factor in plan.factors}
    for name, level in plan.arm(trial.arm).levels.items():
        for target in _targets(factors, name):
            wanted[target] = _hosted_as(plan, trial) if target == STUDY_MODEL else level
    wanted |= plan.shared_out(plan.arm(trial.arm))
    if wanted.get(RUN_PARAMETERS) == "full":
        return {path: value for path, value in wanted.items() if not path.startswith(f"{RUN_PARAMETERS}.")}
    return wanted


def _hosted_as(plan: Plan, trial: TrialRecord) -> str:
    """Return the hosted name of the arm's model: the name that the server reported, or the default name."""
    model, found = plan.model_of(trial.arm), trial.evidence.model if trial.evidence is not None else None
    if found is not None and model.is_hosted(found.name, found.fingerprint, found.engine):
        return found.name
    return hosted_name(model.name)


def _learning_rate(plan: Plan, trial: TrialRecord, role: str | None) -> Any:
    """Return the learning rate that the plan sets; None if the instrument's default applies."""
    try:
        levels = {
            path: value
            for path, value in settings_of(plan, trial).items()
            if isinstance(value, bool | int | float | str)
        }
    except Unchecked:
        return None
    return plan.run_fields(levels, role).get("optimizer", {}).get("learning_rate")


def _targets(factors: dict[str, Factor], name: str) -> tuple[str, ...]:
    if name not in factors:
        raise Unchecked
    return factors[name].targets


def _used(trial: TrialRecord, path: str) -> Any:
    evidence = trial.evidence
    root, _, rest = path.partition(".")
    if path == STUDY_MODEL:
        if evidence is None or evidence.model is None:
            raise Unchecked
        return evidence.model.name
    if root == "study":
        return len(series(trial, "reward_mean"))
    source: Any = None
    if evidence is not None:
        source = {"run": evidence.spec, "roles": evidence.roles}.get(root, evidence.parameters)
    if source is None:
        raise Unchecked
    return leaf_at(source, rest.split(".") if root in ("run", "roles") else [rest])


def as_set(path: str, used: Any, wanted: Any) -> bool:
    if (path, wanted) == (RUN_PARAMETERS, "lora"):
        return isinstance(used, dict)
    if path.endswith(".dtype") and wanted == "auto":
        return used is not None
    numbers = isinstance(used, int | float) and isinstance(wanted, int | float)
    return math.isclose(used, wanted, rel_tol=1e-9) if numbers else bool(used == wanted)
