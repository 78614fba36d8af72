"""Explains why a run didn't learn, from a ledger's totals, a run's steps and a few traces. Never calls a server or prints anything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel

from foundation.streams import one_line
from swarm.protocol.episodes import COUNTED, Cause, DropReason, EpisodeState, EpisodeTrace
from swarm.protocol.mismatch import MISMATCH, STALENESS, outgrown
from swarm.protocol.status import RunReport
from swarm.protocol.summary import LastFailure, LedgerCount, LedgerSummary

RECENT_STEPS = 10
TASKS_NAMED = 3
_LOST = 0.1
"""Report a drop reason or a cause of loss if at least this share of episodes has it."""
_FLAT = 0.5
"""Report equal rewards if at least this share of groups has only equal rewards."""

ADVICE: dict[DropReason, str] = {
    DropReason.EVAL: "evaluations are never trained on",
    DropReason.ABORTED: "the client aborted them; see the causes below",
    DropReason.EXPIRED: "the client stopped responding or took too long: raise idle_limit_s or max_episode_s, or renew the lease",
    DropReason.SERVER_RESTARTED: "they were open when the server restarted; their slots were offered again",
    DropReason.STALE: "the weights that sampled them were too old when their turn came: raise max_staleness, lower the concurrency, or make "
    "episodes shorter",
    DropReason.ZERO_VARIANCE: "all rewards of the group were equal, so there was nothing to compare: use tasks of medium "
    "difficulty, raise the temperature or group_size, or give partial credit",
    DropReason.PARTIAL_GROUP: "their group was not filled in time: raise group_patience_s, lower partial_min, or run more clients",
    DropReason.NO_CALLS: "they ended without a recorded call: does the agent use the episode's base_url and api_key? If its requests "
    "were refused, `swarm ledger --detail` shows why",
    DropReason.TRUNCATED: "every call was cut off by max_tokens: raise sampling.max_tokens, or set algorithm.train_truncated",
    DropReason.GREEDY: "every call used a temperature below 0.01, so nothing was sampled at random: leave the temperature "
    "out, or set it to 1",
    DropReason.UNREPRODUCIBLE_SAMPLING: "they were sampled in a way that the trainer cannot recompute, but sampling.train asks for the "
    "exact distribution: omit vllm_xargs, logits_processors and watermarking, or set sampling.train to policy",
    DropReason.TEAM_ABORTED: "their team was not committed, so none of its episodes counts: read the client's last words",
    DropReason.QUARANTINED: "the client version was quarantined: `swarm run quarantine VERSION --lift` undoes that",
    DropReason.RUN_ENDED: "the run ended before their turn came",
    DropReason.SUPERSEDED: "the run was restored to an earlier checkpoint, or the mix no longer contains their family",
    DropReason.TAINTED: "one of their calls failed on the server, so their slots were offered again: read the server's "
    "log; if the agent recovers from such failures, end with `despite`",
}
CAUSE_ADVICE: dict[Cause, str] = {
    Cause.SERVER: "it restarted, its engine failed, or it closed them itself: look at its log; the rollout is not to blame, "
    "and the tasks were offered again",
    Cause.NETWORK: "client and server could not reach each other: check the connection; the tasks were offered again",
    Cause.CLIENT: "it crashed, was killed or stopped responding: check its log and its memory use; a task on which it died three times "
    "is set aside",
    Cause.ROLLOUT: "it raised an exception, gave up, returned no reward, or its agent failed or never called the model: read "
    "its last words below, fix it, and start it again",
    Cause.GRADER: "it raised an exception, returned no finite number, exited with an error or timed out: fix the grader; "
    "the agent is not to blame",
    Cause.LIMIT: "they exceeded a limit (max_episode_s, max_call_s, --timeout, or the agent's own timeout for a response): raise "
    "the one named in their last words, or make episodes shorter",
    Cause.PERSON: "a person declined them or stopped the client; the tasks were offered again",
}
FORK_ADVICE = {
    "answer_edited": "the agent changes the model's answers before it sends them back; send them back unchanged",
    "history_changed": "the agent rewrites or summarizes its history; each rewrite is trained as a separate prompt",
    "tools_changed": "the tools or template settings change between calls",
    "template_rewrites_history": "the model's own template drops or changes earlier turns (stripped reasoning)",
    "template_changes_message": "the template renders the answer differently from how it was sampled",
    "stop_string_cut": "a stop string or stop token was cut off the answer, so the agent sends the answer back without it",
    "not_only_text": "messages with images or other parts are not continued token by token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    summary: LedgerSummary
    run: RunReport | None
    traces: Sequence[EpisodeTrace]


class Fate(BaseModel):
    """Number and share of the training episodes that ended up in one state or were dropped for one reason."""

    name: str
    episodes: int
    share: float
    advice: str | None = None


class Loss(BaseModel):
    """Number of attempts, including evaluations, that were lost for one cause."""

    cause: Cause
    episodes: int
    share: float
    """Share of all episodes that were lost for this cause."""
    tasks: list[str] = []
    """The tasks with the most attempts lost for this cause."""
    advice: str


class ClientRecord(BaseModel):
    """Statistics on one client with one version of its code.

    `failed` is the number of episodes for whose loss the client itself, its rollout, its grader or a limit is to blame.
    """

    client_id: str
    client_version: str
    episodes: int
    failed: int
    reward_mean: float | None
    last_failure: LastFailure | None = None


class Diagnosis(BaseModel):
    run_id: str | None
    step: int
    episodes: int
    """Number of training episodes; evaluations are counted separately."""
    evaluations: int
    """Number of evaluations, excluding aborted and lost ones."""
    trained: int
    """Number of episodes in steps that are saved in a checkpoint."""
    in_step: int
    """Number of episodes in steps that are not yet saved in a checkpoint."""
    fates: list[Fate]
    """What became of the training episodes, most frequent first."""
    losses: list[Loss] = []
    """Attempts that did not end with a reward, by cause, most frequent first."""
    zero_variance_share: float | None
    """Share of groups whose rewards were all equal, averaged over the last steps."""
    reward_first: float | None
    reward_last: float | None
    """Mean reward over the last `steps_compared` steps; `reward_first` is the same over the first ones."""
    steps_compared: int
    traces_read: int
    forks: dict[str, int]
    """Number of forks by cause in the traces that were read."""
    calls_read: int
    clients: list[ClientRecord]
    """Statistics by client and version, with the most failures first."""
    findings: list[str]
    """What stands out, in words and with advice, the most important first."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Diagnose a run from the evidence."""
    counts, run = evidence.summary.counts, evidence.run
    train = [count for count in counts if count.kind == "train"]
    steps = run.steps if run is not None else []
    compared = min(RECENT_STEPS, len(steps) // 2)
    rewards = [step.values.get("reward_mean", 0.0) for step in steps]
    flat = [
        step.values["zero_variance_share"] for step in steps[-RECENT_STEPS:] if "zero_variance_share" in step.values
    ]
    calls = [call for trace in evidence.traces for call in trace.calls]
    made = Diagnosis(
        run_id=None if run is None else run.run_id,
        step=0 if run is None else run.step,
        episodes=_sum(train),
        evaluations=_sum(one for one in counts if one.kind == "eval" and one.reason in (None, DropReason.EVAL)),
        trained=_sum(count for count in train if count.state == EpisodeState.TRAINED),
        in_step=_sum(count for count in train if count.state == EpisodeState.IN_STEP),
        fates=_fates(train),
        losses=_losses(evidence.summary),
        zero_variance_share=fmean(flat) if flat else None,
        reward_first=fmean(rewards[:compared]) if compared else None,
        reward_last=fmean(rewards[-compared:]) if compared else None,
        steps_compared=compared,
        traces_read=len(evidence.traces),
        forks=dict(Counter(call.fork_cause for call in calls if call.fork_cause).most_common()),
        calls_read=len(calls),
        clients=client_records(evidence.summary),
        findings=[],
    )
    return made.model_copy(update={"findings": list(_findings(made, run))})


def _sum(counts: Iterable[LedgerCount]) -> int:
    return sum(count.episodes for count in counts)


def _fates(counts: Sequence[LedgerCount]) -> list[Fate]:
    found: Counter[DropReason | EpisodeState] = Counter()
    for count in counts:
        found[count.reason or count.state] += count.episodes
    total = max(1, found.total())
    return [
        Fate(name=fate, episodes=n, share=n / total, advice=ADVICE.get(fate) if isinstance(fate, DropReason) else None)
        for fate, n in found.most_common()
    ]


def _losses(summary: LedgerSummary) -> list[Loss]:
    total = max(1, _sum(summary.counts))
    return [
        Loss(cause=cause, episodes=n, share=n / total, tasks=_tasks_lost(summary, cause), advice=CAUSE_ADVICE[cause])
        for cause, n in sorted(summary.causes.items(), key=lambda item: -item[1])
    ]


def _tasks_lost(summary: LedgerSummary, cause: Cause) -> list[str]:
    found: Counter[str] = Counter()
    for lost in summary.lost:
        if lost.cause is cause:
            found[lost.task_id] += lost.episodes
    return [task for task, _ in found.most_common(TASKS_NAMED)]


def client_records(summary: LedgerSummary) -> list[ClientRecord]:
    """Return statistics for each client and version, with the most failures first."""
    by_client: defaultdict[tuple[str, str], list[LedgerCount]] = defaultdict(list)
    for count in summary.counts:
        by_client[count.client_id, count.client_version].append(count)
    last = {(failure.client_id, failure.client_version): failure for failure in summary.failures}
    made = []
    for key, own in by_client.items():
        rewarded = sum(count.rewarded for count in own)
        made.append(
            ClientRecord(
                client_id=key[0],
                client_version=key[1],
                episodes=_sum(own),
                failed=_sum(count for count in own if _failed(count)),
                reward_mean=sum(count.reward_sum for count in own) / rewarded if rewarded else None,
                last_failure=last.get(key),
            )
        )
    return sorted(made, key=lambda record: -record.failed)


_FAILURES = (DropReason.ABORTED, DropReason.EXPIRED, DropReason.NO_CALLS)


def _failed(count: LedgerCount) -> bool:
    """True if the client, the rollout, the grader or a limit is to blame for these lost episodes. Older servers give no cause."""
    return count.reason in _FAILURES if count.cause is None else count.cause in COUNTED


def _findings(made: Diagnosis, run: RunReport | None) -> Iterable[str]:
    if run is None:
        yield "this server has had no run yet; start one with `swarm run start`"
    elif run.status == "failed":
        yield f"the run failed: {run.reason}"
    elif run.status == "stopped":
        yield f"the run was stopped at step {run.step}; it will not train any further"
    if not made.episodes:
        yield "no training episode has been claimed yet: is a client running against this server?"
        return
    if not made.step:
        yield "no step has been made yet, so nothing can have been learned"
    for fate in made.fates:
        if fate.advice and fate.episodes >= _LOST * made.episodes:
            yield f"{fate.episodes} of {made.episodes} training episodes were dropped as {fate.name}: {fate.advice}"
    for loss in made.losses:
        if loss.share >= _LOST:
            yield f"{loss.episodes} attempts were lost because of the {loss.cause}: {loss.advice}"
    if made.zero_variance_share is not None and made.zero_variance_share >= _FLAT:
        yield (
            f"{made.zero_variance_share:.0%} of the groups in the last steps had equal rewards: "
            f"{ADVICE[DropReason.ZERO_VARIANCE]}; or use batch.rule informative_tasks"
        )
    if run is not None and made.step:
        yield from _about_steps(run)
    for cause, count in made.forks.items():
        if count >= 0.2 * made.calls_read:
            yield f"{count} of {made.calls_read} calls forked ({cause}): {FORK_ADVICE.get(cause, 'see the echo rule')}"
    for client in made.clients:
        if client.failed >= 0.5 * client.episodes:
            yield f"client {_named(client)}: {client.failed} of {client.episodes} episodes failed"


def _about_steps(run: RunReport) -> Iterable[str]:
    """Yield findings from the optimizer's metrics."""
    if run.spec.optimizer.learning_rate == 0:
        yield "the learning rate is 0, so nothing can be learned: swarm run patch --set optimizer.learning_rate=1e-5"
    last = run.steps[-1].values if run.steps else {}
    if last and last.get("weights_change") == 0 and last.get("tokens_trained") == 0:
        yield "the last step trained no tokens at all"
    recent = run.steps[-RECENT_STEPS:]
    if forced := sum(_all_forced(step.values) for step in recent):
        yield (
            f"{forced} of the last {len(recent)} steps taught nothing: all tokens that they trained were forced, because a grammar "
            "or a tool left only one choice; loosen the schema, or let the model choose the tool"
        )
    steps = [step.values for step in run.steps if MISMATCH in step.values and STALENESS in step.values]
    later = outgrown((values[MISMATCH], values[STALENESS]) for values in steps)
    if later is not None:
        yield (
            f"sampler and trainer agreed in the first step but no longer do ({later:.1g} nats per token): "
            "new weights may not fully reach the sampler, so do not trust this run's rewards before you know why"
        )
    elif last.get(MISMATCH, 0.0) > 0.1:
        yield (
            f"sampler and trainer disagree by {last[MISMATCH]:.2f} nats per token: set "
            "algorithm.importance_correction to truncated, or train in the sampler's precision"
        )


def _all_forced(values: Mapping[str, float]) -> bool:
    """True if a step trained only tokens that had no alternative.

    `tokens_forced` also counts tokens that are not trained, so check the gradient too: tokens with an alternative would have one.
    """
    trained = values.get("tokens_trained", 0.0)
    return 0 < trained <= values.get("tokens_forced", 0.0) and values.get("grad_norm") == 0


def _named(client: ClientRecord) -> str:
    return f"{one_line(client.client_id)} version {one_line(client.client_version)}"


def diagnosis_text(made: Diagnosis, *, detail: bool = False) -> str:
    """Format the diagnosis as text. If `detail` is true, show the last traceback of every client in full, not only the newest one."""
    provisional = f"{made.in_step} in_step, " if made.in_step else ""
    lines = [
        f"run {made.run_id or '-'}  step {made.step}  {made.trained} of {made.episodes} training episodes trained, "
        f"{provisional}{made.evaluations} evaluations"
    ]
    if made.reward_first is not None and made.reward_last is not None:
        first, last = (
            ("over the first {} steps", "over the last {}")
            if made.steps_compared > 1
            else ("in the first step", "in the last")
        )
        lines.append(
            f"reward {made.reward_first:.3f} {first.format(made.steps_compared)}, "
            f"{made.reward_last:.3f} {last.format(made.steps_compared)}"
        )
    lines += ["", "What stands out"]
    lines += [f"  - {finding}" for finding in made.findings] or [
        "  nothing: episodes are trained on, and none are lost"
    ]
    lines += ["", "Episodes by fate"]
    lines += [
        f"  {fate.episodes:>7}  {fate.share:>4.0%}  {fate.name:<24} {fate.advice or ''}".rstrip() for fate in made.fates
    ] or ["  none for training yet"]
    if made.zero_variance_share is not None:
        lines.append(f"  groups with equal rewards in the last steps: {made.zero_variance_share:.0%}")
    if made.losses:
        lines += ["", "Attempts without a reward, by cause"]
        lines += [line for loss in made.losses for line in _loss_lines(loss)]
    forks = ", ".join(f"{count} {cause}" for cause, count in made.forks.items()) or "none"
    lines += ["", f"Forks in the newest {made.traces_read} traces ({made.calls_read} calls): {forks}"]
    lines += ["", "Clients"]
    newest = max((client.last_failure.claimed_at for client in made.clients if client.last_failure), default=0.0)
    for client in made.clients:
        reward = "-" if client.reward_mean is None else f"{client.reward_mean:.3f}"
        lines.append(f"  {_named(client)}: {client.episodes} episodes, reward {reward}, {client.failed} failed")
        failure = client.last_failure
        lines += _failure_lines(failure, whole=detail or (failure is not None and failure.claimed_at == newest))
    return "\n".join(lines)


def _loss_lines(loss: Loss) -> list[str]:
    lines = [f"  {loss.episodes:>7}  {loss.share:>4.0%}  {loss.cause:<24} {loss.advice}"]
    if loss.tasks:
        lines.append(f"{'':>17}mostly task {', '.join(one_line(task) for task in loss.tasks)}")
    return lines


def _failure_lines(failure: LastFailure | None, *, whole: bool) -> list[str]:
    if failure is None:
        return []
    said = (failure.detail or "").strip().splitlines()
    shown = said if whole else said[-1:]
    return [f"    last: {failure.reason}, {failure.episode_id}", *(f"      {line}" for line in shown)]
