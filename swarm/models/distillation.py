"""Distills a smaller checkpoint, with some of the teacher's layers, in a separate process:

    python -m swarm.models.distillation TEACHER OUT WORK_DIR --layers 0,1,2

The teacher answers prompts, sampling with a fixed seed. The smaller model learns the teacher's last hidden state at every token, and
the teacher's distribution at answer tokens. It keeps the teacher's embeddings, head and norm. Like conversion.py, this process loads
torch. It prints its progress. The same machine, thread count and versions give the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.clock import SystemClock
from foundation.machine import multiplies_bfloat16
from foundation.paths import write_atomically
from swarm.models.distillation_prompts import Prompt, prompts
from swarm.models.folder import fingerprint_of, sha256_of, weight_files

if TYPE_CHECKING:
    from torch import Tensor

Report = Callable[[str], None]
_REPORT_EVERY_S = 10.0
_READ_AT_ONCE = 32
_CLOCK = SystemClock()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training settings, and how many prompts of each kind to use (`sums`, `short` and `long`).

    `sampled` is the number of answers to sample together; `batch` is the number of answers per optimizer step.
    """

    seed: int = 0
    sums: int = 128
    short: int = 64
    long: int = 32
    sampled: int = 64
    epochs: int = 4
    batch: int = 8
    learning_rate: float = 8e-4
    warmup_steps: int = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a templated prompt followed by its answer (`ids`), and the length of the prompt (`asked`)."""

    ids: list[int]
    asked: int


def distil(
    teacher_dir: Path,
    out: Path,
    work_dir: Path,
    layers: Sequence[int],
    recipe: Recipe | None = None,
    report: Report = _say,
) -> None:
    """Write the smaller checkpoint (in bfloat16), with the teacher's tokenizer, to `out`.

    Args:
        teacher_dir: the teacher's checkpoint.
        out: folder to write to.
        work_dir: folder that keeps the teacher's answers for a retry.
        layers: the teacher's layers to keep, counted from 0.
        recipe: training settings.
        report: receives lines about the progress.
    Raises: ValueError for layers that the teacher does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = recipe or Recipe()
    tokenizer = AutoTokenizer.from_pretrained(teacher_dir)
    teacher: Any = AutoModelForCausalLM.from_pretrained(
        teacher_dir, dtype=torch.bfloat16 if multiplies_bfloat16() else torch.float32
    )
    teacher.eval().requires_grad_(False)
    student = with_layers(teacher, layers)
    asked = prompts(recipe.sums, recipe.short, recipe.long, recipe.seed)
    kept = work_dir / f"answers-{_key(teacher_dir, asked, recipe)}.json"
    if not kept.is_file():
        answers = _answers(teacher, tokenizer, asked, recipe, report)
        write_atomically(kept, json.dumps([asdict(answer) for answer in answers]).encode())
    answers = [Answer(**each) for each in json.loads(kept.read_bytes())]
    _learn(student, teacher, answers, recipe, report)
    student.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    report(f"{sum(each.numel() for each in student.parameters()):,} parameters in {len(layers)} layers")


def with_layers(teacher: Any, layers: Sequence[int]) -> Any:
    """Return a float32 copy of a causal language model with only these layers, in this order."""
    import torch
    from transformers import AutoModelForCausalLM

    most = teacher.config.num_hidden_layers
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < most:
        raise ValueError(
            f"layers must be numbers from 0 to {most - 1}, in ascending order without repeats, got {list(layers)}"
        )
    config = type(teacher.config)(**{**teacher.config.to_dict(), "num_hidden_layers": len(layers)})
    make: Any = AutoModelForCausalLM.from_config
    student = make(config, dtype=torch.float32)
    weights = {
        name: tensor.float() for name, tensor in teacher.state_dict().items() if not name.startswith("model.layers.")
    }
    for place, layer in enumerate(layers):
        for name, tensor in teacher.model.layers[layer].state_dict().items():
            weights[f"model.layers.{place}.{name}"] = tensor.float()
    student.load_state_dict(weights)
    student.requires_grad_(False)
    student.model.layers.requires_grad_(True)
    return student


def _key(teacher_dir: Path, asked: Sequence[Prompt], recipe: Recipe) -> str:
    """Return a hash of everything that the answers depend on."""
    weights = fingerprint_of({file.name: sha256_of(file) for file in weight_files(teacher_dir)})
    said = json.dumps([weights, [asdict(prompt) for prompt in asked], recipe.seed, recipe.sampled])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _answers(teacher: Any, tokenizer: Any, asked: Sequence[Prompt], recipe: Recipe, report: Report) -> list[Answer]:
    """Sample the teacher's answers at temperature 1."""
    import torch

    torch.manual_seed(recipe.seed)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        for prompt in asked
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    order = sorted(range(len(asked)), key=lambda place: (asked[place].most, len(ids[place]), place))
    clock = _Clock("the teacher answers", report, sum(prompt.most for prompt in asked))
    answers: dict[int, Answer] = {}
    for begin in range(0, len(order), recipe.sampled):
        places = order[begin : begin + recipe.sampled]
        for place, said in zip(
            places, _sampled(teacher, [ids[place] for place in places], asked[places[-1]].most), strict=True
        ):
            answers[place] = Answer(ids[place] + said, len(ids[place]))
        clock.done(sum(asked[place].most for place in places))
    return [answers[place] for place in range(len(asked))]


def _sampled(teacher: Any, asked: Sequence[list[int]], most: int) -> list[list[int]]:
    """Sample answers to these prompts, of at most `most` tokens. Returns their token ids, including the end token if there is one."""
    import torch

    width = max(map(len, asked))
    fill = teacher.config.pad_token_id or 0
    tokens = torch.tensor([[fill] * (width - len(ids)) + ids for ids in asked])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in asked])
    with torch.inference_mode():
        made = teacher.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=most,
            pad_token_id=fill,
        )
    end = teacher.config.eos_token_id
    found = []
    for line in made[:, width:].tolist():
        found.append(line[: line.index(end) + 1] if end in line else line)
    return found


def _learn(student: Any, teacher: Any, answers: Sequence[Answer], recipe: Recipe, report: Report) -> None:
    """Train the layers of `student`, in place."""
    import torch

    torch.manual_seed(recipe.seed)
    steps_per_epoch = math.ceil(len(answers) / recipe.batch)
    steps = recipe.epochs * steps_per_epoch
    trained = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step, steps, recipe.warmup_steps))
    wanted = _states(teacher, answers, report)
    clock = _Clock(f"learning, {steps} steps", report, steps)
    student.train()
    for _ in range(recipe.epochs):
        order = torch.randperm(len(answers)).tolist()
        for begin in range(0, len(order), recipe.batch):
            places = order[begin : begin + recipe.batch]
            loss = loss_of(
                student, teacher.lm_head, [answers[place] for place in places], [wanted[place] for place in places]
            )
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            clock.done(1, f"loss {loss.item():.3f}")
    student.eval()


def _states(teacher: Any, answers: Sequence[Answer], report: Report) -> list[Tensor]:
    """Return the teacher's last hidden states for each answer, shape [T, D]. They are computed once and used in every epoch."""
    import torch

    clock = _Clock("the teacher reads its answers", report, len(answers))
    found: dict[int, Tensor] = {}
    order = sorted(range(len(answers)), key=lambda place: len(answers[place].ids))
    for begin in range(0, len(order), _READ_AT_ONCE):
        places = order[begin : begin + _READ_AT_ONCE]
        ids_BT, real_BT, _ = _padded([answers[place] for place in places])
        with torch.inference_mode():
            states_BTD = teacher.model(input_ids=ids_BT, attention_mask=real_BT.long()).last_hidden_state
        found |= {place: states_BTD[row, : len(answers[place].ids)].clone() for row, place in enumerate(places)}
        clock.done(len(places))
    return [found[place] for place in range(len(answers))]


def _padded(answers: Sequence[Answer]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids padded on the right, a mask of real tokens, and a mask of positions that predict an answer token."""
    import torch

    width = max(len(answer.ids) for answer in answers)
    ids_BT = torch.tensor([answer.ids + [0] * (width - len(answer.ids)) for answer in answers])
    at_T = torch.arange(width)
    ends_B = torch.tensor([len(answer.ids) for answer in answers])
    asked_B = torch.tensor([answer.asked for answer in answers])
    real_BT = at_T < ends_B[:, None]
    return ids_BT, real_BT, (at_T >= asked_B[:, None] - 1) & (at_T < ends_B[:, None] - 1)


def loss_of(student: Any, head: Any, answers: Sequence[Answer], wanted: Sequence[Tensor]) -> Tensor:
    """Return the loss of a batch: relative squared error of the last hidden states, plus KL(teacher || student) per answer token.

    `head` is the output layer, which teacher and student share. `wanted` holds the teacher's states for each answer, shape [T, D].
    """
    import torch
    from torch.nn import functional

    ids_BT, real_BT, said_BT = _padded(answers)
    wanted_MD = torch.cat(list(wanted))
    said_M = said_BT[real_BT]
    with torch.no_grad():
        logp_wanted_NV = functional.log_softmax(head(wanted_MD[said_M]).float(), dim=-1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=multiplies_bfloat16()):
        hidden_MD = student.model(input_ids=ids_BT, attention_mask=real_BT.long()).last_hidden_state[real_BT]
        logits_NV = functional.linear(hidden_MD[said_M], head.weight)
    error = functional.mse_loss(hidden_MD.float(), wanted_MD.float()) / wanted_MD.float().square().mean()
    logp_NV = functional.log_softmax(logits_NV.float(), dim=-1)
    return error + functional.kl_div(logp_NV, logp_wanted_NV, log_target=True, reduction="batchmean")


def _pace(step: int, steps: int, warmup_steps: int) -> float:
    """Return the learning rate factor of a step: linear warm-up, then cosine decay to 0.05."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    share = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


class _Clock:
    """Reports progress and the estimated remaining time at intervals."""

    def __init__(self, what: str, report: Report, total: float) -> None:
        self._what, self._report, self._total = what, report, total
        self._done, self._began = 0.0, _CLOCK.monotonic()
        self._reported = self._began

    def done(self, share: float, note: str = "") -> None:
        self._done += share
        now = _CLOCK.monotonic()
        if now - self._reported < _REPORT_EVERY_S and self._done < self._total:
            return
        self._reported = now
        left_s = (now - self._began) / self._done * (self._total - self._done)
        self._report(f"{self._what}: {100 * self._done / self._total:.0f} %, {left_s:.0f} s left {note}".rstrip())


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m swarm.models.distillation")
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--layers", required=True, help="the layers to keep, counted from 0, such as 0,1,2")
    args = parser.parse_args()
    layers = [int(layer) for layer in args.layers.split(",")]
    distil(args.teacher, args.out, args.work_dir, layers)


if __name__ == "__main__":
    _main()
