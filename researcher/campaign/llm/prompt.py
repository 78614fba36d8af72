"""Writes what the LLM sees of a campaign, in at most 8,000 tokens however long the campaign is.

Each part gets a share of that space. Within a part, the newest rows stay whole, older ones are shortened, and the oldest are left
out; a note says how many. Everything that somebody wrote is quoted as a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from researcher.campaign.goal import Aim
from researcher.campaign.honesty import alpha_of, limits
from researcher.campaign.seen import ArmSeen, EffectSeen, HypothesisSeen, Left, Seen, StudySeen, View
from researcher.instruments.levels import level_text
from researcher.llm.asking import tokens_of
from researcher.llm.look_ups import hours
from researcher.llm.replies import FORMS, ending_schema, form_fields, storable
from researcher.llm.templates import filled

MOST_TOKENS = 8000
_PROMPTS = Path(__file__).parent / "prompts"
_SHARES = {"goal": 0.12, "aim": 0.14, "problems": 0.12, "said": 0.14, "hypotheses": 0.18}
"""Maximum share of the space for each part of the prompt. The share for `aim` is per instrument. Studies get the rest."""
_MOST_AIMS = 0.32
"""Maximum share of the space for the aims of all instruments together."""
_WHOLE = 3
"""Number of newest rows of a part that stay whole as long as possible."""
_MOST_ARMS, _MOST_EFFECTS = 12, 12
"""Maximum number of arms and of effects in one study's row."""
_LONGEST_WORDS, _LONGEST_SHORT = 600, 140
"""Maximum length of a quoted text, in characters: in a whole row, and in a shortened row."""


def first_messages(
    seen: Seen, form: str, tools: list[dict[str, Any]], endings: Sequence[str], most_proposals: int
) -> list[dict[str, Any]]:
    """Return the system prompt and the request. `tools` are sent along, so they count towards the maximum number of tokens."""
    look_ups = form == FORMS[0]
    schema = "" if look_ups else json.dumps(ending_schema(tools, endings))
    told = {"look_ups": look_ups, "most": most_proposals, "several": bool(seen.others)}
    system = {"role": "system", "content": filled(_PROMPTS, "system.md.jinja", **told)}

    def asked(**parts: str) -> list[dict[str, Any]]:
        text = filled(_PROMPTS, "request.md.jinja", seen=seen, schema=schema, left=_left(seen), **parts)
        return [system, {"role": "user", "content": text.strip()}]

    empty = dict.fromkeys((*_SHARES, "studies", "confirmed"), "")
    confirmed = cut(_confirmed(seen), 1200)
    fields = form_fields(form, tools, endings)
    # Three characters count as a token. The 300 are for the headings, which an empty part does not have.
    room = 3 * (MOST_TOKENS - tokens_of({"messages": asked(**empty), **fields})) - _weight(confirmed) - 300
    most = {name: int(share * room) for name, share in _SHARES.items()}
    parts = {
        "goal": quoted(seen.goal, most["goal"]),
        "aim": _aims(seen, room),
        "problems": cut("\n".join(f"- {quoted(each, 800)}" for each in seen.problems), most["problems"]),
        "said": rows([_said(each.kind, each.by, each.words) for each in seen.said], most["said"]),
        "hypotheses": rows([_hypothesis(each) for each in _by_relevance(seen.hypotheses)], most["hypotheses"]),
    }
    spare = room - sum(_weight(part) for part in parts.values())
    studies = rows([(_whole(each, seen), _short(each, seen)) for each in seen.studies], spare)
    return asked(**parts, studies=studies, confirmed=confirmed)


# -- room ---------------------------------------------------------------------------------------------------------------


def _weight(text: str) -> int:
    """Return the number of characters that the text takes up in a request's JSON."""
    return len(json.dumps(text)) - 2


def cut(text: str, most: int) -> str:
    """Return the text or, if it takes up more than `most` characters of JSON, its beginning with a mark at the end."""
    if _weight(text) <= most:
        return text
    kept = _longest(text, lambda part: _weight(f"{part} … cut off") <= most)
    return f"{kept} … cut off" if kept else ""


def quoted(text: str, most: int = _LONGEST_WORDS) -> str:
    """Return what somebody wrote as a JSON string, cut so that it takes up at most `most` characters of JSON."""
    line = str(storable(" ".join(text.split())))
    whole = json.dumps(line, ensure_ascii=False)
    if _weight(whole) <= most:
        return whole
    kept = _longest(line, lambda part: _weight(json.dumps(f"{part} …", ensure_ascii=False)) <= most)
    return json.dumps(f"{kept} …", ensure_ascii=False) if kept else '"…"'


def _longest(text: str, fits: Callable[[str], bool]) -> str:
    """Return the longest beginning of the text that fits."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(text[:middle]) else (low, middle - 1)
    return text[:low]


def rows(each: Sequence[tuple[str, str]], most: int) -> str:
    """Join rows, so that they take up at most `most` characters of JSON. `each` has every row whole and shortened, the newest last.

    If they do not all fit, older rows are shortened, and the oldest are left out.
    """
    if not each:
        return ""
    room = most - 120  # the note
    whole, short = ([_weight(pair[n]) + 4 for pair in each] for n in (0, 1))
    for shortened in range(len(each) + 1):
        if sum(short[:shortened]) + sum(whole[shortened:]) <= room and len(each) - shortened >= min(_WHOLE, len(each)):
            return _noted([s for _, s in each[:shortened]] + [w for w, _ in each[shortened:]], 0, shortened)
    newest = min(_WHOLE, len(each))
    while newest and sum(whole[len(each) - newest :]) > room:
        newest -= 1
    weight, first = sum(whole[len(each) - newest :]), len(each) - newest
    while first and weight + short[first - 1] <= room:
        first -= 1
        weight += short[first]
    kept = [s for _, s in each[first : len(each) - newest]] + [w for w, _ in each[len(each) - newest :]]
    return _noted(kept, first, len(each) - newest - first)


def _noted(kept: Sequence[str], dropped: int, shortened: int) -> str:
    notes = [f"{count} {what}" for count, what in ((dropped, "older ones left out"), (shortened, "shortened")) if count]
    return "\n".join([*([f"({', '.join(notes)})"] if notes else []), *kept])


# -- parts --------------------------------------------------------------------------------------------------------------


def _aims(seen: Seen, room: int) -> str:
    """Write a block for each instrument, none longer than its share."""
    count = len(seen.views)
    most = int(min(_SHARES["aim"], _MOST_AIMS / count) * room)
    return "\n\n".join(
        cut(_aim(view.aim, f"# Aim on {view.instrument}" if count > 1 else "# Aim"), most) for view in seen.views
    )


def _aim(aim: Aim, heading: str) -> str:
    better = "more" if aim.direction == "increase" else "less"
    noise = "" if aim.sigma is None else f"; sd between seeds {aim.sigma:g} by the instrument"
    lines = [
        f"{heading}\n{aim.metric} of instrument {aim.instrument}: {better} is better; the smallest effect that matters is {aim.margin:g}{noise}."
    ]
    if aim.generated:
        lines.append(
            "An LLM wrote this instrument and its reward: its results are shown, and support no claim. Do not confirm on it."
        )
    fixed = [f"{name}={level_text(level)}" for name, level in aim.settings.items()]
    fixed += [] if aim.steps is None else [f"steps={aim.steps}"]
    if fixed:
        lines.append(f"The same in all studies, leave it out: {', '.join(fixed)}")
    lines.append("Factors and their levels. Explorations may try others too; confirmations set none but these:")
    for factor in aim.factors:
        levels = [f"{level_text(each)}{' (default)' if each == factor.default else ''}" for each in factor.levels]
        alone = "; a person wants it to stay as it is, leave it out" if factor.left_alone else ""
        lines.append(f"- {factor.name}: {', '.join(levels)}{alone}")
    return "\n".join(lines)


def _left(seen: Seen) -> str:
    left = seen.left
    lines = [_amounts(left) or "No limit."]
    for action, what in (("explore", "An exploration"), ("confirm", "A confirmation")):
        most = limits(action, seen)  # type: ignore[arg-type]
        said = [hours(value) if name == "wall" else f"{value:g} {name}" for name, value in most.items()]
        lines.append(f"{what} may spend {', '.join(said) or 'what it needs'}.")
    lines.append(
        f"Confirmations so far: {seen.confirmations}; the next is tested at alpha {alpha_of(seen.confirmations + 1):.4g}. "
        f"Standard deviation between seeds, as believed: {', '.join(f'{view.sigma:.3g}{_at(view)}' for view in seen.views)}."
    )
    return "\n".join(lines)


def _amounts(left: Left) -> str:
    said = [
        None if left.wall_s is None else f"{hours(left.wall_s)} of trials ({hours(left.reserved_wall_s)} reserved)",
        None if left.trials is None else f"{left.trials} trials ({left.reserved_trials:g} reserved)",
        None if left.tokens is None else f"{left.tokens:g} tokens of trials",
        None if left.llm_tokens is None else f"{left.llm_tokens:g} tokens for you",
        None if left.money is None else f"{left.money:g} of money for you",
    ]
    return "; ".join(each for each in said if each is not None)


def _confirmed(seen: Seen) -> str:
    return "\n".join(_incumbent(view) for view in seen.views)


def _incumbent(view: View) -> str:
    levels = ", ".join(f"{name}={level_text(level)}" for name, level in view.incumbent.items())
    return f"Incumbent{_at(view)}: {levels}" if levels else f"Nothing{_at(view)}: the default stands."


def _at(view: View) -> str:
    """Return ` on INSTRUMENT` if the campaign has several instruments, else nothing."""
    return f" on {view.among}" if view.among else ""


def _by_relevance(hypotheses: Sequence[HypothesisSeen]) -> list[HypothesisSeen]:
    """Order hypotheses so that settled ones come first: those are left out first when space is short."""
    return sorted(hypotheses, key=lambda each: each.status in ("open", "explored"))


def _hypothesis(each: HypothesisSeen) -> tuple[str, str]:
    under = f" under {each.parent}" if each.parent else ""
    head = f"- {each.id}{under} [{each.status}] "
    whole = f"{head}{quoted(each.claim)}; predicts {quoted(each.prediction)}; dies if {quoted(each.kill_if)}"
    return whole, f"{head}{quoted(each.claim, _LONGEST_SHORT)}"


def _said(kind: str, by: str, words: str) -> tuple[str, str]:
    head = f"- {kind} by {quoted(by, 60)}: " if by else f"- {kind}: "
    return head + quoted(words), head + quoted(words, _LONGEST_SHORT)


def _head(study: StudySeen, seen: Seen) -> str:
    verdict = f", {study.verdict}" if study.verdict is not None else ""
    return f"- {study.study}{_at(seen.of(study))}: {study.action} {study.hypothesis}, {study.status}{verdict}, {study.trials} trials"


def _whole(study: StudySeen, seen: Seen) -> str:
    sign = seen.of(study).aim.sign
    cost = f", {hours(study.wall_s)}" + (f", {study.tokens:g} tokens" if study.tokens else "")
    spent = "" if study.alpha is None else f", alpha {study.alpha:.3g}, against the {study.baseline}"
    lines = [f"{_head(study, seen)}{cost}{spent}"]
    if study.unfit:
        fired = f" ({', '.join(study.sentinels)})" if study.sentinels else ""
        lines.append(f"  supports no claim: {study.unfit}{fired}")
    ranked = sorted(study.arms, key=lambda arm: -sign * (arm.mean if arm.mean is not None else -sign * 1e300))
    lines += [f"  {_arm(arm)}" for arm in ranked[:_MOST_ARMS]]
    if len(ranked) > _MOST_ARMS:
        lines.append(f"  … {len(ranked) - _MOST_ARMS} arms below")
    by_size = sorted(study.effects, key=lambda effect: -abs(effect.diff))
    lines += [f"  {_effect(effect)}" for effect in by_size[:_MOST_EFFECTS]]
    if len(by_size) > _MOST_EFFECTS:
        lines.append(f"  … {len(by_size) - _MOST_EFFECTS} smaller effects")
    return cut("\n".join(lines), 2400)


def _short(study: StudySeen, seen: Seen) -> str:
    """Describe a study in one line, with only its strongest effect."""
    strongest = max(study.effects, key=lambda effect: abs(effect.diff), default=None)
    unfit = "; supports no claim" if study.unfit else ""
    return cut(f"{_head(study, seen)}{unfit}" + ("" if strongest is None else f"; {_effect(strongest)}"), 300)


def _arm(arm: ArmSeen) -> str:
    levels = ", ".join(f"{name}={level_text(level)}" for name, level in arm.levels.items()) or "all defaults"
    spread = "" if arm.sd is None else f" ± {arm.sd:.3g}"
    value = "no trial finished" if arm.mean is None else f"{arm.mean:.4g}{spread}"
    failed = f", {arm.failed} failed" if arm.failed else ""
    against = ", worse on held-out tasks: not to be trusted" if arm.misleads else ""
    return f"{cut(arm.name, 80)} ({cut(levels, 200)}): {value} (n {arm.n}{failed}{against})"


def _effect(effect: EffectSeen) -> str:
    what = effect.factor or f"{cut(effect.treatment, 80)} minus {cut(effect.baseline, 80)}"
    verdict = "" if effect.verdict is None else f", {effect.verdict}"
    verdict += ", held-out tasks say the opposite" if effect.misleads else ""
    return f"effect of {what}: {effect.diff:.3g} [{effect.low:.3g}, {effect.high:.3g}] at {effect.level:.4g}{verdict}"
