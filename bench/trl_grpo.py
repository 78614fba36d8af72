"""TRL's GRPOTrainer, one optimiser step per line on standard input; answers each with its seconds as a JSON line.

Runs in an environment of its own (requirements/trl.txt): python -m bench.trl_grpo --model DIR --precision float32
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from bench.sums import GROUP_SIZE, LEARNING_RATE, MAX_TOKENS, PRECISIONS, TASKS, score, sums

_STEPS = 64


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--per-device", type=int, default=16, help="completions per forward pass")
    args = parser.parse_args()
    trainer = _trainer(args.model, args.precision, args.per_device)
    _say(ready=True)
    trainer.train()


def _trainer(model: str, precision: str, per_device: int) -> Any:
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

    def reward(completions: list[Any], total: list[int], **_: Any) -> list[float]:
        return [score(made[0]["content"], right) for made, right in zip(completions, total, strict=True)]

    rows = [
        {"prompt": [{"role": "user", "content": task.question}], "total": task.total}
        for step in range(_STEPS)
        for task in sums(step)
    ]
    batch = TASKS * GROUP_SIZE
    config = GRPOConfig(
        output_dir="/tmp/trl-grpo-is-not-saved",
        use_cpu=True,
        bf16=precision == "autocast",
        model_init_kwargs={"dtype": "bfloat16" if precision == "bfloat16" else "float32"},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=batch // per_device,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
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
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[OneStepPerLine()],
    )


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
