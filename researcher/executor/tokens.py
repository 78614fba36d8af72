"""Counts the tokens of agents' calls against a study's budget: prompt and sampled tokens, in training and evaluation, in every
attempt.

Tokens are reserved before an attempt begins, and counted from the servers' ledgers while it runs. They stay spent, however the
attempt ends. Each attempt is an item of the budget, because it has its own runs.
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
    """The token budget of one study. If its plan has no token limit, nothing is counted."""

    def __init__(self, store: Store, study_id: str, plan: Plan) -> None:
        self._store = store
        self._study_id = study_id
        self._plan = plan
        self.limited = plan.budget.tokens is not None

    def reserve(self, trial: TrialRecord) -> None:
        """Reserve the tokens that the trial's next or open attempt is still expected to need.

        Before any trial has been counted, that need is not known, and a trial may begin as long as any tokens are left.
        Raises: OverBudget when too few tokens are left.
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
        """Return whether the whole budget is spent. Reserved tokens do not count as spent, because attempts may still use them."""
        if not self.limited:
            return False
        state = self._state()
        return state.spent >= state.limit

    def note(self, trial_key: str, attempt: int, tokens: int) -> None:
        """Record the tokens that the attempt has used so far."""
        self._store.budgets.use(self._study_id, KIND, item_of(trial_key, attempt), tokens)

    def settle(self) -> None:
        """Release the reservations of attempts that have ended, in this process or in another."""
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
        """Return the mean tokens of the arm's finished trials.

        If the arm has none, return the largest count among other arms' trials, or None if there is no count at all.
        """
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
    """Count the tokens of these runs' ended episodes, over all clients. Raises: SwarmError."""
    total = 0
    for swarm, run_id in runs:
        counts = (await swarm.summary(run_id=run_id)).counts
        total += sum(each.prompt_tokens + each.sampled_tokens for each in counts)
    return total
