"""The built-in strategist, which needs no LLM: screen the factors, search the levels of those that matter, confirm the best.

    screen    two levels of each factor, for as many factors as the budget pays for
    scan      one factor at a time at its other levels, starting from the default or the incumbent
    search    a Gaussian process over the levels of the most important factors picks promising settings; two seeds each
    confirm   the setting that looks best against the default or the incumbent, on fresh seeds
    replicate a confirmation that contradicts the exploration

With several instruments, it works on the first until that has a confirmed best setting or has spent its share of the budget.
On the next one, it first tries to confirm the setting that was confirmed before, and then continues as on the first. What is
left of the budget goes to the instrument that has spent the least.

Everything follows from `Seen`: the same records give the same proposals. A proposal's `because` is part of its
study's question, and so of the hash of its plan: rewording it changes the hash.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from researcher.campaign.goal import Aim, AimFactor, changed, default_levels
from researcher.campaign.honesty import limits
from researcher.campaign.proposals import PRIOR_MARGINS, NewHypothesis, Proposal
from researcher.campaign.seen import EffectSeen, Seen, StudySeen, View, key_of
from researcher.design.planning import PLANNED_EFFECT
from researcher.instruments.instrument import Scalar
from researcher.instruments.levels import level_text
from researcher.models import Action, LlmCall
from researcher.study.plan import Verdict

_MOST_SCREENED, _MOST_SEARCHED, _MOST_PROPOSED = 11, 5, 5
_MOST_SETTINGS = 2000
"""Maximum number of settings that a search considers. If there are more, factors are held fixed, the weakest first."""
_SEARCH_SEEDS = 2
_WIDE = 20
"""Minimum number of trials that a study's budget must allow for levels to be scanned one by one."""
_MOST_CONFIRMATIONS = 3
_MOST_SEEDS = 60
_SHRUNK = 0.6
"""Share of an explored effect that a confirmation is planned to detect, because the setting that looks best usually looks better than it is."""
_MATTERS = 0.5
"""How much better a setting has to look before a confirmation is worthwhile, as a share of the margin."""
_HOPE = 0.25
"""Expected improvement that makes another search worthwhile, as a share of the margin."""
_AS_GOOD = 0.25
"""How much worse a simpler setting may be and still be preferred, as a share of the margin."""
_Levels = dict[str, Scalar]
Point = tuple[_Levels, int, float]
"""A setting, the number of its finished trials, and their mean."""


class BuiltinStrategist:
    """Proposes by fixed rules, without an LLM."""

    name = "builtin"

    async def propose(self, seen: Seen) -> Sequence[Proposal]:
        return proposals(seen)

    def calls(self) -> list[LlmCall]:
        return []


def proposals(seen: Seen) -> list[Proposal]:
    """Return the alternatives for the next step. The last one ends the campaign, in case the budget pays for none of the others.

    While another instrument may still have its turn, the first attempt leaves that ending out.
    """
    turns = _turns(seen)
    found = _less_vetoed(turns[0], seen)
    if len(turns) > 1:
        if not seen.problems:
            return found
        found = [turn[place] for turn in turns for place in dict.fromkeys((0, len(turn) - 1))]
    return [*found[: _MOST_PROPOSED - 1], _conclusion(seen)]


def _less_vetoed(found: list[Proposal], seen: Seen) -> list[Proposal]:
    """Skip as many of the first proposals as people have vetoed on this instrument, unless that leaves none. All of `found` are on
    one instrument."""
    about = {each.instrument or "" for each in found}
    vetoed = sum(said.kind == "vetoed" and said.instrument in about for said in seen.said)
    return (found[vetoed:] if vetoed and len(found) > vetoed else found)[: _MOST_PROPOSED - 1]


# -- instruments ------------------------------------------------------------------------------------------------------------


def _turns(seen: Seen) -> list[list[Proposal]]:
    """Return one list of alternatives for each instrument or step that may come next. No list is empty, unless it is the only
    one."""
    views = seen.views
    if len(views) == 1:
        return [_own(views[0])]
    unknown = [view for view in views if not view.incumbent and not view.aim.generated]
    found = [[step] for view in unknown if (step := _carried_over(view)) is not None]
    unsettled = [view for view in views if not _settled(view)]
    behind = [view for view in unsettled if _spent_share(view) < 1 / len(views)]
    ordered = (*behind, *unsettled, *sorted(views, key=_spent_share))
    found += [_own(seen.on(name)) for name in dict.fromkeys(view.instrument for view in ordered)]
    return [each for each in found if each] or [[]]


def _settled(view: View) -> bool:
    """Return whether the instrument has a confirmed best and has been explored by a scan or search."""
    return bool(view.incumbent) and any(study.design == "levels" for study in view.studies)


def _own(view: View) -> list[Proposal]:
    """Propose the next step on one instrument, based only on that instrument's results."""
    screened = any(study.design == "screen" for study in view.studies)
    if not view.aim.free:
        return []
    found = _screens(view) if not screened and len(view.aim.free) > 1 else _after_screen(view)
    if not view.whole.others:
        return found
    return [
        each.model_copy(update={"instrument": view.key or None, "because": f"On {view.instrument}: {each.because}"})
        for each in found
    ]


def _spent_share(view: View) -> float:
    """Return the share of the campaign's trials or of its wall time, whichever is larger, that this instrument's studies have
    used."""
    left, all_studies = view.whole.left, view.whole.studies
    limited = [
        (left.trials, [float(each.trials) for each in all_studies]),
        (left.wall_s, [each.wall_s for each in all_studies]),
    ]
    shares = [0.0]
    for rest, spent in limited:
        if rest is not None and (whole := rest + math.fsum(spent)) > 0:
            own = (value for value, study in zip(spent, all_studies, strict=True) if study.instrument == view.key)
            shares.append(math.fsum(own) / whole)
    return max(shares)


def _carried_over(view: View) -> Proposal | None:
    """Propose to confirm, on this instrument, the newest setting that another instrument confirmed and this one has not tested."""
    for study, levels in reversed(view.confirmed_elsewhere()):
        if levels and view.can_set(levels) and not view.tests(levels) and not view.touched(levels):
            return _also(view, study, levels)
    return None


def _also(view: View, study: StudySeen, levels: _Levels) -> Proposal:
    aim, there = view.aim, view.whole.of(study).instrument
    return Proposal(
        action="confirm",
        instrument=view.key or None,
        because=f"{words_of(levels)} was confirmed on {there}: does it help on {aim.instrument} too?",
        spec={
            "design": "compare",
            "arms": {"default": {}, arm_name(aim, levels): levels},
            "seeds": {"min": _least_seeds(view), "max": _MOST_SEEDS},
        },
        hypothesis=NewHypothesis(
            claim=f"{words_of(levels)} also helps on {aim.instrument}: it is better than the default on {aim.metric} by {aim.margin:g} or more.",
            prediction=f"{aim.metric} of {aim.instrument} {'rises' if aim.sign > 0 else 'falls'} by {aim.margin:g} or more.",
            kill_if="The interval points the other way, or lies within the margin on both sides.",
            parent=study.hypothesis,
        ),
        if_true=f"It holds on {aim.instrument} too; search on from it while something may still be better.",
        if_false=f"It does not hold everywhere: search {aim.instrument} separately.",
        rests_on=(study.study,),
    )


# -- screen -----------------------------------------------------------------------------------------------------------------


def _screens(seen: View) -> list[Proposal]:
    """Propose a screen of all factors, and screens of fewer in case the budget does not pay for all."""
    factors = [_alternative(each) for each in seen.aim.free][:_MOST_SCREENED]
    sizes = dict.fromkeys(size for size in (len(factors), 7, 5, min(3, len(factors))) if 2 <= size <= len(factors))
    return [_screen(factors[:size], seen) for size in sizes]


def _alternative(factor: AimFactor) -> tuple[AimFactor, Scalar]:
    """Return the factor, and the level that a screen compares with its default: the next higher one or, if there is none, the next
    lower one."""
    place = factor.place
    return factor, factor.levels[place + 1] if place + 1 < len(factor.levels) else factor.levels[place - 1]


def _screen(factors: Sequence[tuple[AimFactor, Scalar]], seen: View) -> Proposal:
    names = ", ".join(factor.name for factor, _ in factors)
    return Proposal(
        action="explore",
        because=f"Nothing is known yet: a screen of {len(factors)} factors shows which of them move {seen.aim.metric}.",
        spec={
            "design": "screen",
            "compare": {factor.name: {"baseline": factor.default, "levels": [level]} for factor, level in factors},
        },
        hypothesis=NewHypothesis(
            claim=f"At least one of {names} moves {seen.aim.metric}.",
            prediction=f"An effect of {seen.aim.margin:g} or more.",
            kill_if="No factor's effect stands out from the noise between seeds.",
        ),
        if_true="Search the levels of the factors that move it.",
        if_false="Search all of them together, and conclude if nothing looks better than the default.",
    )


def survivors(seen: View) -> list[AimFactor]:
    """Return the factors to search: first those with a clear effect in a screen, then those never screened, then the others.

    An effect that is weak at one level may be strong at the next, so the search leaves out only the last factors.
    """
    effects: dict[str, EffectSeen] = {}
    known = {factor.name for factor in seen.aim.factors}
    for study in seen.studies:
        for effect in study.effects if not study.confirms else ():
            single = study.design == "screen" or effect.factor in known
            if single and abs(effect.diff) >= abs(effects[effect.factor].diff if effect.factor in effects else 0.0):
                effects[effect.factor] = effect
    ranked = sorted(effects.values(), key=lambda effect: (effect.misleads, -abs(effect.diff)))
    clear = [each for each in ranked if each.low > 0 or each.high < 0 or abs(each.diff) >= seen.aim.margin]
    standing = [each.factor for each in clear if not each.misleads]
    unknown = [factor.name for factor in seen.aim.factors if factor.name not in effects]
    names = dict.fromkeys([*standing, *unknown, *(each.factor for each in ranked)])
    factors = [seen.aim.factor(name) for name in names]
    return [factor for factor in factors if not factor.left_alone][:_MOST_SEARCHED]


# -- search -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """The Gaussian process's prediction for each setting, as a gain over the default; positive is better.

    `mean` and `sd` have shape (N,) and are in the metric's unit.
    """

    surface: Surface
    mean: np.ndarray
    sd: np.ndarray

    @property
    def settings(self) -> list[_Levels]:
        return self.surface.settings

    def simplest(self, aim: Aim) -> int:
        """Return the row of the setting with the fewest changes, among those within a quarter of a margin of the best."""
        good = np.flatnonzero(self.mean >= self.mean.max() - _AS_GOOD * aim.margin)
        return int(min(good, key=lambda row: (len(changed(aim, self.settings[row])), -self.mean[row])))

    def improvement(self, over: float) -> np.ndarray:
        """Return the expected improvement of each setting over the mean `over`, shape (N,)."""
        from scipy.stats import norm

        gap, sd = self.mean - over, np.maximum(self.sd, 1e-12)
        z = gap / sd
        found: np.ndarray = gap * norm.cdf(z) + sd * norm.pdf(z)
        return found


def outlook(seen: View, factors: Sequence[AimFactor]) -> Outlook:
    """Return the model's belief about the levels of these factors, based on all configurations that have run."""
    surface = Surface(seen, factors)
    if not surface.points:
        flat = np.zeros(len(surface.settings))
        return Outlook(surface, flat, flat + PRIOR_MARGINS * seen.aim.margin)
    return surface.believed(surface.points)


class Surface:
    """A Gaussian process over the levels of some factors. Its kernel is fitted once, to the results so far.

    `settings` has N entries, the default first. `at` is the row of the incumbent.
    """

    def __init__(self, seen: View, factors: Sequence[AimFactor]) -> None:
        self._seen = seen
        self._factors = factors
        self.settings = _settings(seen, factors)
        self._places = np.array([_place(each, factors) for each in self.settings])
        usual = default_levels(seen.aim)
        self.points: list[Point] = [({**usual, **levels}, n, mean) for levels, n, mean in seen.measured().values()]
        incumbent = key_of(seen.incumbent)
        keys = [key_of(changed(seen.aim, each)) for each in self.settings]
        self.at = keys.index(incumbent) if incumbent in keys else 0
        self._kernel: Any = None

    def believed(self, points: Sequence[Point]) -> Outlook:
        """Fit the model to these points. Return its mean and standard deviation at every setting, in the metric's unit."""
        from sklearn.gaussian_process import GaussianProcessRegressor

        margin, sigma = self._seen.aim.margin, self._seen.sigma
        x = np.array([_place(levels, self._factors) for levels, _, _ in points])
        y = np.array([mean for _, _, mean in points])
        noise = np.array([(sigma / margin) ** 2 / n for _, n, _ in points])
        centre = float(np.sum(y / noise) / np.sum(1 / noise))
        fits = {} if self._kernel is None else {"optimizer": None}
        kernel = self._kernel or _kernel(x.shape[1])
        model = GaussianProcessRegressor(kernel, alpha=noise, n_restarts_optimizer=0, random_state=0, **fits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length scale at its bound is a valid fit
            model.fit(x, self._seen.aim.sign * (y - centre) / margin)
        self._kernel = model.kernel_
        mean, sd = model.predict(self._places, return_std=True)
        mean, sd = np.asarray(mean) * margin, np.asarray(sd) * margin
        return Outlook(self, mean - mean[0], sd)


def _kernel(dimensions: int) -> Any:
    """Return a kernel that is smooth over a few steps of each factor, plus a linear part."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

    smooth = ConstantKernel(PRIOR_MARGINS**2, (0.25, 100.0)) * RBF(np.full(dimensions, 2.0), (0.7, 8.0))
    return smooth + ConstantKernel(0.25, (0.05, 4.0)) * DotProduct(0.1, "fixed")


def _settings(seen: View, factors: Sequence[AimFactor]) -> list[_Levels]:
    """Return every combination of the factors' levels, the default first. All other factors keep the incumbent's levels."""
    chosen = list(factors)
    while math.prod(len(factor.levels) for factor in chosen) > _MOST_SETTINGS:
        chosen.pop()
    base = {**default_levels(seen.aim), **seen.incumbent}
    combined = (
        base | dict(zip((factor.name for factor in chosen), levels, strict=True))
        for levels in itertools.product(*(factor.levels for factor in chosen))
    )
    return list({key_of(each): each for each in (default_levels(seen.aim), *combined)}.values())


def _place(levels: _Levels, factors: Sequence[AimFactor]) -> list[float]:
    """Return a setting's coordinates. A numeric factor has one: its distance from the default in steps. Any other factor has one
    for each level except the default: 2 for the setting's level, else 0."""
    place: list[float] = []
    for factor in factors:
        level = levels[factor.name]
        if factor.ordered:
            place.append(_step(factor, float(level)))
        else:
            place += [2.0 * (level == each) for each in factor.levels if each != factor.default]
    return place


def _step(factor: AimFactor, level: float) -> float:
    """Return the number of steps from the factor's default to this level. A level in between counts as a fraction of a step."""
    ladder = [float(each) for each in factor.levels]
    return float(np.interp(level, ladder, range(len(ladder)))) - factor.place


def _after_screen(seen: View) -> list[Proposal]:
    """Search while some setting may beat the one that looks best, then confirm that one.

    If there is nothing to confirm, scan the factors that the search left out, around the incumbent if there is one.
    """
    if (contradiction := _contradicted(seen)) is not None:
        return [contradiction]
    factors, margin = survivors(seen), seen.aim.margin
    view = outlook(seen, factors)
    best, at = view.simplest(seen.aim), view.surface.at
    gain = float(view.mean[best] - view.mean[at])
    new = not seen.tests(changed(seen.aim, view.settings[best]))
    confirm = gain >= _MATTERS * margin and new and sum(study.confirms for study in seen.studies) < _MOST_CONFIRMATIONS
    confirmation = [_confirmation(seen, view.settings[best], gain)] if confirm else []
    looks = sum(study.design == "levels" for study in seen.studies)
    if not looks and _affordable("explore", seen) >= _WIDE:
        return [*_scans(seen), *_searches(seen, factors, view)[1:]]
    if not looks or float(view.improvement(float(view.mean.max())).max()) >= _HOPE * margin:
        return [*_searches(seen, factors, view), *confirmation]  # the confirmation in case no search is affordable
    return confirmation or _scans(seen)


def _searches(seen: View, factors: Sequence[AimFactor], view: Outlook) -> list[Proposal]:
    """Propose searches of several sizes, over the settings with the largest expected improvement."""
    picked = _batch(seen, view, most=7)
    return [_search(seen, picked[:size], factors) for size in (7, 3, 2) if size <= len(picked)]


def _batch(seen: View, view: Outlook, most: int) -> list[_Levels]:
    """Pick settings one by one, as if each earlier pick had turned out as the model believes (the kriging believer)."""
    surface, points = view.surface, list(view.surface.points)
    if not points:
        return view.settings[1 : most + 1]
    picked: list[_Levels] = []
    rows = [0]  # the default runs in every search
    base = next((mean for levels, _, mean in points if not changed(seen.aim, levels)), points[0][2])
    for _ in range(most):
        gain = view.improvement(float(view.mean.max()))
        gain[rows] = -1.0
        row = int(np.argmax(gain))
        if gain[row] <= 1e-6 * seen.aim.margin:
            break
        rows.append(row)
        picked.append(view.settings[row])
        points.append((view.settings[row], _SEARCH_SEEDS, base + seen.aim.sign * float(view.mean[row])))
        view = surface.believed(points)
    return picked


def _scans(seen: View) -> list[Proposal]:
    """Propose to vary one factor at a time from the incumbent, or the default, at untried levels.

    The farthest levels come first, and factors take turns. A screen tries only one level of each factor; a factor that has no
    effect there may have one two steps further.
    """
    base = {**default_levels(seen.aim), **seen.incumbent}
    ran = seen.measured()
    ladders = [_farthest_first(factor) for factor in seen.aim.free]
    settings: list[_Levels] = []
    for levels in itertools.zip_longest(*ladders):
        for factor, level in zip(seen.aim.free, levels, strict=True):
            if level is not None and level != base[factor.name]:
                settings.append(base | {factor.name: level})
    settings = [each for each in settings if key_of(changed(seen.aim, each)) not in ran]
    return [_scan(seen, settings[:size]) for size in (12, 6) if size <= len(settings)] or (
        [_scan(seen, settings)] if settings else []
    )


def _farthest_first(factor: AimFactor) -> list[Scalar]:
    places = sorted(range(len(factor.levels)), key=lambda place: -abs(place - factor.place))
    return [factor.levels[place] for place in places]


def _scan(seen: View, settings: Sequence[_Levels]) -> Proposal:
    name = "incumbent" if seen.incumbent else "default"
    return Proposal(
        action="explore",
        because=f"One factor at a time beside the {name}, at levels that nobody has tried there.",
        spec=_beside(seen, name, seen.incumbent, settings),
        hypothesis=NewHypothesis(
            claim=f"One of these levels is better than the {name}'s by {seen.aim.margin:g} or more.",
            prediction=f"One of {len(settings)} settings exceeds the {name} on {seen.aim.metric} by the margin.",
            kill_if="All of them stay within the noise between seeds.",
            parent=_parent(seen),
        ),
        if_true="Search that factor's levels together with those of the others that matter.",
        if_false="Try the levels that are left, or conclude.",
        rests_on=tuple(study.study for study in seen.studies),
    )


def _beside(seen: View, name: str, base: _Levels, settings: Sequence[_Levels]) -> dict[str, Any]:
    """Build the spec of a study that compares these settings with the base setting called `name`, without a verdict."""
    arms = {name: base} | {arm_name(seen.aim, each): changed(seen.aim, each) for each in settings}
    return {"design": "screen", "arms": arms, "seeds": {"min": _SEARCH_SEEDS}}


def _parent(seen: View) -> str | None:
    """Return the hypothesis that a new one builds on: the last that was supported, or else the last that was explored."""
    for wanted in ("supported", "explored"):
        told = [each.id for each in seen.hypotheses if each.status == wanted]
        if told:
            return told[-1]
    return None


def _search(seen: View, settings: Sequence[_Levels], factors: Sequence[AimFactor]) -> Proposal:
    names = ", ".join(factor.name for factor in factors)
    return Proposal(
        action="explore",
        because=f"Settings of {names} that may be better than what looks best so far, by what all trials say together.",
        spec=_beside(seen, "default", {}, settings),
        hypothesis=NewHypothesis(
            claim=f"Another setting of {names} is better than the default by {seen.aim.margin:g} or more.",
            prediction=f"One of {len(settings)} settings exceeds the default on {seen.aim.metric} by the margin.",
            kill_if="None of them beats what already looks best.",
            parent=_parent(seen),
        ),
        if_true="Search around it, then confirm it on fresh seeds.",
        if_false="Confirm what looked best before, or conclude that the default is as good.",
        rests_on=tuple(study.study for study in seen.studies),
        drops=_dropped(seen, factors),
    )


def _dropped(seen: View, factors: Sequence[AimFactor]) -> dict[str, str]:
    """Return the screen's hypothesis with the reason to drop it, if no factor stood out; else an empty dict."""
    kept = {factor.name for factor in factors}
    for study in seen.studies:
        if study.design == "screen":
            standing = [each for each in study.effects if each.low > 0 or each.high < 0]
            open_ids = {each.id for each in seen.hypotheses if each.status in ("open", "explored")}
            if not standing and study.hypothesis in open_ids:
                return {study.hypothesis: f"no factor's effect stood out; searched: {', '.join(sorted(kept))}"}
    return {}


# -- confirm ------------------------------------------------------------------------------------------------------------------


def _confirmation(seen: View, best: _Levels, gain: float) -> Proposal:
    levels = changed(seen.aim, best)
    treatment = arm_name(seen.aim, best)
    baseline = "incumbent" if seen.incumbent else "default"
    return Proposal(
        action="confirm",
        because=f"{words_of(levels)} looks best: by all trials so far better than the {baseline} by {gain:.3g}.",
        spec={
            "design": "compare",
            "arms": {baseline: seen.incumbent, treatment: levels},
            "seeds": {"min": _least_seeds(seen), "max": _MOST_SEEDS},
        },
        hypothesis=NewHypothesis(
            claim=f"{words_of(levels)} is better than the {baseline} on {seen.aim.metric} by {seen.aim.margin:g} or more.",
            prediction=f"{seen.aim.metric} {'rises' if seen.aim.sign > 0 else 'falls'} by {seen.aim.margin:g} or more.",
            kill_if="The interval points the other way, or lies within the margin on both sides.",
            parent=_parent(seen),
        ),
        expects=max(PLANNED_EFFECT * seen.aim.margin, _SHRUNK * gain),
        if_true="It becomes the incumbent; search on from it while something may still be better.",
        if_false="Search where the trials now point, or conclude.",
        rests_on=tuple(study.study for study in seen.studies),
    )


def _least_seeds(seen: View) -> int:
    """Return how many seeds per arm a confirmation begins with: 6 if the budget pays for at least 24 trials, enough for 12 per
    arm; else 3.

    With fewer than 6, the noise floor's bound on the spread is so wide that many studies would be refused as underpowered.
    """
    return 6 if _affordable("confirm", seen) >= 24 else 3


def _affordable(action: Action, seen: View) -> float:
    """Return how many trials the budget allows the next study of this kind, given the time that trials took so far."""
    budget = limits(action, seen.whole)
    ran = [study for study in seen.studies or seen.whole.studies if study.trials]
    trials = float(budget.get("trials", math.inf))
    if "wall" in budget and ran:
        trial_s = sum(study.wall_s for study in ran) / sum(study.trials for study in ran)
        trials = min(trials, budget["wall"] / max(trial_s, 1e-9))
    return trials


def _contradicted(seen: View) -> Proposal | None:
    """Propose to replicate the last confirmation if it refuted the exploration's result."""
    last = seen.studies[-1] if seen.studies else None
    if last is None or last.action != "confirm" or last.verdict is not Verdict.REFUTED or last.unfit:
        return None
    if all(study.confirms for study in seen.studies):  # no exploration here that it could contradict
        return None
    effect = last.effects[0]
    sides = {effect.baseline: last.arm(effect.baseline).levels, effect.treatment: last.arm(effect.treatment).levels}
    if any(seen.touched(levels) for levels in sides.values()):
        return None
    return Proposal(
        action="replicate",
        because=f"{effect.treatment} had looked better while exploring, and the confirmation found it worse.",
        spec={"design": "compare", "arms": sides, "seeds": {"min": _least_seeds(seen), "max": _MOST_SEEDS}},
        hypothesis=last.hypothesis,
        if_true="The exploration was misleading; its setting is given up.",
        if_false="The two results disagree; both are reported.",
        rests_on=(last.study,),
    )


def _conclusion(seen: Seen) -> Proposal:
    views = seen.views
    said = [_found_on(view) for view in views]
    words = (
        said[0]
        if len(views) == 1
        else " ".join(f"{view.instrument}: {each}" for view, each in zip(views, said, strict=True))
    )
    return Proposal(action="conclude", because="No further step is worth its price, or can be paid for.", words=words)


def _found_on(seen: View) -> str:
    """Write the conclusion about one instrument."""
    confirmed = [study for study in seen.studies if study.supports]
    tried = [study for study in seen.studies if study.confirms]
    if confirmed:
        return (
            f"{words_of(seen.incumbent)} stands: nothing that the budget still pays for looks better by half a margin."
        )
    if tried:
        return "What looked better while exploring was not confirmed."
    if not any(study.trials for study in seen.studies):
        return "No study could be paid for, so nothing was tried: give it a larger budget, or fewer factors."
    if all(study.unfit for study in seen.studies):
        return f"No result can be used: {seen.studies[-1].unfit}."
    return "Nothing that was tried looks better than the default by half a margin."


# -- words ----------------------------------------------------------------------------------------------------------------------


def words_of(levels: _Levels) -> str:
    """Write the levels in words: `learning_rate 4e-5 and group_size 8`."""
    return " and ".join(f"{name} {level_text(level)}" for name, level in levels.items()) or "the default"


def arm_name(aim: Aim, levels: _Levels) -> str:
    """Return the name of the arm with these levels: `learning_rate=4e-5+group_size=8`, or `default` if none is changed.

    A name of more than 60 characters is cut to its first 50, followed by a hash.
    """
    told = "+".join(f"{name}={level_text(level)}" for name, level in changed(aim, levels).items())
    if not told:
        return "default"
    if len(told) <= 60:
        return told
    import hashlib

    return f"{told[:50]}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
