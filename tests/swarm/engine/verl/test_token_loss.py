"""Which algorithms the ranks can price tokens for."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.engine.seam import EngineError
from swarm.engine.verl.token_loss import refuse_unknown_terms
from swarm.protocol.algorithms import AlgorithmSpec
from tests.swarm.engine.own_functions import own


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "ppo"}, "trains no critic"),
        ({"name": "reinforce_pp", "kl": 0.1, "kl_in": "reward"}, "no penalty or discount"),
        ({"name": "reinforce_pp", "kl": 0.0, "gamma": 0.9}, "no penalty or discount"),
    ],
)
def test_what_needs_more_than_a_row_has_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        refuse_unknown_terms(AlgorithmSpec.model_validate(fields))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "cispo", "gspo"])
def test_what_prices_tokens_or_whole_calls_is_accepted(name: str) -> None:
    refuse_unknown_terms(AlgorithmSpec.model_validate({"name": name, "importance_correction": "truncated_call"}))


def test_functions_of_users_are_accepted_without_a_penalty_inside_the_reward() -> None:
    mine = own(name="mine.py:advantage", loss="mine.py:loss", importance_correction="mine.py:correction")
    refuse_unknown_terms(AlgorithmSpec.model_validate(mine))
    with pytest.raises(EngineError, match="no penalty or discount"):
        refuse_unknown_terms(AlgorithmSpec.model_validate(mine | {"kl": 0.1, "kl_in": "reward"}))


def test_reinforce_without_penalty_and_discount_is_accepted() -> None:
    refuse_unknown_terms(AlgorithmSpec.model_validate({"name": "reinforce_pp", "kl": 0.0}))
