"""What is left of a topic once factors, levels and metric are read: refused where it changes the question, else named.

Nothing is passed over in silence: a word that was not understood stands among the plan's assumptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from foundation.durations import duration_s
from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import Factor, Instrument, Scalar
from researcher.planner.levels import Placed, as_level
from researcher.planner.mentions import COMPARING, Mention, covered
from researcher.planner.placing import KNOWN_WORDS
from researcher.planner.spelling import a_few, nearest_factors
from researcher.planner.wording import (
    ARTICLES,
    BENCHMARKS,
    LESS,
    MORE,
    SCALES,
    SWITCHED_OFF,
    SWITCHED_ON,
    Token,
    before_articles,
    is_method,
    key_at,
    number_text,
    phrase,
    tokens,
    words,
)
from researcher.refusals import PlanningRefused

_ANYWHERE = words("grpo rl llm model so was in die es du la test policy")
_OWNERS = words("critic value teacher embedding head encoder")
_MODELS = words("planner solver")
"""What models are called where a task has several."""
_CUT_SAMPLING = {("top", "p"), ("top", "k"), ("min", "p")}
_SCHEDULES = words("decay annealing schedule scheduler")
_SCHEDULING = words("anneal annealing annealed decaying scheduling ramping")
_FRAMES = words("for in of under")
_ORDINARY = words(
    "a about above actually after again all already also am among an and answer any anything are as asked ask at be because "
    "been before being below between both but by can case check come compare compared comparison could determine did "
    "difference different do doe doing done during each effect either else enough even ever every experiment fact false few find "
    "first for from gave general get give given going goes had happen happens has have having how i idea if impact important "
    "in influence instead into is it its itself just keep keeping kind know last lead leads learner let lose lost level like make "
    "making matter may me mean might model models more most much must my need needed needs no not now of off ok on once one "
    "only optimal or order other our out over own per please policy possible prefer question rather reach really "
    "relative reply result results right run runs same say see seem setting settings should show simple small so some "
    "something sort still study such suffice sure task tasks tell term terms test than that the their them then there these "
    "they thing think this those through time to together too topic train trained training true try two under until up us "
    "use used using value values versus very vs want was way we well were what when where whether which while who why will "
    "with within without work works would yes yet yield you your agent agents llm reinforcement rl learn learning learned "
    "learnt question's grpo level's affect affects change changes choose choosing pick set sets setup default usual standard "
    "baseline control reference treatment none neither nor nothing never cannot beaten take longer long bad seed random step "
    "against across around best better worse quite consequence significant significantly noticeably measurably substantially "
    "small little bit lot least equal equally equivalent identical differ differs similar good great high low end ends final "
    "finally start starts begin mean average curve reward task prompt outperform obtain achieve perform performance score "
    "balance tradeoff trade trading compromise prevent prevents avoid avoids avert delay sweet spot goe going many factor limit limiting limited tiny huge really actually scores outcome outcomes sampled sampling sample converge convergence evaluate hypothesis leave vary varies depend depends changing losing unchanged unaffected untouched interchangeable indistinguishable comparable sufficient null margin always steeply turned switched dropped omitted removed slowly poorly unlike currently monotonically identically irrelevant believe prove sensitive necessary solve fail size rate number amount count budget hour minute second day spend minimum maximum metric primary secondary negligible nil new old former previous current proposed alternative"
)


_BEFORE_NAME = words("family task called named on")


def refuse_idle(instrument: Instrument, varied: Sequence[Factor], placed: Placed) -> None:
    """Raises: PlanningRefused where a factor is varied while the one that it needs is 0, so that its levels are the same."""
    for factor in varied:
        needed = next((each for each in instrument.factors if each.name == factor.needs), None)
        if needed is None or needed in varied:
            continue
        if not any([level.value for level in placed.of(needed)] or [needed.default]):
            raise PlanningRefused(
                f"{factor.name} does nothing while {needed.name} is 0: name a level of {needed.name} too, as in "
                f"'with {needed.aliases[0] if needed.aliases else needed.name} 0.01'",
                [needed.name],
            )


def refuse_other_methods(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where the topic compares with a method that the instrument cannot choose."""
    owned = covered(named)
    known = {token.key for word in instrument.keywords for token in tokens(word)}
    for i, token in enumerate(found):
        if is_method(token.key) and token.key not in known and i not in owned and not _is_frame(found, i, named):
            factors = nearest_factors(instrument, found)
            beside = next((each for each in instrument.factors if _is_chosen(found, each)), None)
            if beside is not None:
                choices = [str(choice) for choice in beside.choices]
                raise PlanningRefused(
                    f"{token.text!r} is no {beside.name} of {instrument.name}; there are {', '.join(choices)}", choices
                )
            parts = _parts_of(token.key, instrument.factors)
            raise PlanningRefused(
                f"{token.text!r} by itself is no choice of {instrument.name}; name a level of {' or '.join(parts)}"
                if parts
                else f"{token.text!r} is nothing that {instrument.name} can vary; its factors: {a_few(factors, instrument)}",
                parts or factors,
            )


def _is_chosen(found: Sequence[Token], factor: Factor) -> bool:
    """Whether one of its choices stands in the topic."""
    keys = {token.key for token in found}
    return factor.type == "choice" and any(keys >= set(phrase(str(choice))) for choice in factor.choices)


def _is_frame(found: Sequence[Token], i: int, named: Sequence[Mention]) -> bool:
    """`an alpha of 16 or 64 for LoRA`: the method of the factor that is asked about, not another one to compare with."""
    framed = found[i - 1].key in _FRAMES if i else False
    return framed and bool(_parts_of(found[i].key, [m.what for m in named if isinstance(m.what, Factor)]))


def _parts_of(method: str, factors: Sequence[Factor]) -> list[str]:
    """Those that are settings of the method, by their names: `lora_rank` of LoRA."""
    return [factor.name for factor in factors if method in factor.name.split("_")]


def refuse_unknown_names(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where the word behind the instrument's name is none of the names that its tasks go by."""
    left = set(unread(instrument, found, named))
    given = {m.what.name for m in named if isinstance(m.what, Factor) and m.choice is not None}
    for factor in instrument.factors:
        if not factor.proper or factor.name in given:
            continue
        names = [str(choice) for choice in factor.choices]
        for i in _behind_name(instrument, factor, found):
            if found[i].text not in left:
                continue
            pair = "_".join(token.text for token in found[i : i + 2])
            near = difflib.get_close_matches(pair, names, n=2) or difflib.get_close_matches(found[i].text, names, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
            raise PlanningRefused(f"{found[i].text!r} is no {factor.name} of {instrument.name}; {hint}", near or names)


def refuse_other_owners(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where a setting is said to be another's than the model's: `the critic's learning rate`, `the
    learning rate of the solver`; of several models none has settings of its own but by a factor that says so.
    """
    owned = covered(named)
    owners = _OWNERS | (_MODELS if instrument.roles else frozenset())
    for mention in named:
        if not isinstance(mention.what, Factor) or mention.choice is not None:
            continue
        start, end = mention.start - 1, mention.end
        before = start >= 0 and start not in owned and found[start].key in owners
        while end < len(found) and found[end].key in ARTICLES | {"of"}:
            end += 1
        behind = end > mention.end and end < len(found) and found[end].key in owners - {"value"}
        if before or behind:
            written = " ".join(
                token.text for token in found[mention.start - before : end + 1 if behind else mention.end]
            )
            whose = "all models'" if instrument.roles else "the model's own"
            own = [each.name for each in instrument.factors if each.target.startswith("roles.")]
            hint = f"; of one model alone it can vary {', '.join(own)}" if own else ""
            raise PlanningRefused(
                f"{written!r} is nothing that {instrument.name} can vary, and {mention.what.name} is {whose}{hint}",
                [mention.what.name, *own],
            )


def refuse_cut_sampling(found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused for top-p, top-k and min-p: a study of them would have nothing to train on."""
    owned = covered(named)
    for i, token in enumerate(found):
        if i not in owned and (token.key == "nucleus" or (token.key, key_at(found, i + 1)) in _CUT_SAMPLING):
            raise PlanningRefused(
                "calls that are sampled with top-p, top-k or min-p are recorded but never trained on, since the trainer "
                "cannot recompute their probabilities: leave it out (all calls have top-p 1), or ask about the temperature instead",
                ["temperature"],
            )


def refuse_schedules(found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where something else than the learning rate is said to change in the course of a run."""
    for mention in named:
        before = key_at(found, before_articles(found, mention.start))
        scheduled = key_at(found, mention.end) in _SCHEDULES or before in _SCHEDULING
        if isinstance(mention.what, Factor) and scheduled and mention.what.type != "choice":
            raise PlanningRefused(
                f"{mention.what.name} stays as it is in the course of a run, and only the learning rate has a schedule; compare "
                f"two levels of {mention.what.name}",
                [mention.what.name, "schedule"],
            )


def refuse_benchmarks(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused where the topic is about tasks that the instrument does not have."""
    owned = covered(named)
    known = {token.key for word in (instrument.name, *instrument.keywords) for token in tokens(word)}
    for i, token in enumerate(found):
        if token.key in BENCHMARKS - known and i not in owned:
            raise PlanningRefused(
                f"{token.text!r} is nothing that {instrument.name} works on; name its questions as a JSON lines file (on "
                "path/to/train.jsonl) or a data set on Hugging Face's hub (on hf:owner/name), or write an instrument "
                "(docs/instruments.md)",
                ["dataset"],
            )


def is_english(found: Sequence[Token]) -> bool:
    """Whether there is one ordinary word among them; of what is the same in all languages, none counts."""
    return any(token.key in _ORDINARY and not is_method(token.key) and token.key not in _ANYWHERE for token in found)


def refuse_missing_data(instrument: Instrument, placed: Placed) -> None:
    """Raises: PlanningRefused where the instrument works on data, and the topic names none."""
    for factor in instrument.factors:
        if factor.type == "data" and not factor.default and not placed.of(factor):
            raise PlanningRefused(
                f"{instrument.name} needs data: name a JSON lines file in the topic (on path/to/train.jsonl), or a data set "
                "on Hugging Face's hub (on hf:owner/name)",
                [factor.name],
            )


def _behind_name(instrument: Instrument, factor: Factor, found: Sequence[Token]) -> list[int]:
    """Words that stand where a proper name is expected: `reasoning-gym NAME`, `reasoning-gym family NAME`, `the family NAME`."""
    keys = [token.key for token in found]
    names = {phrase(word) for word in (instrument.name, *instrument.keywords, factor.name, *factor.aliases)}
    result = []
    for i, token in enumerate(found):
        j = i
        while j > 0 and (found[j - 1].kind == "mark" or keys[j - 1] in _BEFORE_NAME | ARTICLES):
            j -= 1
        if token.kind == "word" and any(name and tuple(keys[max(0, j - len(name)) : j]) == name for name in names):
            result.append(i)
    return result


def refuse_shifts(placed: Placed) -> None:
    """Raises: PlanningRefused for `raise X by 4`, with the levels that are probably meant."""
    for token, factor in placed.shifts:
        shown = factor.default
        hint = ""
        if not isinstance(shown, str | bool) and token.value is not None:
            moved = [shown + token.value, shown - token.value]
            near = [as_level(factor, each) for each in moved]
            fit = [number_text(float(each)) for each in near if level_problem(factor, each) is None]
            hint = f", for example from {number_text(float(shown))} to {' or '.join(fit)}" if fit else ""
        raise PlanningRefused(
            f"'by {token.text}' says how far {factor.name} is moved, not between which levels; name both{hint}",
            [factor.name],
        )


def refuse_quotients(found: Sequence[Token], placed: Placed) -> None:
    """Raises: PlanningRefused where `1/2` or `2:1` may be one level of a factor, or two."""
    for level in placed.levels:
        i = level.at
        if level.factor.type != "float" or i < 0 or i + 2 >= len(found) or found[i + 1].key not in ("/", ":"):
            continue
        pair = [other for other in placed.of(level.factor) if other.at == i + 2]
        listed = [other for other in placed.of(level.factor) if other.at > i + 2 and found[other.at - 1].key != "/"]
        listed += [other for other in placed.of(level.factor) if 0 <= other.at < i and found[other.at + 1].key != "/"]
        alone = len(placed.of(level.factor)) == 2 and found[i].key == "1" and found[i + 2].kind == "number"
        if pair and (found[i + 1].key == ":" or listed or alone):
            shown = "".join(token.text for token in found[i : i + 3])
            raise PlanningRefused(
                f"{shown!r} may be one level of {level.factor.name} or two; write a quotient as one number (0.5), and levels "
                "with commas between them",
                [level.factor.name],
            )


def unread(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> list[str]:
    """Words that played no part in the reading and are no ordinary ones, as written."""
    owned = covered(named)
    known = {token.key for word in (instrument.name, *instrument.keywords) for token in tokens(word)}
    known |= _ORDINARY | COMPARING | ARTICLES | SWITCHED_ON | SWITCHED_OFF | set(SCALES) | KNOWN_WORDS | MORE | LESS
    left = [
        token.text
        for i, token in enumerate(found)
        if token.kind == "word"
        and i not in owned
        and token.value is None
        and token.key not in known
        and len(token.key) > 2
        and duration_s(token.text) is None
    ]
    return list(dict.fromkeys(word for word in left if not word.endswith("n't") and tokens(word)[0].kind == "word"))


def told_apart(treatment: Scalar, baseline: Scalar, ways: Sequence[str]) -> str | None:
    """Which way a topic's words say that the factor moves, where its levels go the other way; None where they agree."""
    if isinstance(treatment, str | bool) or isinstance(baseline, str | bool) or treatment == baseline:
        return None
    up, down = bool(set(ways) & MORE), bool(set(ways) & LESS)
    if up == down or up == (treatment > baseline):
        return None
    return "raised" if up else "lowered"
