"""Resolves a spec's names into its instrument's factors, levels, settings and metric.

Every name and level is checked here; unknown ones are refused with the nearest known names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from foundation.nearest import MOST_NAMES, nearest
from researcher.design.models import model_factor
from researcher.instruments.instrument import (
    NO_INTERIM_FOR_TEAMS,
    REWARDS,
    STUDY_MODEL,
    STUDY_STEPS,
    UNTIL,
    Direction,
    Factor,
    Instrument,
    Metric,
    Scalar,
)
from researcher.instruments.levels import as_level, level_problem, level_text
from researcher.refusals import Refusals, SpecRefused
from researcher.study.plan import ALPHA
from researcher.study.spec import CROSSED, Compared, StudySpec
from swarm.client.own_algorithms import SourceFault, read_function

Setting = tuple[Factor, Scalar]
_MODEL, _STEPS = "model", "steps"
HUB, DIGEST, _DIGITS = "hf:", "#sha256=", 16
"""Syntax of data sets: prefix of a data set on the hub; separator before a file's digest; number of its digits to keep."""


_SOURCE_NOTE = "The plan holds the text of {}: edits of the file change nothing any more."


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """A factor in which arms differ. `levels` has the baseline first."""

    factor: Factor
    levels: tuple[Scalar, ...]

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The levels in order, without repeats; empty for non-numeric factors."""
        found = {level for level in self.levels if not isinstance(level, str | bool)}
        return tuple(sorted(found)) if self.factor.type in ("int", "float") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A spec with its names resolved.

    Args:
        varied: the compared factors, in the spec's order; empty if there are `bundles`.
        bundles: arms that set several factors each, the baseline first.
        settings: the settings that all arms share.
        direction: claimed direction of the treatments' metric; without a claim, the better one.
        alpha: significance level of the family of hypotheses that one stage decides.
    """

    spec: StudySpec
    varied: tuple[Varied, ...]
    bundles: dict[str, tuple[Setting, ...]]
    settings: tuple[Setting, ...]
    metric: Metric
    secondary: tuple[Metric, ...]
    direction: Direction
    alpha: float
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that define functions used as levels."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors that arms vary."""
        if self.varied:
            return tuple(each.factor for each in self.varied)
        bundled = [factor for settings in self.bundles.values() for factor, _ in settings]
        return tuple({factor.name: factor for factor in bundled}.values())

    @property
    def crossed(self) -> bool:
        """Whether arms cross several factors, each at one of two levels. If not, each arm is one level, or one bundle."""
        return self.spec.design in CROSSED and len(self.varied) > 1

    @property
    def screens(self) -> bool:
        """Whether effects are only explored: nothing is claimed or tested."""
        return self.spec.design == "screen"

    @property
    def direction_assumed(self) -> bool:
        """Whether the spec makes no claim about the direction."""
        return self.screens or self.spec.claim in ("equal", "none")


def question_of(spec: StudySpec, instrument: Instrument, alpha: float = ALPHA) -> Question:
    """Return the checked question. Raises: SpecRefused for every unknown name and level, else for every conflict between fields."""
    question = named(spec, instrument, alpha)
    Refusals([*_misfits(question, instrument)]).raise_any()
    if spec.margin is not None:
        question = replace(question, metric=question.metric.model_copy(update={"margin": spec.margin}))
    return _with_effect(question, instrument)


def named(spec: StudySpec, instrument: Instrument, alpha: float = ALPHA) -> Question:
    """Resolve the spec's names. Raises: SpecRefused for every name and level that the instrument lacks."""
    known, refusals = InstrumentNames(instrument, spec), Refusals()
    varied: list[Varied] = []
    notes: list[str] = []
    if len(spec.models) > 1:
        with refusals.kept():
            varied.append(Varied(factor=known.factor(_MODEL, "model"), levels=tuple(spec.models)))
    for name, given in spec.compare.items():
        with refusals.kept():
            varied.append(_compared(known, name, given))
            notes += _baseline_note(varied[-1], given, spec)
    bundles: dict[str, tuple[Setting, ...]] = {}
    for name, settings in spec.arms.items():
        bundles[name] = known.settings(settings, f"arms.{name}", refusals)
    everywhere = known.settings(spec.set, "set", refusals)
    secondary: list[Metric] = []
    with refusals.kept():
        metric = known.metric(spec.metric or instrument.defaults.metric, "metric")
    for name in spec.secondary:
        with refusals.kept():
            secondary.append(known.metric(name, "secondary"))
    refusals.raise_any()
    return Question(
        spec=spec,
        varied=tuple(varied),
        bundles=bundles,
        settings=everywhere,
        metric=metric,
        secondary=tuple(each for each in secondary if each != metric),
        direction=spec.claim if spec.claim in ("increase", "decrease") else metric.direction,
        alpha=alpha,
        notes=(*notes, *map(_SOURCE_NOTE.format, known.sources)),
        sources=known.sources,
    )


class InstrumentNames:
    """The factors and metrics of an instrument by name, plus the spec's models. With `spec` None there are no models."""

    def __init__(self, instrument: Instrument, spec: StudySpec | None = None) -> None:
        self._instrument = instrument
        self.sources: dict[str, str] = {}
        """Texts of the files whose functions have been resolved so far."""
        self._factors = {factor.name: factor for factor in instrument.factors if factor.target != STUDY_MODEL}
        if not any(factor.target == STUDY_STEPS for factor in instrument.factors):
            self._factors[_STEPS] = Factor(
                name=_STEPS, target=STUDY_STEPS, type="int", default=instrument.defaults.steps, low=1
            )
        if spec is None:
            return
        models = [str(settings[_MODEL]) for settings in spec.arms.values() if _MODEL in settings]
        models = list(dict.fromkeys([*spec.models, *models]))
        if len(models) > 1 or models != list(spec.models):
            own = [] if models and spec.models else [instrument.model]
            self._factors[_MODEL] = model_factor(list(dict.fromkeys([*own, *models])))

    def factor(self, name: str, field: str) -> Factor:
        """Return the factor with this name. `field` is the spec field that names it. Raises: SpecRefused."""
        if name in self._factors:
            return self._factors[name]
        if name == _MODEL:
            said = "models are compared as `model: [ONE, OTHER]`, and set as `model: NAME`"
            raise SpecRefused(f"{field}.{name}", said, [_MODEL])
        names = {alias: factor.name for factor in self._factors.values() for alias in (factor.name, *factor.aliases)}
        raise _unknown(f"{field}.{name}", f"{self._instrument.name} has no factor {name!r}", name, names)

    def metric(self, name: str, field: str) -> Metric:
        """Return the metric with this name. `field` is the spec field that names it. Raises: SpecRefused."""
        for metric in self._instrument.metrics:
            if metric.name == name:
                return metric
        if name in self._factors:
            said = f"{self._instrument.name} has no metric for {name}; it is only a factor"
            raise SpecRefused(field, said, [self._instrument.defaults.metric])
        names = {alias: metric.name for metric in self._instrument.metrics for alias in (metric.name, *metric.aliases)}
        raise _unknown(field, f"{self._instrument.name} has no metric {name!r}", name, names)

    def settings(self, given: Mapping[str, Scalar], field: str, refusals: Refusals) -> tuple[Setting, ...]:
        """Resolve and check each setting. Problems are collected in `refusals`."""
        found: list[Setting] = []
        for name, level in given.items():
            with refusals.kept():
                found.append(self.setting(name, level, field))
        return tuple(found)

    def setting(self, name: str, given: Scalar, field: str) -> Setting:
        """Resolve and check one setting. Raises: SpecRefused, also for a level that the factor cannot take."""
        if name == _STEPS and field == "set":
            raise SpecRefused("set.steps", "set the length of a trial with the top-level field `steps: N`", [_STEPS])
        factor = self.factor(name, field)
        level = as_level(factor, given)
        if factor.takes_functions and isinstance(level, str) and level not in factor.choices:
            level = self._read(level, f"{field}.{name}")
        problem = level_problem(factor, level)
        if problem:
            raise SpecRefused(f"{field}.{name}", problem, [factor.name])
        return factor, _pinned(factor, level, f"{field}.{name}")

    def _read(self, level: str, field: str) -> str:
        """Return the level as the spec names it. If it is a user's function, read its file. Raises: SpecRefused."""
        try:
            source = read_function(level)
        except SourceFault as error:
            raise SpecRefused(field, str(error), [level]) from error
        if source is None:
            return level
        self.sources[source.file] = source.text
        return source.reference


def _pinned(factor: Factor, level: Scalar, field: str) -> Scalar:
    """Replace a data file by its full path and digest, so that a study notices changes. Return other levels unchanged.

    Raises: SpecRefused for a missing file.
    """
    source = str(level)
    if factor.type != "data" or not source or source.startswith(HUB) or DIGEST in source:
        return level
    file = Path(source).expanduser().resolve()
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        said = f"the file {source!r} cannot be read ({error.strerror}; looked for {file}); give its full path, or one relative to here"
        raise SpecRefused(field, said, [source]) from error
    return f"{file}{DIGEST}{digest[:_DIGITS]}"


def _unknown(field: str, problem: str, name: str, names: dict[str, str]) -> SpecRefused:
    """Return the refusal of an unknown name, with the nearest known one. `names` maps each known name or alias to its declared
    name.
    """
    spoken = name.replace("_", " ")
    guess = names.get(spoken) or names.get(nearest(name, names) or nearest(spoken, names) or "")
    if guess is not None:
        return SpecRefused(field, f"{problem}; did you mean {guess}?", [guess])
    known = list(dict.fromkeys(names.values()))
    shown = known[:MOST_NAMES]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return SpecRefused(field, f"{problem}; there are {', '.join(shown)}{more} (`researcher instruments NAME`)", shown)


def _compared(known: InstrumentNames, name: str, given: Compared) -> Varied:
    """Return the factor with the levels to compare, baseline first.

    If the spec names no baseline, it is the first level, as in `--vary`; for a single level, it is the default.
    """
    factor = known.factor(name, "compare")
    levels = [known.setting(name, level, "compare")[1] for level in given.levels]
    if given.baseline is not None:
        levels.insert(0, known.setting(name, given.baseline, "compare")[1])
    elif len(levels) == 1:
        if factor.default == "":
            raise SpecRefused(f"compare.{name}", f"{name} has no default level: name a baseline", [name])
        levels.insert(0, _pinned(factor, factor.default, f"compare.{name}"))
    return Varied(factor=factor, levels=tuple(levels))


def _baseline_note(varied: Varied, given: Compared, spec: StudySpec) -> list[str]:
    """Return a note on the assumed baseline if the spec names none and the design has one."""
    if given.baseline is not None or spec.design in ("balance", "trend", "screen"):
        return []
    which = "the first level" if len(given.levels) > 1 else "the instrument's default"
    name = varied.factor.name
    return [f"No baseline is named for {name}: it is {which}, {level_text(varied.levels[0])}."]


def _misfits(question: Question, instrument: Instrument) -> Iterator[SpecRefused]:
    """Yield conflicts between fields, given that the instrument knows all their names."""
    spec, metric = question.spec, question.metric
    low, high = (0.0, 1.0) if metric.kind == "heldout_accuracy" else instrument.reward or (0.0, math.inf)
    if spec.margin and metric.kind in ("heldout_accuracy", *REWARDS) and spec.margin >= high - low:
        said = f"{metric.name} can differ by at most {high - low:g}: with a margin of {spec.margin:g} everything would be equal"
        yield SpecRefused("margin", said)
    lengths = [factor.name for factor in question.factors if STUDY_STEPS in factor.targets]
    if lengths and metric.kind in UNTIL:
        others = [metric.name for metric in instrument.metrics if metric.kind not in UNTIL]
        yield SpecRefused(
            "metric",
            f"{metric.name} cannot compare arms that differ in {lengths[0]}: an arm that ends before it reaches the "
            f"threshold has no value. Choose another metric, such as {' or '.join(others[:2])}",
            others[:MOST_NAMES],
        )
    steps = spec.steps or instrument.defaults.steps
    if spec.heldout_every and instrument.roles:
        yield SpecRefused("heldout_every", f"{NO_INTERIM_FOR_TEAMS}; leave it out")
    elif spec.heldout_every and spec.heldout_every >= steps and not lengths:
        said = f"trials have {steps} steps, so no evaluation would come before the one after training: give at most {steps - 1}"
        yield SpecRefused("heldout_every", said if steps > 1 else "trials have one step: leave it out")
    fixed = [factor.name for factor, _ in question.settings if factor.share]
    moved = [factor.name for factor in question.factors if factor.share]
    if fixed and moved:
        said = f"varying {moved[0]} changes what is left for {fixed[0]}; drop one of them"
        yield SpecRefused(f"set.{fixed[0]}", said, fixed)
    given = {factor.name for factor in (*question.factors, *(factor for factor, _ in question.settings))}
    for factor in instrument.factors:
        if factor.type == "data" and not factor.default and factor.name not in given:
            said = "give a JSON lines file (path/to/train.jsonl) or a data set on Hugging Face's hub (hf:owner/name)"
            yield SpecRefused(f"set.{factor.name}", f"{instrument.name} needs data; {said}", [factor.name])


def _with_effect(question: Question, instrument: Instrument) -> Question:
    """Add the settings without which a varied factor has no effect (`Factor.needs_any`), if the spec leaves them open.

    Raises: SpecRefused if the spec's own settings keep the factor from having an effect.
    """
    declared = {factor.name: factor for factor in instrument.factors}
    for factor in question.factors:
        field = f"compare.{factor.name}" if question.varied else "arms"
        if factor.needs in declared and not any(_levels_in(question, declared[factor.needs])):
            said = f"{factor.name} does nothing while {factor.needs} is 0; give {factor.needs} a level under `set`"
            raise SpecRefused(field, said, [factor.needs])
        needed = [each for each in instrument.factors if each.name in factor.needs_any]
        if not needed or any(level != each.low for each in needed for level in _levels_in(question, each)):
            continue
        named = {each.name for each in (*question.factors, *(each for each, _ in question.settings))}
        at_lowest = f"{factor.name} does nothing at {' and '.join(f'{each.name}={each.low:g}' for each in needed)}"
        free = next((each for each in needed if each.name not in named), None)
        if free is None:
            names = [each.name for each in needed]
            raise SpecRefused(field, f"{at_lowest}: raise {' or '.join(names)}", names)
        level = int(free.low or 0) + 1
        note = f"{at_lowest}, so {free.name}={level} in all arms."
        settings, notes = (*question.settings, (free, level)), (*question.notes, note)
        question = replace(question, settings=settings, notes=notes)
    return question


def _levels_in(question: Question, factor: Factor) -> list[Scalar]:
    """Return the factor's levels in all arms."""
    varied = [level for each in question.varied if each.factor == factor for level in each.levels]
    everywhere = next((level for each, level in question.settings if each == factor), factor.default)
    arms = [next((level for each, level in arm if each == factor), everywhere) for arm in question.bundles.values()]
    return varied or arms or [everywhere]
