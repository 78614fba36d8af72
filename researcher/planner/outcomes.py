"""What a topic wants measured: the metric, or a refusal where it wants what no metric of the instrument measures."""

from __future__ import annotations

from collections.abc import Container, Sequence

from researcher.instruments.instrument import STUDY_STEPS, Factor, Instrument, Metric
from researcher.planner.levels import Placed
from researcher.planner.mentions import LENGTHS, SAID, Mention, covered
from researcher.planner.spelling import a_few, nearest_factors, nearest_metrics
from researcher.planner.weighing import asked_in, rank
from researcher.planner.wording import (
    ASKING,
    BETTER,
    LESS,
    MORE,
    WORSE,
    Token,
    before_articles,
    key_at,
    names_training,
    number_text,
    sentences,
    tokens,
    words,
)
from researcher.refusals import PlanningRefused

_MOVED = words("improve hurt affect increase decrease reduce lower raise boost influence harm degrade impact")
_YIELDING = words("have has show make give produce yield generate get become cause lead write")
_CUTTING = words("shorten lengthen")
_ELSEWHERE = words("with using when if under")
_DEPENDING = words("change vary depend scale evolve respond behave react")
_COLLAPSING = words("collapse collapsing collapsed")
_BEST = words("best optimal optimum ideal right")
_UPON = words("with on as to when under over")
_EFFECTS = words("effect impact influence")
_BEFORE_OBJECT = words("the a an its on of to final mean average")
_AFTER_OBJECT = words("? . , than more when with or and compared vs")
_ANYTHING = words(
    "learning training collapse performance result outcome model agent policy grpo rl it thing anything nothing quality the learner generalise"
)
_OTHER_OUTCOMES = words(
    "forgetting forget overfitting overfit overfits underfit diverge diverging divergence explode exploding unstable "
    "instability stable stability stabilise stabilize biased bias transfer drift drifting robust robustness reliable reliability entropy variance perplexity hallucinate "
    "hallucination memory vram exploration explore diversity diverse calibration calibrated hacking toxicity safety safer "
    "latency throughput energy noise noisy gradient crash crashing error mistake"
)
"""Outcomes that people ask about, and that none of our kinds of metrics measures. An instrument may declare one by name."""
_NEEDING = words("need require use consume demand")
_AMOUNTS = words("more less fewer")
_COUNTED = words("than of to a an the seed step time")
_GENERALISING = words(
    "generalise generalises generalize generalizes generalising generalizing generalisation generalization"
)
_ACCURACIES = ("heldout_accuracy", "heldout_reward")
_FASTER = words("faster quicker sooner slower")
_MOVES = words("reduce lower raise increase decrease shrink lengthen boost cut change affect influence")
_KEEPING = words("keep make hold leave")
_GOES = words("grow rise increase shrink fall drop decrease decline change")
_START = words("to from of the start reference base initial model policy start's")
_SENTENCE_ENDS = words(". ! ?")
_SAME = words("same equal identical comparable similar")
_COST_KINDS = ("wall_s", "steps_to_threshold")
_AMOUNTS_OF_COST = MORE | LESS | words("half twice")
_HELD_OUT = words("held heldout unseen new test")
_LOSS_OF = words("training train validation eval evaluation test heldout")
_LOSS_MOVES = words("fall drop decrease decline shrink converge diverge curve value")


def metric_of(
    instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], placed: Placed
) -> tuple[Metric, list[str]]:
    """The metric that decides, and what was assumed: the primary one, else the first that the question names, else the first
    of what stands beside it; one that is only hinted at comes after those that are named.

    Raises: PlanningRefused when the topic wants something measured that is no metric here.
    """
    _refuse_other_outcomes(instrument, found, named, placed)
    if placed.threshold is not None:
        accuracy = [
            m.what.name for m in named if isinstance(m.what, Metric) and not m.weak and m.what.kind in _ACCURACIES
        ]
        _refuse_other_counts(instrument, placed.threshold, named)
        return _with_threshold(instrument, placed.threshold, accuracy[0] if accuracy else None)
    asked = asked_in(found, [level.at for level in placed.levels])
    said = sorted((m for m in named if isinstance(m.what, Metric)), key=lambda m: rank(found, m, asked))
    _refuse_same_for_less(found, said)
    if said and isinstance(said[0].what, Metric):
        chosen, notes = said[0].what, []
        others = {m.what.name for m in said if not m.weak} - {chosen.name}
        others |= {metric.name for metric in instrument.metrics if _is_speed_beside(found, chosen, metric)}
        if others:
            notes.append(f"{chosen.name} decides; {', '.join(sorted(others))} is reported beside it.")
        if said[0].weak:
            written = " ".join(token.text for token in found[said[0].start : said[0].end])
            notes.append(f"The topic names no metric: {written!r} is measured as {chosen.name}.")
        return chosen, notes
    _refuse_other_needs(instrument, found, named)
    unknown = _unknown_object(instrument, found, named)
    if unknown:
        raise _no_metric(instrument, found, unknown)
    default = next(m for m in instrument.metrics if m.name == instrument.defaults.metric)
    return default, [f"The topic names no metric: {default.name} is measured, the default of {instrument.name}."]


def _is_speed_beside(found: Sequence[Token], chosen: Metric, other: Metric) -> bool:
    """`learn faster and reach a higher accuracy`: how fast is a claim of its own."""
    if other.kind != "auc_reward" or chosen.kind in ("auc_reward", *_COST_KINDS):
        return False
    for i, token in enumerate(found):
        ahead = {each.key for each in found[max(0, i - 4) : i]}
        learns = token.key in _FASTER and key_at(found, i - 1) in ("learn", "train")
        if learns and ("and" in ahead or "and" in (key_at(found, i + 1), key_at(found, i + 2))):
            return True
    return False


def refuse_effect_sizes(placed: Placed, metric: Metric) -> None:
    """Raises: PlanningRefused where the topic fixes how large the effect has to be, which is the instrument's to say."""
    if placed.effects:
        raise PlanningRefused(
            f"{placed.effects[0].text!r} reads as the size of an effect, and the smallest effect of interest is fixed: "
            f"{number_text(metric.margin)} for {metric.name}. Ask the same question without it",
            [metric.name],
        )


def _with_threshold(instrument: Instrument, threshold: float, of: str | None) -> tuple[Metric, list[str]]:
    """of: the metric that is said to reach it, where that is none that steps are counted for."""
    counted = [metric for metric in instrument.metrics if metric.kind == "steps_to_threshold"]
    fits = [metric for metric in counted if metric.threshold == threshold and of is None]
    if fits:
        return fits[0], []
    offered = " or ".join(f"{metric.threshold:g} ({metric.name})" for metric in counted)
    raise PlanningRefused(
        f"{instrument.name} counts no steps to a threshold of {threshold:g}"
        + (f" of {of}" if of else "")
        + (f"; of the training reward it does, to {offered}" if offered else ""),
        [metric.name for metric in counted] or [metric.name for metric in instrument.metrics],
    )


def _refuse_other_counts(instrument: Instrument, threshold: float, named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused for `less wall time to reach a reward of 0.5`: until a threshold steps alone are counted."""
    other = next((m.what for m in named if isinstance(m.what, Metric) and not m.weak and m.what.kind == "wall_s"), None)
    if other is not None:
        counted = [metric.name for metric in instrument.metrics if metric.kind == "steps_to_threshold"]
        raise PlanningRefused(
            f"{other.name} is that of whole trials, and not until a threshold of {threshold:g}; ask about {other.name} without a "
            "threshold" + (f", or about {' or '.join(counted)}" if counted else ""),
            [other.name, *counted],
        )


def _question_from(found: Sequence[Token], named: Sequence[Mention], placed: Placed) -> int:
    """Where the first sentence begins that holds a level or asks something, if it says what is measured, or what is claimed."""
    for sentence in sentences(found, _SENTENCE_ENDS):
        keys = {found[i].key for i in sentence}
        own = {(level.factor.name, level.value) for level in placed.levels if level.at in sentence}
        later = {(level.factor.name, level.value) for level in placed.levels if level.at >= sentence.stop}
        if "?" not in keys and own <= later:
            continue
        measured = any(isinstance(m.what, Metric) and m.start in sentence for m in named)
        return sentence.start if measured or keys & (BETTER | WORSE) else 0
    return 0


def _refuse_other_outcomes(
    instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], placed: Placed
) -> None:
    owned = covered(named)
    declared = {token.key for word in instrument.keywords for token in tokens(word)}
    asked_from = _question_from(found, named, placed)
    for i, token in enumerate(found):
        if i in owned and token.key not in _GENERALISING | {"shaping"}:
            continue
        if i < asked_from:
            continue  # `the runs looked noisy. Does …`: why it is asked
        if token.key in _OTHER_OUTCOMES - declared:
            raise _no_metric(instrument, found, token.text)
        if token.key in _GENERALISING and _is_elsewhere(found, i):
            raise _no_metric(instrument, found, f"{token.text} to")
        if token.key == "shaping" and i and found[i - 1].key == "reward":
            raise PlanningRefused(
                f"'reward shaping' is nothing that {instrument.name} can vary; its factors: "
                f"{a_few(nearest_factors(instrument, found), instrument)}",
                nearest_factors(instrument, found),
            )
        if token.key == "loss" and "loss" not in declared and _is_measured_loss(found, i):
            raise _no_metric(instrument, found, "loss")


def _refuse_same_for_less(found: Sequence[Token], said: Sequence[Mention]) -> None:
    """Raises: PlanningRefused for `the same accuracy in less time`, `in fewer steps`, `faster`: two metrics, of which either may differ."""
    named = [(m.what, m) for m in said if isinstance(m.what, Metric)]
    level = next((what for what, m in named if not m.weak and _is_said_to_be_the_same(found, m)), None)
    costs = ((what, m) for what, m in named if what != level and what.kind in (*_COST_KINDS, "auc_reward"))
    cost, at = next(costs, (None, None))
    if level is None or cost is None or at is None:
        return
    if {token.key for token in found[max(0, at.start - 2) : at.end]} & (_AMOUNTS_OF_COST | _FASTER):
        raise PlanningRefused(
            f"the topic asks for the same {level.name} at another {cost.name}, and a study tests one of them: ask whether "
            f"{cost.name} differs, or {level.name}; the other is reported beside it",
            [cost.name, level.name],
        )


def _is_said_to_be_the_same(found: Sequence[Token], mention: Mention) -> bool:
    """`the same final accuracy`."""
    i = before_articles(found, mention.start)
    return key_at(found, i - 1 if key_at(found, i) == "final" else i) in _SAME


def _refuse_other_needs(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where something is said to need more or less of what nothing counts: `need less data`."""
    owned = covered(named)
    for i, token in enumerate(found[:-2]):
        j = i + 2
        if token.key not in _NEEDING or found[i + 1].key not in _AMOUNTS or {i + 1, j} & owned:
            continue
        ends = j + 1 >= len(found) or found[j + 1].key in _AFTER_OBJECT | {"to", "for", "if"}
        if ends and found[j].kind == "word" and found[j].key not in _COUNTED:
            raise _no_metric(instrument, found, found[j].text)


def _is_elsewhere(found: Sequence[Token], i: int) -> bool:
    """`generalises to two-digit sums`; not `to held-out sums`, which is what accuracy says."""
    behind = [each.key for each in found[i + 1 : i + 7]]
    return "to" in behind[:2] and not set(behind) & _HELD_OUT


def _is_measured_loss(found: Sequence[Token], i: int) -> bool:
    """`training loss`, `the loss falls faster`; not `a loss of accuracy`, `loss aggregation`."""
    return key_at(found, i - 1) in _LOSS_OF or key_at(found, i + 1) in _LOSS_MOVES


def _no_metric(instrument: Instrument, found: Sequence[Token], written: str) -> PlanningRefused:
    near = nearest_metrics(instrument, found)
    return PlanningRefused(f"{written!r} is no metric of {instrument.name}; its metrics: {', '.join(near)}", near)


def _unknown_object(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> str | None:
    """What a topic says is moved, where that is nothing known: "the effect on perplexity"."""
    owned = covered(named)
    known = _ANYTHING | {token.key for word in instrument.keywords for token in tokens(word)}
    for i, token in enumerate(found[:-1]):
        before = {each.key for each in found[max(0, i - 6) : i]}
        moves = (token.key == "on" and before & _EFFECTS) or (token.key == "to" and i > 0 and found[i - 1].key == "do")
        if i in owned or not (moves or token.key in _MOVED):
            continue
        j = i + 1
        while j < len(found) - 1 and found[j].key in _BEFORE_OBJECT:
            j += 1
        if found[j].kind != "word" or found[j].value is not None or j in owned:
            continue
        ends = j + 1 >= len(found) or found[j + 1].key in _AFTER_OBJECT
        if ends and found[j].key not in known | MORE | LESS | _AFTER_OBJECT:
            return found[j].text
    return None


def refuse_moved(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], placed: Placed) -> None:
    """Raises: PlanningRefused where a level of one factor is said to move another: `does 16 rollouts reduce the KL?`, `does
    the answer length grow with GRPO?`, `is the KL larger at 1e-4 than at 1e-5?`, `does RLOO use fewer tokens than GRPO?`"""
    factors = [m for m in named if isinstance(m.what, Factor)]
    levels = {level.at: level.factor for level in placed.levels}
    for mention in factors:
        start = before_articles(found, mention.start)
        others = {i for i, what in levels.items() if what != mention.what}
        others |= {i for m in factors if m.what != mention.what for i in range(m.start, m.end)}
        own = any(what == mention.what for what in levels.values())
        if _is_used_up(found, mention, {*others, *levels}) or (not own and _is_counted_in(found, mention, placed)):
            raise unmeasured(mention.what.name, instrument)
        if own:
            continue
        if key_at(found, start) in _MOVES and start - 1 in others:
            raise unmeasured(mention.what.name, instrument)
        kept = key_at(found, start) in _KEEPING and key_at(found, mention.end) in MORE | LESS
        if kept and start - 1 in others:
            raise unmeasured(mention.what.name, instrument)
        end = mention.end
        while key_at(found, end) in _START:
            end += 1
        goes = key_at(found, start) in ASKING and key_at(found, end) in _GOES | MORE | LESS
        upon = key_at(found, end + 1) in _UPON | {"at", "for", "in", "during"}
        trained = any(names_training(token.key) for token in found[end:])
        if goes and upon and (trained or any(i > end for i in others)):
            raise unmeasured(mention.what.name, instrument)


def _is_used_up(found: Sequence[Token], mention: Mention, subjects: Container[int]) -> bool:
    """`does RLOO use fewer tokens than GRPO?`, `does max tokens 8 use fewer tokens than …?`; subjects: what may be said to."""
    amount = mention.start - 1
    needs = key_at(found, amount) in _AMOUNTS and key_at(found, amount - 1) in _NEEDING
    own = isinstance(mention.what, Factor) and mention.what.target != STUDY_STEPS  # those until a threshold are counted
    return own and needs and amount - 2 in subjects


def _is_counted_in(found: Sequence[Token], mention: Mention, placed: Placed) -> bool:
    """`is RLOO cheaper than GRPO in tokens?`: no level of it follows."""
    compares = any(token.key == "than" for token in found[: mention.start])
    stated = any(level.at == mention.end for level in placed.levels)
    plain = isinstance(mention.what, Factor) and mention.what.target != STUDY_STEPS and mention.choice is None
    return plain and compares and not stated and key_at(found, mention.start - 1) == "in"


def refuse_unmeasured(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where something is said to move what can only be set: `does KL make answers shorter?`, `how does
    entropy change with the temperature?`

    It is no second factor then, and no claim about the metric that is measured instead.
    """
    taken = {i for m in named if isinstance(m.what, Metric) and not m.weak for i in range(m.start, m.end)}
    factors = {m.start: m.what for m in named if isinstance(m.what, Factor)}
    ends = {
        m.end: m.what.name
        for m in named
        if isinstance(m.what, Factor) and not _EFFECTS & {token.key for token in found[max(0, m.start - 3) : m.start]}
    }
    for i, token in enumerate(found):
        if token.key in _COLLAPSING and ends.get(i) in _OTHER_OUTCOMES:
            raise unmeasured(ends[i], instrument)
        behind = [j for j in range(i + 1, min(i + 5, len(found))) if j not in taken]
        keys = {found[j].key for j in behind}
        subject = ends.get(i)
        if token.key in _DEPENDING and subject is not None and found[i + 1 : i + 2] and found[i + 1].key in _UPON:
            other = next((m.what.name for m in named if isinstance(m.what, Factor) and m.start > i), None)
            if other is not None and _BEST & {each.key for each in found[max(0, i - 6) : i]}:
                raise PlanningRefused(
                    f"which {subject} is best at each {other} takes a comparison for each of them; ask which {subject} is best with "
                    f"one level of {other}, or whether {subject} and {other} interact, with two levels of each",
                    [subject, other],
                )
            raise unmeasured(subject, instrument)
        if keys & _ELSEWHERE:
            continue
        near = keys | {found[j].key for j in range(max(0, i - 2), i)}
        if (token.key in _YIELDING and keys & LENGTHS and near & SAID) or (token.key in _CUTTING and keys & SAID):
            raise unmeasured("the length of answers", instrument)
        moved = next((j for j in behind[:2] if found[j].key in MORE | LESS and j + 1 in factors), None)
        if token.key in _YIELDING and moved is not None:
            raise unmeasured(factors[moved + 1].name, instrument)


def unmeasured(what: str, instrument: Instrument) -> PlanningRefused:
    """The refusal of a topic that asks what becomes of something that is set."""
    metrics = [metric.name for metric in instrument.metrics]
    return PlanningRefused(
        f"{what} can be set in {instrument.name}, and is nothing that it measures; its metrics: {', '.join(metrics)}",
        metrics,
    )
