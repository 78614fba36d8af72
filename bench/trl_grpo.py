"""TRL's GRPOTrainer, one optimiser step per line on standard input; answers each with its seconds as a JSON line.

Runs in an environment of its own (requirements/trl.txt): python -m bench.trl_grpo --model DIR --precision float32
With --recorded FILE it samples nothing, but trains on the calls of a recorded workload (bench/workloads) of one group, each
call a sample of its own, as its `rollout_func` allows: calls with the same number in their episodes are one of its groups.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.sums import GROUP_SIZE, LEARNING_RATE, MAX_TOKENS, PRECISIONS, TASKS, score, sums

_STEPS = 64


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--per-device", type=int, default=16, help="completions per forward pass")
    parser.add_argument("--recorded", type=Path, help="train on the calls in this file")
    args = parser.parse_args()
    source = Recording(args.recorded) if args.recorded else Sums()
    trainer = _trainer(source, args.model, args.precision, args.per_device)
    _say(ready=True)
    trainer.train()


class Sums:
    """Sums, answered by TRL's own model."""

    group_size = GROUP_SIZE
    batch = TASKS * GROUP_SIZE
    max_tokens = MAX_TOKENS
    rollout = None

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"prompt": [{"role": "user", "content": task.question}], "total": task.total}
            for step in range(_STEPS)
            for task in sums(step)
        ]

    @staticmethod
    def reward(completions: list[Any], total: list[int], **_: Any) -> list[float]:
        return [score(made[0]["content"], right) for made, right in zip(completions, total, strict=True)]


class Recording:
    """Calls that were made before. A prompt names its turn; the episodes take turns in answering it."""

    def __init__(self, path: Path) -> None:
        (self._episodes,) = json.loads(gzip.decompress(path.read_bytes()))["groups"]
        self._turns = len(self._episodes[0]["calls"])
        if any(len(episode["calls"]) != self._turns for episode in self._episodes):
            raise ValueError(f"the episodes in {path.name} have different numbers of calls")
        self.group_size = len(self._episodes)
        self.batch = self.group_size * self._turns
        self.max_tokens = max(len(call["sampled_ids"]) for some in self._episodes for call in some["calls"])

    def rows(self) -> list[dict[str, Any]]:
        return [{"prompt": str(turn)} for _ in range(_STEPS) for turn in range(self._turns)]

    def rollout(self, prompts: list[str], trainer: object) -> dict[str, list[Any] | None]:
        told = dict.fromkeys(prompts, 0)
        chosen = []
        for prompt in prompts:
            episode = self._episodes[told[prompt] % self.group_size]
            told[prompt] += 1
            chosen.append((episode["calls"][int(prompt)], episode["reward"]))
        return {
            "prompt_ids": [call["prompt_ids"] for call, _ in chosen],
            "completion_ids": [call["sampled_ids"] for call, _ in chosen],
            "logprobs": None,  # as for what TRL samples itself: without vLLM it corrects for nothing
            "earned": [earned for _, earned in chosen],
        }

    @staticmethod
    def reward(earned: list[float], **_: Any) -> list[float]:
        return earned


def _trainer(source: Sums | Recording, model: str, precision: str, per_device: int) -> Any:
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]  # in its own environment
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class OneStepPerLine(TrainerCallback):
        """Waits for a line before each step, and tells how long the step took."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                sys.exit(0)
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _say(seconds=time.monotonic() - self.began)

    config = GRPOConfig(
        output_dir="/tmp/trl-grpo-is-not-saved",
        use_cpu=True,
        bf16=precision == "autocast",
        model_init_kwargs={"dtype": "bfloat16" if precision == "bfloat16" else "float32"},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=source.batch // per_device,
        num_generations=source.group_size,
        max_completion_length=source.max_tokens,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        max_steps=_STEPS,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=source.reward,
        args=config,
        train_dataset=Dataset.from_list(source.rows()),
        callbacks=[OneStepPerLine()],
        rollout_func=source.rollout,
    )


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
