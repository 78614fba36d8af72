"""TRL's GRPOTrainer, one optimiser step per line on standard input; answers each with its seconds and the tokens that it sampled,
as a JSON line.

Runs in an environment of its own (requirements/trl.txt):

    python -m bench.trl_grpo --model DIR --precision float32 --task sums --scratch DIR

Turns are taken as TRL's own loop over tools takes them: the whole conversation is read again at each turn, by its token ids,
and is trained as one sequence in which only the model's tokens count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from bench.clerk import EPISODES, TURNS, Clerk
from bench.clerk import MAX_TOKENS as TURN_TOKENS
from bench.sums import GPU_MAX_TOKENS, GROUP_SIZE, MAX_TOKENS, PRECISIONS, STILL, TASKS, even, score, sums

_STEPS = 64
_SAMPLED: list[int] = []
"""Tokens of each batch of completions since the last step."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--task", choices=("sums", "turns"), required=True)
    parser.add_argument("--scratch", required=True, help="a folder for what TRL may write; it saves no model")
    parser.add_argument("--gpu", action="store_true", help="longer sums, sampled by TRL's own vLLM on the same GPU")
    args = parser.parse_args()
    make = _turns if args.task == "turns" else _sums_on_gpu if args.gpu else _sums
    trainer = make(args.model, args.precision, args.scratch)
    _say(ready=True)
    trainer.train()


def _sums(model: str, precision: str, scratch: str) -> Any:
    def reward(completions: list[Any], completion_ids: list[list[int]], total: list[int], **_: Any) -> list[float]:
        _SAMPLED.append(sum(map(len, completion_ids)))
        return [score(made[0]["content"], right) for made, right in zip(completions, total, strict=True)]

    return _trainer(
        model,
        precision,
        scratch,
        _rows(),
        reward,
        use_cpu=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=TASKS * GROUP_SIZE // 16,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
    )


def _sums_on_gpu(model: str, precision: str, scratch: str) -> Any:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        _SAMPLED.append(sum(map(len, completion_ids)))
        return [*map(even, completion_ids)]

    return _trainer(
        model,
        precision,
        scratch,
        _rows(),
        reward,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        per_device_train_batch_size=TASKS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=GPU_MAX_TOKENS,
    )


def _rows() -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": task.question}], "total": task.total}
        for step in range(1, _STEPS + 1)
        for task in sums(step)
    ]


def _turns(model: str, precision: str, scratch: str) -> Any:
    def reward(coins: list[float], **_: Any) -> list[float]:
        return coins

    trainer = _trainer(
        model,
        precision,
        scratch,
        [{"prompt": [{"role": "user", "content": str(step)}]} for step in range(1, _STEPS + 1)],
        reward,
        rollout_func=_played,
        use_cpu=True,
        per_device_train_batch_size=1,  # four conversations at once take more than 20 GB in float32
        gradient_accumulation_steps=EPISODES,
        num_generations=EPISODES,
        max_completion_length=TURNS * TURN_TOKENS,
    )
    trainer.generation_config.max_new_tokens = TURN_TOKENS
    return trainer


def _played(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Play all turns of all episodes in parallel. A prompt's text is the number of its task."""
    tokenizer = trainer.processing_class
    clerks = [Clerk(int(prompt[-1]["content"])) for prompt in prompts]
    opened = [
        tokenizer.apply_chat_template(clerk.opening, add_generation_prompt=True, return_dict=True)["input_ids"]
        for clerk in clerks
    ]
    made: list[list[int]] = [[] for _ in clerks]
    ours: list[list[int]] = [[] for _ in clerks]
    for turn in range(TURNS):
        read = [prompt + so_far for prompt, so_far in zip(opened, made, strict=True)]
        answers, _ = trainer._generate_single_turn(read, None, {}, num_generations=1)
        for clerk, answer, so_far, mask in zip(clerks, answers, made, ours, strict=True):
            so_far += answer
            mask += [1] * len(answer)
            told = clerk.obey(tokenizer.decode(answer, skip_special_tokens=True))
            if turn + 1 < TURNS:
                ended = "" if answer[-1] == tokenizer.eos_token_id else "<|im_end|>"
                between = tokenizer.encode(
                    f"{ended}\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
                )
                so_far += between
                mask += [0] * len(between)
    _SAMPLED.append(sum(map(sum, ours)))
    coins = [clerk.coins for clerk in clerks]
    return {"prompt_ids": opened, "completion_ids": made, "logprobs": None, "env_mask": ours, "coins": coins}


def _trainer(
    model: str,
    precision: str,
    scratch: str,
    rows: list[dict[str, Any]],
    reward: Any,
    *,
    rollout_func: Any = None,
    **settings: Any,
) -> Any:
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]  # in its own environment
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class OneStepPerLine(TrainerCallback):
        """Waits for an input line before each step, and prints the step's duration."""

        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                sys.exit(0)
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _say(seconds=time.monotonic() - self.began, sampled_tokens=sum(_SAMPLED))
            _SAMPLED.clear()

    config = GRPOConfig(
        output_dir=scratch,
        bf16=precision == "autocast",
        model_init_kwargs={"dtype": "bfloat16" if precision == "bfloat16" else "float32"},
        learning_rate=STILL,
        lr_scheduler_type="constant",
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
        **settings,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[OneStepPerLine()],
        rollout_func=rollout_func,
    )


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
