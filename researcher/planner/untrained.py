"""Training itself as the question: `does GRPO improve accuracy?` is answered against a control that trains nothing.

Knows the words of such questions and the learning rate, at which 0 trains nothing; no other factor, metric or instrument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import LEARNING_RATE, STUDY_STEPS, Factor, Instrument, Metric, Scalar
from researcher.planner.levels import Level, Placed, level_text
from researcher.planner.mentions import Mention, words_over
from researcher.planner.notes import is_present
from researcher.planner.outcomes import unmeasured
from researcher.planner.remainder import unread
from researcher.planner.sides import Opposition
from researcher.planner.subject import varied
from researcher.planner.wording import ARTICLES, BETTER, LESS, MORE, WORSE, Token, phrase, words

_CONTROLS = [
    phrase(text)
    for text in [
        "untrained model",
        "untrained one",
        "untrained",
        "base model",
        "base one",
        "original model",
        "initial model",
        "pretrained model",
        "without any training",
        "without training",
        "no training",
        "not training",
        "before training",
    ]
]
_TRAINING = words("grpo rl rlvr training finetuning reinforcement fine")
_TUNING = words("fine tuning finetuning")
_SPANS = words("in within after over by")
_AMOUNTS = words("more less longer shorter fewer extra further")
"""Beside `training` these compare training with training."""
_MOVES = words("increase raise lift reduce lower decrease shorten lengthen grow shrink")
_LEARNERS = words("model llm agent it")
_ASKING = words(
    "do doe does can could will would should is are whether that if show prove how much hypothesis : , small tiny"
)
_LEARNING = words("learn learned learnt improve get taught teach trained")
_ACTS = _LEARNING | BETTER | WORSE | MORE | LESS | words("work make matter affect change influence effect")
_SETTING = words("with using at under")
_COMPARING = (BETTER | WORSE | MORE | LESS) - words(
    "improve improving improvement help increase raise boost lift gain reduce lower"
)
"""Where training is said to do more than move a metric, it is compared with the usual setting."""
_OTHER_QUESTIONS = words(
    "faster slower quicker quickly sooner fastest fast quick speed efficient efficiency longer shorter which need require"
)
"""These compare training with training."""


@dataclass(frozen=True, slots=True)
class Control:
    """factor: the learning rate. named_at: the tokens that name the untrained side; none where the topic leaves it out."""

    factor: Factor
    opposition: Opposition
    named_at: range

    @property
    def note(self) -> str:
        level = next(level for level in (*self.opposition.treatments, *self.opposition.baselines) if level.value != 0)
        rate = level_text(level.value)
        return f"Training itself is asked about: {self.factor.name}={rate} against a control that trains nothing, {self.factor.name}=0."


def asked_for(
    instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], factors: Sequence[Mention], placed: Placed
) -> Control | None:
    """None where the topic varies something else, or does not ask for training itself."""
    rate = next((factor for factor in instrument.factors if factor.target == LEARNING_RATE), None)
    if rate is None or level_problem(rate, 0.0) is not None or varied(found, factors, placed):
        return None
    named_at = _named_control(found)
    if not named_at and not (_is_subject(instrument, found) and _only_scenes(found, named, placed)):
        return None
    asked = {m.what.name for m in factors if isinstance(m.what, Factor) and not placed.of(m.what)} - {rate.name}
    if asked and not all(is_present(found, m.start) for m in factors if m.what.name in asked):
        return None  # `the effect of group size relative to the base model`
    if set(unread(instrument, set_apart(found, named_at), named)) - _learners(instrument) - _TRAINING - _ACTS:
        return None
    trained: Scalar = next((level.value for level in placed.of(rate)), rate.default)
    if trained == 0:
        return None
    sides = Opposition((Level(-1, rate, trained),), (Level(-1, rate, 0.0),))
    if named_at and any(token.key == "than" for token in found[named_at.stop :]):  # `is no training better than GRPO?`
        sides = Opposition(sides.baselines, sides.treatments)
    return Control(rate, sides, named_at)


def set_apart(found: Sequence[Token], named_at: range) -> list[Token]:
    """The tokens without those that name the control and the training, which are neither claims nor left over."""
    nothing = Token("the", "the", "word")
    return [nothing if i in named_at or token.key in _TUNING else token for i, token in enumerate(found)]


def refuse_outcomes(instrument: Instrument, found: Sequence[Token], factors: Sequence[Mention], placed: Placed) -> None:
    """Raises: PlanningRefused where training is said to move what can only be set: `does GRPO increase entropy?`"""
    moved = varied(found, factors, placed) if _is_subject(instrument, found) else []
    if len(moved) != 1 or placed.of(moved[0]):
        return
    before = {token.key for m in factors if m.what == moved[0] for token in found[max(0, m.start - 2) : m.start]}
    if before & _MOVES:
        raise unmeasured(moved[0].name, instrument)


def without_rate(placed: Placed, control: Control) -> Placed:
    """What else is set: the learning rate is now the factor."""
    return replace(placed, levels=[level for level in placed.levels if level.factor != control.factor])


def _named_control(found: Sequence[Token]) -> range:
    keys = tuple(token.key for token in found)
    for control in _CONTROLS:
        for at in range(len(keys) - len(control) + 1):
            if keys[at : at + len(control)] == control:
                return range(at, at + len(control))
    return range(0)


def _learners(instrument: Instrument) -> frozenset[str]:
    """The model, by any name of its own."""
    return _LEARNERS | {*phrase(instrument.model)[:1]}


def _is_subject(instrument: Instrument, found: Sequence[Token]) -> bool:
    """`does GRPO improve`, `can the model learn`: the first thing that is spoken of, and what it does."""
    keys = [token.key for token in found]
    at = next((i for i, key in enumerate(keys) if key not in _ASKING | ARTICLES), len(keys))
    if at == len(keys) or set(keys) & _OTHER_QUESTIONS:
        return False
    if keys[at] in _TRAINING:
        around = set(keys[max(0, at - 1) : at] + keys[at + 1 : at + 2])
        return bool(set(keys[at + 1 : at + 9]) & _ACTS) and not around & _AMOUNTS
    return keys[at] in _learners(instrument) and bool(set(keys[at + 1 : at + 5]) & _LEARNING)


def _only_scenes(found: Sequence[Token], named: Sequence[Mention], placed: Placed) -> bool:
    """Whether levels say only what is learned, how long, and in what setting: `improve accuracy with a group size of 16`.

    `Does GRPO with a group size of 16 improve accuracy?` speaks of that group size instead.
    """
    act = next((i for i, token in enumerate(found) if token.key in _ACTS), len(found))
    own = [level for level in placed.levels if level.factor.target.startswith(("run.", "study.", "roles."))]
    compares = bool({token.key for token in found} & _COMPARING)
    moved = any(isinstance(m.what, Metric) and not m.weak and m.what.kind != "wall_s" for m in named)
    compares = compares or not (moved or {token.key for token in found} & _LEARNING - words("improve"))
    return all(
        level.value == level.factor.default
        or _is_length(found, level)
        or (
            not compares
            and level.at > act
            and bool(words_over(found, level.at - 2 * (found[level.at - 1].key == "of")) & _SETTING)
        )
        for level in own
    )


def _is_length(found: Sequence[Token], level: Level) -> bool:
    """`within 15 steps`, `after 15 steps`: how long is trained, which is not what is asked."""
    before = {token.key for token in found[max(0, level.at - 4) : max(0, level.at)]}
    return level.factor.target == STUDY_STEPS and bool(before & _SPANS)
