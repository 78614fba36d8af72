"""Tokens of agents' calls against a study's budget: prompt and sampled, of training and evaluation, of every attempt.

They are reserved before an attempt begins, counted while it runs by what the servers' ledgers add up to, and kept when it ends,
however it ends. Each attempt is an item of the budget, as it has runs of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from researcher.models import BudgetState, TrialRecord, TrialStatus
from researcher.store.errors import OverBudget
from researcher.store.store import Store
from researcher.study.plan import Plan
from swarm.client import SwarmClient

KIND = "tokens"


class TokenBudget:
    """Of one study. Where its plan has no limit of tokens, nothing is counted."""

    def __init__(self, store: Store, study_id: str, plan: Plan) -> None:
        self._store = store
        self._study_id = study_id
        self._plan = plan
        self.limited = plan.budget.tokens is not None

    def reserve(self, trial: TrialRecord) -> None:
        """Set aside what the trial's next attempt, or the open one, is expected to take still.

        Raises: OverBudget where that is not left. Before a trial has been counted nobody knows what one takes: then it may begin
        as long as anything is left.
        """
        if not self.limited:
            return
        attempts = self._store.trials.attempts(self._study_id, trial.key)
        number = len(attempts) if attempts and attempts[-1].outcome == "open" else len(attempts) + 1
        item, items = item_of(trial.key, number), self._store.budgets.items(self._study_id, KIND)
        reserved, spent = items.get(item, (0.0, 0.0))
        left, counted = self._left() + reserved, self._counted(trial.arm, items)
        wanted = max(0.0, (counted or self._plan.trial_tokens or 0.0) - spent)
        if left <= 0:
            raise OverBudget(KIND, wanted, left)
        self._store.budgets.reserve(self._study_id, KIND, item, wanted if counted else min(wanted, left))

    def is_spent(self) -> bool:
        """Whether nothing more may be sampled: what is reserved for others is theirs still."""
        if not self.limited:
            return False
        state = self._state()
        return state.spent >= state.limit

    def note(self, trial_key: str, attempt: int, tokens: int) -> None:
        """What the attempt has taken so far."""
        self._store.budgets.use(self._study_id, KIND, item_of(trial_key, attempt), tokens)

    def settle(self) -> None:
        """End the reservations of attempts that have ended, in this process or in another."""
        if not self.limited:
            return
        attempts = self._store.trials.attempts_of_study(self._study_id)
        under_way = {
            item_of(each.trial_key, each.number) for of in attempts.values() for each in of if each.outcome == "open"
        }
        items = self._store.budgets.items(self._study_id, KIND)
        over = [item for item, (reserved, _) in items.items() if reserved and item not in under_way]
        if over:
            self._store.budgets.release(self._study_id, KIND, over)

    def _counted(self, arm: str, items: dict[str, tuple[float, float]]) -> float | None:
        """What a trial of the arm took on average; before one was counted, what the dearest of the others took; else None."""
        spent: dict[str, float] = defaultdict(float)
        for item, (_, amount) in items.items():
            spent[item.rpartition("#")[0]] += amount
        done = [
            each
            for each in self._store.trials.all(self._study_id, series=())
            if each.status is TrialStatus.DONE and spent[each.key]
        ]
        same = [spent[each.key] for each in done if each.arm == arm]
        return sum(same) / len(same) if same else max((spent[each.key] for each in done), default=None)

    def _left(self) -> float:
        state = self._state()
        return state.limit - state.spent - state.reserved

    def _state(self) -> BudgetState:
        [state] = [each for each in self._store.budgets.all(self._study_id) if each.kind == KIND]
        return state


def item_of(trial_key: str, attempt: int) -> str:
    return f"{trial_key}#{attempt}"


async def count_tokens(runs: Iterable[tuple[SwarmClient, str]]) -> int:
    """Tokens of the ended episodes of these runs, whoever played them. Raises: SwarmError."""
    total = 0
    for swarm, run_id in runs:
        counts = (await swarm.summary(run_id=run_id)).counts
        total += sum(each.prompt_tokens + each.sampled_tokens for each in counts)
    return total
