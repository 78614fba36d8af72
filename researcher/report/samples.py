"""Picks sample answers: questions, answers and rewards of an arm's model before, during and after training.

They are not claims: they are printed as stored, cut to a maximum length. Each arm shows its first finished trial in order of seeds,
if possible on tasks that the other arms show too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundation.logs import redact
from researcher.models import SampledEpisode, TrialRecord, TrialStatus
from researcher.study.plan import Plan

EACH = 2
"""Number of episodes shown for each phase: held-out before, training, held-out during training, held-out after."""
LONGEST = 300
"""Maximum length of a question or answer, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """One sample episode.

    `when` is `before`, `training`, `interim` or `after`. `step` is the optimizer step of the weights that played it.
    """

    arm: str
    seed: int
    when: str
    step: int
    task: str
    question: str
    answer: str
    reward: str
    success: str


def samples_of(
    plan: Plan,
    trials: Sequence[TrialRecord],
    samples: Mapping[str, Sequence[SampledEpisode]],
    statuses: Collection[TrialStatus] = (TrialStatus.DONE,),
) -> list[SamplePart]:
    """Return samples by arm, in the plan's order; empty if none were stored.

    `statuses` lists the statuses of trials that may be shown, in order of preference.
    """
    order = list(statuses)
    shown: dict[str, tuple[TrialRecord, dict[str, list[SampledEpisode]]]] = {}
    for arm in plan.arms:
        own = sorted(
            (trial for trial in trials if trial.arm == arm.name and trial.status in order),
            key=lambda trial: (order.index(trial.status), trial.seed),
        )
        kept = next((trial for trial in own if samples.get(trial.key)), None)
        if kept is not None:
            shown[arm.name] = kept, _by_time(samples[kept.key], ended=kept.status is TrialStatus.DONE)
    whens = ("before", "training", "interim", "after")
    shared = {when: _shared([episodes[when] for _, episodes in shown.values()]) for when in whens}
    return [
        _part(trial, when, episode)
        for trial, episodes in shown.values()
        for when in whens
        for episode in _chosen(episodes[when], shared[when])
    ]


def shown_samples(
    plan: Plan, trials: Sequence[TrialRecord], samples: Mapping[str, Sequence[SampledEpisode]]
) -> list[SamplePart]:
    """Return samples to show during training, with secrets removed. For each arm, they come from a finished trial, or if there is none,
    from one in training.
    """
    found = samples_of(plan, trials, samples, (TrialStatus.DONE, TrialStatus.RUNNING, TrialStatus.PAUSED))
    return [
        replace(part, task=redact(part.task), question=redact(part.question), answer=redact(part.answer))
        for part in found
    ]


def _by_time(episodes: Sequence[SampledEpisode], *, ended: bool) -> dict[str, list[SampledEpisode]]:
    """Group episodes by phase, in order. `ended`: whether the trial was evaluated after training."""
    held_out = [episode for episode in episodes if episode.kind == "eval"]
    first, last = (edge((episode.step for episode in held_out), default=0) for edge in (min, max))
    after = [episode for episode in held_out if ended and episode.step == last != first]
    return {
        "before": [episode for episode in held_out if episode.step == first],
        "training": [episode for episode in episodes if episode.kind == "train"],
        "interim": [episode for episode in held_out if episode.step != first and episode not in after],
        "after": after,
    }


def _shared(arms: Sequence[Sequence[SampledEpisode]]) -> set[str]:
    tasks = [{episode.task_id for episode in episodes} for episodes in arms]
    return set.intersection(*tasks) if tasks else set()


def _chosen(episodes: Sequence[SampledEpisode], shared: set[str]) -> list[SampledEpisode]:
    """Pick the first and the last episode in stored order, preferring shared tasks."""
    ranked = sorted(enumerate(episodes), key=lambda pair: (pair[1].task_id not in shared, pair[0]))
    common = [pair for pair in ranked if pair[1].task_id in shared]
    pool = common if len(common) >= EACH else ranked[: max(EACH, len(common))]
    taken = [pool[0], pool[-1]] if len(pool) > EACH else pool
    return [episode for _, episode in sorted(taken, key=lambda pair: pair[0])]


def _part(trial: TrialRecord, when: str, episode: SampledEpisode) -> SamplePart:
    first = episode.sampled[0] if episode.sampled else None
    last = episode.sampled[-1] if episode.sampled else None
    return SamplePart(
        arm=trial.arm,
        seed=trial.seed,
        when=when,
        step=episode.step,
        task=_cut(episode.task_id),
        question=_cut(question_in(first.request)) if first else "",
        answer=_cut(answer_in(last.answer)) if last else "",
        reward="none" if episode.reward is None else f"{episode.reward:.3g}",
        success={True: "yes", False: "no", None: "not said"}[episode.success],
    )


def question_in(request: Any) -> str:
    """Return the last user message of a recorded request in any dialect; empty if there is none."""
    if not isinstance(request, Mapping):
        return _text(request)
    turns = request.get("messages", request.get("input", request.get("prompt", "")))
    if not isinstance(turns, list):
        return _text(turns)
    asked = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return _text(asked[-1].get("content") if asked else turns)


def answer_in(answer: Any) -> str:
    """Return the text of a recorded answer in any dialect, including its tool calls."""
    if not isinstance(answer, Mapping):
        return _text(answer)
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        message = choices[0].get("message", choices[0])
        return _text(message)
    return _text(answer.get("output", answer))


def _text(value: Any) -> str:
    return " ".join(part for part in _texts(value) if part.strip())


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a message or its parts: contents, texts, names and arguments of tool calls; no ids, roles or types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Mapping):
        for name in ("content", "text", "output_text", "cut", "tool_calls", "function", "name", "arguments", "input"):
            if value.get(name):
                yield from _texts(value[name])


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
