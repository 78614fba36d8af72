"""Topics as people write them, and what each is read as."""

from __future__ import annotations

from typing import Any

import pytest
from researcher.design.reading import Reading

from researcher.planner.matching import example, read
from researcher.refusals import PlanningRefused
from tests.contracts.planner_contract import ARITHMETIC, KITCHEN

UP, DOWN = "increase", "decrease"
AUC, ACC, REWARD, STEPS = "auc_reward", "heldout_accuracy", "final_reward", "steps_to_threshold"

# topic, factor, treatments, baselines, metric, direction
ASKED: list[tuple[str, str, list[Any], list[Any], str, str]] = [
    ("Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("Does GRPO learn one-digit sums faster with a learning rate of 1e-5 than with 4e-5?", "learning_rate", [1e-5], [4e-5], AUC, UP),
    ("Is a learning rate of 1e-5 worse than 4e-5 for held-out accuracy?", "learning_rate", [1e-5], [4e-5], ACC, DOWN),
    ("Do longer answers (32 tokens) hurt accuracy compared to short ones (8 tokens)?", "max_tokens", [32], [8], ACC, DOWN),
    ("Do longer completions hurt accuracy?", "max_tokens", [32], [16], ACC, DOWN),
    ("Do completions of 32 tokens hurt accuracy compared to 8 tokens?", "max_tokens", [32], [8], ACC, DOWN),
    ("Do 32-token completions beat 8-token completions?", "max_tokens", [32], [8], AUC, UP),
    ("Do more completions hurt accuracy?", "group_size", [8], [4], ACC, DOWN),
    ("Does temperature 0.7 during rollouts hurt accuracy compared to 1.0?", "temperature", [0.7], [1.0], ACC, DOWN),
    ("Does a group size of 16 make the reward curve climb more quickly than 4?", "group_size", [16], [4], AUC, UP),
    ("Does accuracy rise more quickly with a group size of 16 than with 4?", "group_size", [16], [4], ACC, UP),
    ("Does normalising advantages by the group's standard deviation matter?", "advantage_norm", ["std"], ["none"], AUC, UP),
    ("LoRA r=4 vs r=32: which reaches higher accuracy?", "lora_rank", [4], [32], ACC, UP),
    ("Learning rate sweep (1e-5, 3e-5, 1e-4) on one-digit sums", "learning_rate", [3e-5, 1e-4], [1e-5], AUC, UP),
    ("learning-rate sweep 1e-5..1e-4", "learning_rate", [1e-5], [1e-4], AUC, UP),
    ("lr ∈ [1e-5, 1e-4]", "learning_rate", [1e-5], [1e-4], AUC, UP),
    ("Does ablating the KL penalty hurt?", "kl", [0.0], [0.1], AUC, DOWN),
    ("Should the learning rate be decayed linearly or kept constant?", "schedule", ["linear"], ["constant"], AUC, UP),
    ("Does GRPO improve held-out accuracy on one-digit sums?", "learning_rate", [4e-5], [0.0], ACC, UP),
    ("Can SmolLM2 learn one-digit addition with GRPO?", "learning_rate", [4e-5], [0.0], AUC, UP),
    ("Does reinforcement learning hurt accuracy?", "learning_rate", [4e-5], [0.0], ACC, DOWN),
    ("How much does GRPO improve held-out accuracy within 15 steps?", "learning_rate", [4e-5], [0.0], ACC, UP),
    ("Does GRPO teach the model to add one-digit numbers?", "learning_rate", [4e-5], [0.0], AUC, UP),
    ("Is the trained model better than the untrained one?", "learning_rate", [4e-5], [0.0], ACC, UP),
    ("Is no training better than GRPO?", "learning_rate", [0.0], [4e-5], ACC, UP),
    ("Is GRPO with lr 1e-4 better than the untrained model?", "learning_rate", [1e-4], [0.0], ACC, UP),
    ("Does GRPO with a group size of 16 improve accuracy?", "group_size", [16], [4], ACC, UP),
    ("Does training for 20 steps help?", "steps", [20], [6], AUC, UP),
    ("What is the effect of group size on accuracy relative to the base model?", "group_size", [2, 8], [4], ACC, UP),
    ("Does GRPO with KL 0.05 stay closer to the base model?", "kl", [0.05], [0.0], AUC, UP),
    ("Does training on harder sums (2 digits) beat training on easy ones (1 digit)?", "digits", [2], [1], AUC, UP),
    ("Does GRPO lose to RLOO?", "algorithm", ["grpo"], ["rloo"], AUC, DOWN),
    ("Does LoRA fail to match full fine-tuning?", "parameters", ["lora"], ["full"], AUC, DOWN),
    ("Treatment: KL. Baseline: no KL. Does the treatment learn sums faster?", "kl", [0.1], [0.0], AUC, UP),
    ("Baseline: no KL. Treatment: KL. Does it learn sums faster?", "kl", [0.1], [0.0], AUC, UP),
    ("Treatment: LoRA. Control: without LoRA. Is it more accurate on sums?", "parameters", ["lora"], ["full"], ACC, UP),
    ("Baseline: KL. Treatment: no KL. Does it learn sums faster?", "kl", [0.0], [0.1], AUC, UP),
    ("Larger groups take longer. Is a group size of 16 more accurate than 4?", "group_size", [16], [4], ACC, UP),
    ("Although larger groups take longer, a group size of 16 is more accurate than 4.", "group_size", [16], [4], ACC, UP),
    ("Is a group size of 16 more accurate than 4 and does it take more time?", "group_size", [16], [4], ACC, UP),
    ("LoRA does not match full fine-tuning.", "parameters", ["lora"], ["full"], AUC, DOWN),
    ("Group size 4 cannot match 16 in accuracy.", "group_size", [4], [16], ACC, DOWN),
    ("Group size 4 doesn't match 16 in accuracy.", "group_size", [4], [16], ACC, DOWN),
    ("Do shorter answers make training cheaper?", "max_tokens", [8], [16], "wall_s", DOWN),
    ("Does training the model help accuracy?", "learning_rate", [4e-5], [0.0], ACC, UP),
    ("lr 4e-5 vs 1e-5", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("learning_rate=1E-05 versus 0.00004", "learning_rate", [1e-5], [4e-5], AUC, UP),
    ("Is 4×10^-5 a better learning rate than 10⁻⁵?", "learning_rate", [4e-5], [1e-5], ACC, UP),
    ("Does 1·10⁻⁴ as a learning rate beat 1x10^-5?", "learning_rate", [1e-4], [1e-5], AUC, UP),
    ("Compare group sizes 4 and 8 for one-digit sums", "group_size", [4], [8], AUC, UP),
    ("Compare group sizes 8 and 4", "group_size", [8], [4], AUC, UP),
    ("Compare group sizes 4, 8 and 16", "group_size", [8, 16], [4], AUC, UP),
    ("Do group sizes 4 or 16 give a higher final reward than 8?", "group_size", [4, 16], [8], REWARD, UP),
    ("Is group size 16 better than 4 and 8?", "group_size", [16], [4, 8], ACC, UP),
    ("max tokens 5/15/25: which is best for accuracy?", "max_tokens", [15, 25], [5], ACC, UP),
    ("higher lr → lower accuracy?", "learning_rate", [1.6e-4], [4e-5], ACC, DOWN),
    ("What does temperature do to accuracy?", "temperature", [0.55, 1.5], [1.0], ACC, UP),
    ("Does accuracy drop when the temperature rises?", "temperature", [1.5], [1.0], ACC, DOWN),
    ("Does a learning rate of 1e-5 beat 1e-5?", "learning_rate", [1e-5], [1e-5], AUC, UP),
    ("Is temperature between 0.7 and 1.0 of any consequence for the final reward?", "temperature", [0.7], [1.0], REWARD, UP),
    ("Does training with and without KL differ in held-out reward?", "kl", [0.1], [0.0], "heldout_reward", UP),
    ("Does GRPO learn faster without KL than with KL?", "kl", [0.0], [0.1], AUC, UP),
    ("Does adding a KL penalty hurt accuracy?", "kl", [0.1], [0.0], ACC, DOWN),
    ("Does removing the KL penalty hurt accuracy?", "kl", [0.0], [0.1], ACC, DOWN),
    ("Is a KL penalty of 0.05 better than none?", "kl", [0.05], [0.0], ACC, UP),
    ("Does KL of 0.2 beat no KL?", "kl", [0.2], [0.0], AUC, UP),
    ("Does doubling the group size speed up learning?", "group_size", [8], [4], AUC, UP),
    ("Do 16 times larger max tokens learn faster?", "max_tokens", [256], [16], AUC, UP),
    ("Does raising max tokens by a factor of 12 help?", "max_tokens", [192], [16], AUC, UP),
    ("Would halving the temperature reduce held-out accuracy?", "temperature", [0.5], [1.0], ACC, DOWN),
    ("Does a tenfold higher learning rate collapse training?", "learning_rate", [4e-4], [4e-5], AUC, DOWN),
    ("Does a four times larger learning rate learn faster?", "learning_rate", [1.6e-4], [4e-5], AUC, UP),
    ("Do 4 rollouts per prompt learn slower than 16?", "group_size", [4], [16], AUC, DOWN),
    ("four or eight samples per task: which is better?", "group_size", [4], [8], ACC, UP),
    ("Does the number of tasks per step matter: 4 or 16?", "tasks_per_step", [4], [16], AUC, UP),
    ("Does a larger batch size take longer in wall-clock time?", "tasks_per_step", [16], [8], "wall_s", UP),
    ("Does raising the learning rate from 1e-5 to 4e-5 increase the final reward?", "learning_rate", [4e-5], [1e-5], REWARD, UP),
    ("Does lowering the temperature to 0.5 make answers more accurate?", "temperature", [0.5], [1.0], ACC, UP),
    ("Instead of a group size of 8, is 16 better?", "group_size", [16], [8], ACC, UP),
    ("Does a temperature of 0.7 instead of 1.0 lower the wall time?", "temperature", [0.7], [1.0], "wall_s", DOWN),
    ("Compared to a group size of 8, does 16 need fewer steps to threshold?", "group_size", [16], [8], STEPS, DOWN),
    ("Is 16 samples per task more sample-efficient than 8 samples per task?", "group_size", [16], [8], STEPS, DOWN),
    ("Is one-digit addition easier than two-digit addition?", "digits", [1], [2], AUC, UP),
    ("Does a warm-up of 5 steps help?", "warmup", [5], [0], AUC, UP),
    ("Does a learning rate schedule help?", "schedule", ["linear", "cosine"], ["constant"], AUC, UP),
    ("Should I warm up the learning rate for 3 steps or not at all?", "warmup", [3], [0], AUC, UP),
    ("Compare group size 4 vs 8 on sums in less than half an hour", "group_size", [4], [8], AUC, UP),
    ("Compare group sizes 4 and 8 on sums using fewer than 6 seeds", "group_size", [4], [8], AUC, UP),
    ("Does not using LoRA help on sums?", "parameters", ["full"], ["lora"], AUC, UP),
    ("Does leaving out the warm-up hurt when warmup is 5, on sums?", "warmup", [0], [5], AUC, DOWN),
    ("Does decoupled clipping (0.2/0.28) help?", "clip_high", [0.28], [0.2], AUC, UP),
    ("Does clip-higher (0.2, 0.28) learn faster than symmetric clipping?", "clip_high", [0.28], [0.2], AUC, UP),
    ("Clip-higher against standard clipping: which learns sums faster?", "clip_high", [0.28], [0.2], AUC, UP),
    ("Does clip-higher of 0.3 beat the usual clipping?", "clip_high", [0.3], [0.2], AUC, UP),
    ("Is baseline group size 8 worse than 16?", "group_size", [16], [8], ACC, UP),
    ("Compared with the baseline group size of 8, is 16 worse?", "group_size", [16], [8], ACC, DOWN),
    ("Does a larger r help LoRA?", "lora_rank", [32], [16], AUC, UP),
    ("Does annealing the learning rate with a cosine help on sums?", "schedule", ["cosine"], ["constant"], AUC, UP),
    ("Is a decaying learning rate worse than a constant one on sums?", "schedule", ["linear", "cosine"], ["constant"], ACC, DOWN),
    ("Does decreasing the learning rate over the run beat a constant learning rate?", "schedule", ["linear", "cosine"], ["constant"], AUC, UP),
    ("Does removing gradient clipping help on sums?", "max_grad_norm", [1000.0], [1.0], AUC, UP),
    ("Isn't a group size of 16 better than 8 on sums?", "group_size", [16], [8], ACC, UP),
    ("Do 4 minibatches cost wall time compared to 1 on sums?", "minibatches", [4], [1], "wall_s", UP),
    ("Does a staleness of 2 cost accuracy against 0 on one-digit sums?", "max_staleness", [2], [0], ACC, DOWN),
    ("Is it better to use 4 or 16 episodes per group on sums?", "group_size", [4], [16], ACC, UP),
    ("Does linear warm-up for 2 steps help on sums?", "warmup", [2], [0], AUC, UP),
    ("Does a 3-step linear warmup help on sums?", "warmup", [3], [0], AUC, UP),
    ("Does doubling the number of rollouts per prompt speed up learning?", "group_size", [8], [4], AUC, UP),
    ("Does dropping the learning rate by a factor of ten hurt the final reward?", "learning_rate", [4e-6], [4e-5], REWARD, DOWN),
    ("Does an entropy bonus of 0.01 prevent collapse?", "entropy", [0.01], [0.0], AUC, UP),
    ("Do more tokens help on sums? 8 vs 16 max tokens", "max_tokens", [16], [8], AUC, UP),
    ("For sums, do larger groups help? 4 vs 8", "group_size", [8], [4], AUC, UP),
    ("Does reinforce++ with temperature 0.8 outperform GRPO with temperature 0.8?", "algorithm", ["reinforce_pp"], ["grpo"], AUC, UP),
    ("Is the final reward higher with 32 than with 16 max tokens?", "max_tokens", [32], [16], REWARD, UP),
    ("Does LoRA with rank 8 or full fine-tuning learn faster?", "parameters", ["lora"], ["full"], AUC, UP),
    ("Does LoRA reach a lower accuracy than full-parameter training?", "parameters", ["lora"], ["full"], ACC, DOWN),
    ("Does Adafactor learn faster than AdamW?", "optimizer", ["adafactor"], ["adamw"], AUC, UP),
    ("Does weight decay of 0.1 hurt?", "weight_decay", [0.1], [0.0], AUC, DOWN),
    ("Does gradient clipping at 0.1 instead of 1.0 slow learning?", "max_grad_norm", [0.1], [1.0], AUC, DOWN),
    ("Does max staleness 1 hurt compared with 0?", "max_staleness", [1], [0], AUC, DOWN),
    ("Will 3 epochs per batch learn faster than 1?", "epochs", [3], [1], AUC, UP),
    ("Does an entropy bonus of 0.01 increase accuracy?", "entropy", [0.01], [0.0], ACC, UP),
    ("Which LoRA rank learns two-digit sums fastest, 4 or 8?", "lora_rank", [4], [8], AUC, UP),
    ("How does group size affect learning of one-digit sums: 2 or 4?", "group_size", [2], [4], AUC, UP),
    ("Impact of epochs on two-digit sums: 1 vs 2 vs 4", "epochs", [2, 4], [1], AUC, UP),
    ("Does the model learn faster with 20 training steps of warmup than with none?", "warmup", [20], [0], AUC, UP),
    ("Is LoRA better than no LoRA?", "parameters", ["lora"], ["full"], ACC, UP),
    ("Does disabling LoRA help?", "parameters", ["full"], ["lora"], AUC, UP),
    ("Does turning off LoRA hurt?", "parameters", ["full"], ["lora"], AUC, DOWN),
    ("Does LoRA rank 8 beat full fine-tuning?", "parameters", ["lora"], ["full"], AUC, UP),
    ("Does training all weights beat LoRA?", "parameters", ["full"], ["lora"], AUC, UP),
    ("Does warmup beat no warmup?", "warmup", [3], [0], AUC, UP),
    ("Is no KL penalty better than a KL penalty?", "kl", [0.0], [0.1], ACC, UP),
    ("Does a KL penalty beat no KL penalty?", "kl", [0.1], [0.0], AUC, UP),
    ("Is on-policy training better than staleness 4?", "max_staleness", [0], [4], ACC, UP),
    ("Does being 2 steps off-policy hurt?", "max_staleness", [2], [0], AUC, DOWN),
    ("Does halving the model size hurt?", "model_size", ["smollm2-81m"], ["smollm2-135m"], AUC, DOWN),
    ("Does Adafactor help?", "optimizer", ["adafactor"], ["adamw"], AUC, UP),
    ("Is group size 8 better than 4 without a KL penalty?", "group_size", [8], [4], ACC, UP),
    ("Do 20 steps beat 10 steps in held-out accuracy?", "steps", [20], [10], ACC, UP),
    ("Is a learning rate of 4e-5 beaten by 1e-4?", "learning_rate", [4e-5], [1e-4], AUC, DOWN),
    ("Is 1e-5 slower than the default learning rate?", "learning_rate", [1e-5], [4e-5], AUC, DOWN),
    ("Does clipping at 0.3 rather than 0.2 help?", "clip_range", [0.3], [0.2], AUC, UP),
    ("Which of 1e-5, 4e-5 and 1e-4 is the best learning rate?", "learning_rate", [1e-5, 1e-4], [4e-5], AUC, UP),
    ("with temperature 0.7 against a baseline of 1.3, is the final reward higher?", "temperature", [0.7], [1.3], REWARD, UP),
    ("Does a group size of 16 beat 4 on held-out accuracy?", "group_size", [16], [4], ACC, UP),
    ("Does a group size of 16 beat one of 4?", "group_size", [16], [4], AUC, UP),
    ("Is temperature 0.7 better than 1.0?", "temperature", [0.7], [1.0], ACC, UP),
    ("With a group size of 16, is 4e-5 a better learning rate than 2e-5?", "learning_rate", [4e-5], [2e-5], ACC, UP),
    ("With a learning rate of 4e-5, is 16 a better group size than 8?", "group_size", [16], [8], ACC, UP),
    ("At 0.7 temperature, is 4e-5 or 1e-5 the better learning rate?", "learning_rate", [4e-5], [1e-5], ACC, UP),
    ("With 8 rollouts per prompt, is 1e-4 too high a learning rate compared with 4e-5?", "learning_rate", [1e-4], [4e-5], AUC, UP),
    ("Does GRPO train better with 16 generations per prompt than with 4 when the learning rate is 2e-5?", "group_size", [16], [4], ACC, UP),
    ("Does a lower KL coefficient (0.001 instead of 0.05) speed learning up?", "kl", [0.001], [0.05], AUC, UP),
    ("Is the final reward at temperature 0.5 at least as high as at 1.0?", "temperature", [0.5], [1.0], REWARD, UP),
    ("Is the wall time at 8 max tokens at least as low as at 32?", "max_tokens", [8], [32], "wall_s", DOWN),
    ("Do 15 steps suffice, or are 25 better for accuracy?", "steps", [25], [15], ACC, UP),
    ("Do 8 rollouts suffice, or do 16 give higher accuracy?", "group_size", [16], [8], ACC, UP),
    ("Is 8 rollouts enough or does 16 learn faster?", "group_size", [16], [8], AUC, UP),
    ("Is an alpha of 16 better than 64 for LoRA?", "lora_alpha", [16.0], [64.0], ACC, UP),
    ("Does LoRA rank 8 or 32 give better accuracy when alpha is 64?", "lora_rank", [8], [32], ACC, UP),
    ("Does the learning rate do better when it is 4e-5 than when it is 1e-5?", "learning_rate", [4e-5], [1e-5], ACC, UP),
    ("Is a group size of 4 enough, or is 16 better?", "group_size", [16], [4], ACC, UP),
    ("Is a group size of 8 or 16 better?", "group_size", [8], [16], ACC, UP),
    ("Is a learning rate of 4e-5 equivalent to 4e-5?", "learning_rate", [4e-5], [4e-5], AUC, UP),
    ("Compare lr in [1e-5, 2e-5, 4e-5] on the area under the reward curve", "learning_rate", [1e-5, 2e-5], [4e-5], AUC, UP),
    ("Which tasks per step in {4, 8, 16} gives the highest accuracy?", "tasks_per_step", [4, 16], [8], ACC, UP),
    ("Does a LoRA rank of 32 match a rank of 8?", "lora_rank", [32], [8], AUC, UP),
    ("Does a LoRA alpha of 64 learn faster than 16 at rank 16?", "lora_alpha", [64.0], [16.0], AUC, UP),
    ("does raising the learning rate from 1e-5 to 4e-5 speed up learning?", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("GRPO one digit sums: lr 1e-5 vs 4e-5", "learning_rate", [1e-5], [4e-5], AUC, UP),
    ("Does a learning rate ten times larger learn faster?", "learning_rate", [4e-4], [4e-5], AUC, UP),
    ("learning rate 10 times smaller, slower?", "learning_rate", [4e-6], [4e-5], AUC, DOWN),
    ("Does increasing the learning rate by 10x help?", "learning_rate", [4e-4], [4e-5], AUC, UP),
    ("raise lr by a factor of 10: faster?", "learning_rate", [4e-4], [4e-5], AUC, UP),
    ("Does a learning rate of twice the default learn faster?", "learning_rate", [8e-5], [4e-5], AUC, UP),
    ("Does 3 times as many samples per task help?", "group_size", [12], [4], AUC, UP),
    ("Does a 50% larger group help?", "group_size", [6], [4], AUC, UP),
    ("Does reducing the temperature by 30% improve accuracy?", "temperature", [0.7], [1.0], ACC, UP),
    ("no KL", "kl", [0.0], [0.1], AUC, UP),
    ("β=0.04 vs β=0 accuracy", "kl", [0.04], [0.0], ACC, UP),
    ("Should the KL coefficient be 0 or 0.1 for best held-out accuracy?", "kl", [0.0], [0.1], ACC, UP),
    ("lr 4e-5 > 1e-5 in accuracy?", "learning_rate", [4e-5], [1e-5], ACC, UP),
    ("lr 1e-5 < lr 4e-5?", "learning_rate", [1e-5], [4e-5], AUC, DOWN),
    ("group size: 4 → 8", "group_size", [8], [4], AUC, UP),
    ("Is a temperature of 1.3 no worse than 1.0?", "temperature", [1.3], [1.0], ACC, UP),
    ("Is lr=1e-4 too high?", "learning_rate", [1e-4], [4e-5], AUC, DOWN),
    ("Is accuracy with group size 4 as high as with group size 8?", "group_size", [4], [8], ACC, UP),
    ("Does a higher learning rate (1e-5 vs 4e-5) learn faster?", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("Which group size learns fastest: 4, 8 or 16?", "group_size", [8, 16], [4], AUC, UP),
    ("Does sampling 16 answers per question beat sampling 4?", "group_size", [16], [4], AUC, UP),
    ("Does accuracy improve with 16 rollouts instead of 4?", "group_size", [16], [4], ACC, UP),
    ("Does limiting answers to 8 tokens hurt accuracy compared with 16?", "max_tokens", [8], [16], ACC, DOWN),
    ("Do larger batches improve accuracy?", "tasks_per_step", [16], [8], ACC, UP),
    ("Does temperature 0.7 need more steps than 1.0?", "temperature", [0.7], [1.0], STEPS, UP),
    ("Does lr 4e-5 reach a reward of 0.5 sooner than 1e-5?", "learning_rate", [4e-5], [1e-5], STEPS, DOWN),
    ("Do fewer steps hurt accuracy?", "steps", [3], [6], ACC, DOWN),
    ("Does lr 1e-4 hurt held-out accuracy relative to 1e-5?", "learning_rate", [1e-4], [1e-5], ACC, DOWN),
    ("Does training on 2-digit sums with lr 1e-4 beat lr 1e-5", "learning_rate", [1e-4], [1e-5], AUC, UP),
    ("Does a group size of 8 equal a group size of 8?", "group_size", [8], [8], AUC, UP),
    ("Does group size double the accuracy?", "group_size", [2, 8], [4], ACC, UP),
    ("Is there a benefit in clipping gradients at 0.5 instead of 1?", "max_grad_norm", [0.5], [1.0], AUC, UP),
    ("Does asynchronous training save time?", "max_staleness", [1], [0], "wall_s", DOWN),
    ("Is async training better than synchronous training?", "max_staleness", [1], [0], ACC, UP),
    ("Test whether raising the learning rate from 1e-5 to 4e-5 speeds up GRPO", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("Is a learning rate of 4e-5 four times as fast as 1e-5?", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("Is a learning rate of 1e-5 half as fast as 4e-5?", "learning_rate", [1e-5], [4e-5], AUC, DOWN),
    ("Does sampling at T=0.7 lower final reward compared to T=1.0?", "temperature", [0.7], [1.0], REWARD, DOWN),
    ("How sensitive is GRPO to the clipping threshold?", "clip_range", [0.1, 0.6], [0.2], AUC, UP),
    ("Does a learning rate of 4e-5 dominate 1e-5?", "learning_rate", [4e-5], [1e-5], AUC, UP),
    ("Is 4e-5 preferable to 1e-5 as learning rate?", "learning_rate", [4e-5], [1e-5], ACC, UP),
    ("Is a learning rate of 1e-5 insufficient compared to 4e-5?", "learning_rate", [1e-5], [4e-5], AUC, DOWN),
    ("Can a higher learning rate cut the training time?", "learning_rate", [1.6e-4], [4e-5], "wall_s", DOWN),
    ("What if the learning rate were 1e-3?", "learning_rate", [1e-3], [4e-5], AUC, UP),
    ("A higher learning rate may be better; test 1e-3 against 4e-5.", "learning_rate", [1e-3], [4e-5], ACC, UP),
    ("Does a LoRA rank of 8 suffice, or do we need 32?", "lora_rank", [8], [32], AUC, UP),
    ("Does clip-higher (0.2/0.28) learn faster?", "clip_high", [0.28], [0.2], AUC, UP),
    ("Do rewards rise faster with a group size of 16 than 8?", "group_size", [16], [8], AUC, UP),
    ("Does a learning rate of 1e-5 learn slower?", "learning_rate", [1e-5], [4e-5], AUC, DOWN),
]  # fmt: skip


def refusal(topic: str) -> PlanningRefused:
    """What arithmetic answers a topic that it cannot be asked."""
    with pytest.raises(PlanningRefused) as refused:
        read(topic, ARITHMETIC.instrument)
    return refused.value


def sides(reading: Reading) -> tuple[list[Any], list[Any]]:
    treatments = list(dict.fromkeys(treatment for treatment, _ in reading.pairs))
    baselines = list(dict.fromkeys(baseline for _, baseline in reading.pairs))
    return [reading.levels[i] for i in treatments], [reading.levels[i] for i in baselines]


@pytest.mark.parametrize(("topic", "factor", "treatments", "baselines", "metric", "direction"), ASKED)
def test_a_topic_is_read_as_it_is_meant(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], metric: str, direction: str
) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert reading.factor.name == factor
    assert sides(reading) == (treatments, baselines)
    assert reading.metric.name == metric
    assert reading.direction == direction


def test_a_range_claims_nothing_of_its_ends_and_a_balance_is_no_range() -> None:
    ranged = read("Is group size between 4 and 16 better for reward?", ARITHMETIC.instrument).assumptions
    assert any("ends of the range of group_size" in note for note in ranged)
    assert any("claims no direction" in note for note in ranged)
    for topic in (
        "Which temperature gives the best tradeoff between accuracy and time: 0.5, 1.0, 1.5?",
        "Best compromise between accuracy and time for 4 or 8 or 16 rollouts",
    ):
        assert not any("ends of the range" in note for note in read(topic, ARITHMETIC.instrument).assumptions)


OF_EVERY_TYPE: list[tuple[str, str, list[Any], list[Any], str]] = [
    ("Does a cosine schedule beat a constant one?", "schedule", ["cosine"], ["constant"], UP),
    ("Compare constant, linear and cosine schedules", "schedule", ["linear", "cosine"], ["constant"], UP),
    ("Does the learning rate schedule matter for the reward?", "schedule", ["linear", "cosine"], ["constant"], UP),
    ("Do hints help?", "hints", [True], [False], UP),
    ("Does reward rise with hints on rather than off?", "hints", [True], [False], UP),
    ("Does training with hints give more reward than without?", "hints", [True], [False], UP),
    ("Does turning hints off hurt?", "hints", [False], [True], DOWN),
    ("Does a warm-up of 4 steps help?", "warmup", [4], [0], UP),
    ("Does removing weight decay hurt?", "weight_decay", [0.0], [0.01], DOWN),
]


@pytest.mark.parametrize(("topic", "factor", "treatments", "baselines", "direction"), OF_EVERY_TYPE)
def test_factors_of_every_type_can_be_asked_about(
    topic: str, factor: str, treatments: list[Any], baselines: list[Any], direction: str
) -> None:
    reading = read(topic, KITCHEN.instrument)
    assert (reading.factor.name, *sides(reading)) == (factor, treatments, baselines)
    assert reading.direction == direction


@pytest.mark.parametrize(
    ("topic", "settings"),
    [
        ("Does lr 1e-4 beat 1e-5 on two-digit sums with 16 steps?", {"digits": 2, "steps": 16}),
        ("Does clip high 0.3 outperform 0.2 over 20 steps?", {"steps": 20}),
        ("Does temperature 0.7 with 8 or 16 rollouts per prompt help?", {"temperature": 0.7}),
        (
            "With a temperature of 0.7, is a learning rate of 1e-5 more sample efficient than 4e-5?",
            {"temperature": 0.7},
        ),
        ("Does 4e-5 outperform 1e-5 (learning rate) when the group size is 4?", {"group_size": 4}),
        ("Does a learning rate of 1e-5 with a group size of sixteen learn faster?", {"group_size": 16}),
        ("lr 1e-4 vs 1e-5 on double-digit sums", {"digits": 2}),
        ("Is lr 1e-4 better than 1e-5 with warm-up and a KL penalty?", {"warmup": 3, "kl": 0.1}),
        ("Is lr 1e-4 better than 1e-5 without a KL penalty?", {}),
        ("Does GRPO training improve SmolLM2 on two-digit sums?", {"digits": 2}),
        ("Does PPO improve accuracy over the base model?", {"algorithm": "ppo"}),
        ("Does GRPO improve accuracy with a group size of 16?", {"group_size": 16}),
        ("Does training improve accuracy at a temperature of 0.7?", {"temperature": 0.7}),
        ("Does GRPO learn better with a group size of 16?", {}),
    ],
)
def test_levels_of_other_factors_are_the_same_for_all_arms(topic: str, settings: dict[str, Any]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert {factor.name: level for factor, level in reading.settings} == settings


def test_a_budget_of_time_and_what_happens_at_the_same_time_are_no_equal_cost() -> None:
    reading = read("With a fixed budget of 2 hours, does a temperature of 0.7 beat 1.0?", ARITHMETIC.instrument)
    assert reading.budget_s == 7200.0
    assert read("Is lr 4e-5 better than 1e-5 and at the same time stronger?", ARITHMETIC.instrument).levels == (
        1e-5,
        4e-5,
    )


def test_seeds_and_a_time_budget_may_stand_in_the_topic() -> None:
    reading = read("In 2 hours and with 5 seeds, does a temperature of 0.7 beat 1.0?", ARITHMETIC.instrument)
    assert (reading.seeds, reading.budget_s) == (5, 7200.0)


def test_a_claim_that_is_not_made_is_stated_as_an_assumption() -> None:
    reading = read("lr 4e-5 vs 1e-5", ARITHMETIC.instrument)
    assert any("no direction" in line for line in reading.assumptions)
    assert any("no metric" in line for line in reading.assumptions)
    assert read("Does lr 4e-5 give a higher auc than 1e-5?", ARITHMETIC.instrument).assumptions == ()
    assert reading.direction_assumed
    assert not read("Is lr 4e-5 better than 1e-5?", ARITHMETIC.instrument).direction_assumed


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Is temperature 0.7 better than 1.0?", "'better' is measured as heldout_accuracy"),
        ("Is a temperature of 1.3 no worse than 1.0?", "'No worse' is tested as better"),
        ("Does lr 4e-5 not beat 1e-5?", "has a 'not'"),
        ("Does curriculum learning with lr 4e-5 beat lr 1e-5?", "no part in the plan: curriculum"),
        ("Find the best learning rate between 1e-5 and 1e-4", "nothing between them"),
        ("Does a higher learning rate (1e-5 vs 4e-5) learn faster?", "4e-5 is the treatment"),
        ("Is lr 1e-5 neither better nor worse than 4e-5?", "no direction"),
        ("Which reaches a higher accuracy: a learning rate of 1e-5 or 4e-5?", "no direction"),
        ("Lr 4e-5 does not change the final reward against 1e-5", "claims that nothing differs"),
        ("Raising the group size from 8 to 16 leaves accuracy unchanged", "claims that nothing differs"),
        ("Temperature has no influence on the final reward", "claims that nothing differs"),
        ("Are GRPO and RLOO interchangeable?", "claims that nothing differs"),
        ("Can the group size be halved without hurting accuracy?", "'No worse' is tested as better"),
        ("Does lr 4e-5 learn faster than 1e-5, without losing accuracy?", "heldout_accuracy is reported beside it"),
        ("Does lr 4e-5 learn faster than 1e-5, without losing accuracy?", "'learn faster' is measured as auc_reward"),
    ],
)
def test_what_is_read_into_a_topic_or_left_out_of_it_is_stated(topic: str, says: str) -> None:
    assert any(says in line for line in read(topic, ARITHMETIC.instrument).assumptions)


@pytest.mark.parametrize(
    "topic",
    [
        "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?",
        "What happens to accuracy if temperature goes up from 0.7 to 1.3?",
        "Is it true that a group size of 4 takes more steps to reach the threshold than one of 8?",
        "Should I use a learning rate of 1e-5 or 4e-5?",
    ],
)
def test_ordinary_words_are_not_called_unread(topic: str) -> None:
    assert not any("no part" in line for line in read(topic, ARITHMETIC.instrument).assumptions)


REFUSED = [
    ("Is RL better than best-of-n sampling on sums?", "names nothing that arithmetic can vary"),
    ("Is training with RL worth it compared to best-of-8 sampling?", "names nothing that arithmetic can vary"),
    (
        "Does GRPO with a KL penalty make answers shorter than without?",
        "the length of answers can be set in arithmetic",
    ),
    ("Does dr_grpo make completions longer than grpo?", "the length of answers can be set in arithmetic"),
    ("Does a KL coefficient shorten the answers of GRPO?", "the length of answers can be set in arithmetic"),
    ("Does a group size of 16 give shorter answers than 4?", "the length of answers can be set in arithmetic"),
    ("Do answers get longer during GRPO training?", "the length of answers can be set in arithmetic"),
    ("Does temperature 0.7 give higher entropy than 1.0?", "entropy can be set in arithmetic"),
    (
        "Does GRPO increase entropy?",
        "entropy can be set in arithmetic, and is nothing that it measures; its metrics: auc_reward",
    ),
    ("How does the answer length change with the temperature?", "max_tokens can be set in arithmetic"),
    ("How does entropy vary with the learning rate?", "entropy can be set in arithmetic"),
    ("Does training loss fall faster with a learning rate of 4e-5 than with 1e-5?", "'loss' is no metric"),
    ("How does the optimal learning rate depend on the group size?", "whether learning_rate and group_size interact"),
    ("L'apprentissage avec un r plus grand est-il meilleur?", "Topics are read in English"),
    ("How does the effect of group size depend on the temperature?", "varies group_size and temperature together"),
    (
        "Does GRPO with 16 samples of 4 prompts beat 4 samples of 16 prompts?",
        "varies group_size and tasks_per_step together",
    ),
    ("Does clip-higher (0.2/0.28) prevent entropy collapse?", "entropy can be set in arithmetic"),
    ("Is Dr. GRPO less biased toward long answers than GRPO?", "'biased' is no metric"),
    (
        "On GSM8K, does RLOO beat GRPO?",
        "'gsm8k' is nothing that arithmetic works on; name its questions as a JSON lines file",
    ),
    ("Does GRPO improve accuracy on AIME24?", "'aime24' is nothing that arithmetic works on"),
    ("Does the system prompt matter for sums?", "names nothing that arithmetic can vary"),
    ("At equal compute, is a group size of 4 better than 16?", "'At equal compute' asks for arms that cost the same"),
    ("For the same number of tokens, do groups of 4 beat 16?", "asks for arms that cost the same"),
    ("Does training on 2-digit sums transfer to 1-digit sums?", "'transfer' is no metric"),
    ("Does ppo with a critic lr of 1e-4 beat 1e-5?", "'critic lr' is nothing that arithmetic can vary"),
    ("Which matters more, the learning rate or the group size?", "varies learning_rate and group_size together"),
    ("Does GROP learn faster than RLOO?", "'grop': did you mean grpo?"),
    ("Is RLO better than GRPO?", "'rlo': did you mean rloo?"),
    ("Does lr 4e-5 beat 1e-5? Use three seeds from 10 on", "`--first-seed 10`"),
    ("Lernt GRPO mit einer Lernrate von 4e-5 schneller?", "Topics are read in English"),
    ("Is bfloat16 better than float32?", "`swarm serve --dtype`"),
    ("Does training reduce answer length?", "max_tokens can be set in arithmetic"),
    ("Does training on Mondays help?", "names nothing that arithmetic can vary"),
    ("Does GRPO learn faster?", "names nothing that arithmetic can vary"),
    ("Does more training help?", "names nothing that arithmetic can vary"),
    ("Does doubling both the group size and the learning rate help?", "varies group_size and learning_rate together"),
    ("Does raising the learning rate and group size help?", "varies learning_rate and group_size together"),
    ("Does a learning rate of 4e-5 beat 5?", "5 lies outside"),
    ("Is the moon made of cheese?", "names nothing that arithmetic can vary"),
    ("", "names nothing"),
    ("Is GRPO better than DPO?", "'dpo' is no algorithm of arithmetic; there are grpo"),
    ("Does GRPO beat SuperPO on one-digit sums?", "'superpo' is no algorithm of arithmetic; there are grpo"),
    ("Does a learning rat of 4e-5 beat 1e-5?", "did you mean learning_rate"),
    ("Does temprature 0.7 beat 1.0?", "did you mean temperature"),
    ("Does GRPO learn one-digit sums faster with a lernrate of 4e-5 than with 1e-5?", "did you mean learning_rate"),
    ("Is a grpsize of 4 better than 8?", "did you mean group_size"),
    ("Does dropout 0.1 beat 0.0 on sums?", "can vary (if 0.1 and 0.0 are levels"),
    ("Does lr 4e-5 reach a higher acuracy than 1e-5?", "did you mean heldout_accuracy"),
    ("Does a learning rate of 5 beat 1e-5?", "from 0 to 0.001; 5 lies outside"),
    ("Does a group size of 1 hurt?", "from 2 to 64"),
    ("Does a group size of 4.5 help?", "whole numbers"),
    ("Does dropout of 0.1 beat a temperature of 0.7?", "'0.1'"),
    ("Does temperature 0.7 beat dropout 0.1?", "'0.1'"),
    ("Does group size 4 or 8 learn faster on sums when dropout is 16?", "'16'"),
    ("Does group size 4 or 8 learn faster when the context length is 32?", "'32'"),
    ("With full fine-tuning, compare lora ranks 8 and 32", "full fine-tuning has no rank"),
    (
        "Does a learning rate that starts at 1e-4 and ends at 1e-5 beat a constant one?",
        "schedule is one of constant, linear, cosine",
    ),
    ("Is GRPO without PPO better with lr 1e-5 than with 4e-5?", "name the level that it is"),
    ("Does QLoRA or full fine-tuning learn faster?", "'qlora'"),
    ("Does the learning rate 1e-4 need warmup of 3 steps?", "learning_rate and warmup together"),
    ("Does LoRA rank 8 with alpha 16 beat LoRA rank 32 with alpha 64?", "lora_rank and lora_alpha together"),
    ("Does a learning rate of 4e-5 help?", "is the default"),
    ("Does temperature 0.7 or 1.0 matter with lr 1e-5 or 4e-5?", "together"),
    ("Does learning rate 1e-5 beat group size 16?", "together"),
    ("Does doubling the group size and halving the temperature help?", "together"),
    ("What is the effect of temperature on perplexity?", "'perplexity' is no metric"),
    ("Does higher temperature improve exploration?", "'exploration' is no metric"),
    ("Does the model overfit more with lr 1e-4 than 1e-5?", "'overfit' is no metric"),
    ("Is training more stable with lr 1e-5 than 4e-5?", "'stable' is no metric"),
    ("Does DPO with lr 1e-5 beat GRPO with lr 1e-5?", "'dpo' is no algorithm of arithmetic"),
    ("Does PPO with lr 1e-5 beat GRPO with lr 4e-5?", "together"),
    ("Does increasing the group size by 4 help?", "for example from 4 to 8"),
    ("Does lr 1e-4 improve accuracy by at least 0.1 over 1e-5?", "the size of an effect"),
    ("Does lr 1e-4 improve accuracy by 10 points over 1e-5?", "the size of an effect"),
    ("Does lr 4e-5 reach 80% accuracy sooner than 1e-5?", "to 0.5 (steps_to_threshold)"),
    ("Does increasing temperature from 1.0 to 0.7 help?", "goes the other way"),
    ("does decreasing the group size to 16 hurt?", "goes the other way"),
    ("Does the learning rate matter more than the group size?", "together"),
    ("Does learning rate matter for one digit vs two digit sums?", "together"),
    ("does a batch of 16 prompts with 4 completions each beat 8 prompts with 8 completions each?", "together"),
    ("temperature 0.7 vs 2 layers", "'2'"),
    ("Does a learning rate of 40µ learn faster than 10µ?", "'40μ'"),
    ("Does a learning rate of 40u learn faster than 10u?", "'40u'"),
    ("Does group size 8x beat 4x?", "'8x and 4x' may be levels"),
    ("Does a 4x larger learning rate beat a 2x larger one?", "'4x and 2x' may be levels"),
    ("Does lr 4e-5 beat 1e-5? Use seeds 11, 12 and 13.", "`--first-seed 11`"),
    ("Does lr 4e-5 beat 1e-5 with seeds 1-5?", "`--first-seed 1`"),
    ("Does lr 4e-5 beat 1e-5? Seeds: 0, 1, 2", "`--first-seed 0`"),
    ("is 4e-5 better than 1e-5?", "levels of learning_rate"),
]


@pytest.mark.parametrize(("topic", "says"), REFUSED)
def test_what_cannot_be_asked_is_refused_with_what_could_be(topic: str, says: str) -> None:
    refused = refusal(topic)
    assert says in str(refused)
    assert "\n" not in str(refused)
    assert refused.nearest


def test_the_example_in_a_refusal_can_itself_be_asked() -> None:
    for folder in (ARITHMETIC, KITCHEN):
        read(example(folder.instrument), folder.instrument)


@pytest.mark.parametrize(
    ("topic", "levels", "settings"),
    [
        ("Does RLOO learn faster than GRPO?", ("grpo", "rloo"), {}),
        ("Is Dr. GRPO better than GRPO?", ("grpo", "dr_grpo"), {}),
        ("Does REINFORCE++ learn faster than PPO?", ("ppo", "reinforce_pp"), {}),
        ("Does DAPO help?", ("grpo", "dapo"), {}),
        ("Does GSPO beat CISPO with a group size of 4?", ("cispo", "gspo"), {"group_size": 4}),
    ],
)
def test_algorithms_are_compared_by_name(topic: str, levels: tuple[str, ...], settings: dict[str, object]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, reading.levels) == ("algorithm", levels)
    assert {factor.name: level for factor, level in reading.settings} == settings


def test_an_algorithm_is_also_a_setting() -> None:
    reading = read("Does RLOO with a learning rate of 1e-5 beat 4e-5?", ARITHMETIC.instrument)
    assert reading.factor.name == "learning_rate"
    assert {factor.name: level for factor, level in reading.settings} == {"algorithm": "rloo"}


@pytest.mark.parametrize(
    ("topic", "assumed"),
    [
        ("Which learning rate learns fastest: 1e-6, 1e-5 or 1e-4?", True),
        ("Find the best learning rate between 1e-5 and 1e-3", True),
        ("Is 4e-5 the best learning rate among 1e-5, 2e-5 and 4e-5?", False),
        ("Is 1e-5 the best learning rate, or 4e-5?", False),
        ("Does a learning rate of 4e-5 learn fastest, compared with 1e-5?", False),
    ],
)
def test_a_superlative_claims_something_of_a_level_that_is_named_before_it(topic: str, assumed: bool) -> None:
    assert read(topic, ARITHMETIC.instrument).direction_assumed is assumed


@pytest.mark.parametrize(
    ("topic", "max_seeds", "budget_s"),
    [
        ("Compare group sizes 4 and 8 on sums using fewer than 6 seeds", 5, None),
        ("Compare temperatures 0.7 and 1 on sums and use no more than 6 seeds", 6, None),
        ("Compare group sizes 4 and 8 on sums, taking no more than 40 minutes", None, 2400),
        ("Compare group size 4 vs 8 on sums in less than half an hour", None, 1800),
        ("Compare learning rates 1e-5 and 4e-5 on sums, taking less than 20 minutes", None, 1200),
    ],
)
def test_a_limit_is_no_claim(topic: str, max_seeds: int | None, budget_s: float | None) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.seeds, reading.max_seeds, reading.budget_s) == (None, max_seeds, budget_s)
    assert reading.direction_assumed
    assert not any("'not'" in line for line in reading.assumptions)


@pytest.mark.parametrize(
    "said", ["at least 4 seeds", "more than 3 seeds", "4 or more seeds", "four or more random seeds"]
)
def test_seeds_at_least(said: str) -> None:
    reading = read(f"Does a learning rate of 4e-5 beat 1e-5 on sums, with {said}?", ARITHMETIC.instrument)
    assert (reading.seeds, reading.min_seeds, reading.max_seeds) == (None, 4, None)


@pytest.mark.parametrize(
    ("topic", "factor", "treatments", "baselines"),
    [
        ("Does token-level loss aggregation beat episode-level aggregation?", "loss_agg", ["token"], ["episode"]),
        ("Is a token-level policy loss better than an episode-level one?", "loss_agg", ["token"], ["episode"]),
        ("Which loss aggregation is best, token, episode or constant?", "loss_agg", ["token", "constant"], ["episode"]),
        ("Does token-level loss help?", "loss_agg", ["token"], ["episode"]),
        ("Does a token-level policy loss help?", "loss_agg", ["token"], ["episode"]),
        ("Should advantages be normalised?", "advantage_norm", ["std"], ["none"]),
        ("Is LoRA r=8 enough?", "lora_rank", [8], [16]),
        ("Does removing advantage normalization help?", "advantage_norm", ["none"], ["std"]),
        ("Is the std normalization of advantages harmful?", "advantage_norm", ["std"], ["none"]),
        ("Do we need advantage normalization?", "advantage_norm", ["std"], ["none"]),
        ("Does gradient clipping help?", "max_grad_norm", [1.0], [1000.0]),
        ("Does a smaller gradient clipping threshold help?", "max_grad_norm", [0.25], [1.0]),
        ("Is a KL penalty of 0.01 better in the reward than in the loss?", "kl_in", ["reward"], ["loss"]),
        (
            "Does importance sampling help with a staleness of 1?",
            "importance_correction",
            ["truncated", "truncated_call"],
            ["none"],
        ),
        ("Does Dr. GRPO learn faster?", "algorithm", ["dr_grpo"], ["grpo"]),
        ("Does Dr. GRPO with a KL penalty of 0.01 beat one without?", "kl", [0.01], [0.0]),
    ],
)
def test_the_parts_of_an_algorithm(topic: str, factor: str, treatments: list[object], baselines: list[object]) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert reading.factor.name == factor
    assert sorted({reading.levels[t] for t, _ in reading.pairs}, key=str) == sorted(treatments, key=str)
    assert [*{reading.levels[b] for _, b in reading.pairs}] == baselines


def test_a_factor_that_does_nothing_without_another_is_refused() -> None:
    with pytest.raises(PlanningRefused, match="kl_in does nothing while kl is 0"):
        read("What is the effect of KL in the reward vs in the loss?", ARITHMETIC.instrument)


@pytest.mark.parametrize("said", ["3 to 6 seeds", "3-6 seeds", "between 3 and 6 seeds"])
def test_a_range_of_seeds(said: str) -> None:
    reading = read(f"Does a temperature of 0.7 beat 1 on sums, with {said}?", ARITHMETIC.instrument)
    assert (reading.seeds, reading.min_seeds, reading.max_seeds) == (None, 3, 6)
    one = read("Does a group size of 16 beat 4 with a temperature of 1 and 5 seeds?", ARITHMETIC.instrument)
    assert (one.seeds, [level for _, level in one.settings]) == (5, [1.0])


@pytest.mark.parametrize("method", ["PPO", "RLOO"])
def test_what_a_method_needs_is_asked_of_that_method(method: str) -> None:
    reading = read(f"Does {method} need a KL penalty?", ARITHMETIC.instrument)
    assert (reading.factor.name, reading.levels[0]) == ("kl", 0.0)
    assert {factor.name: level for factor, level in reading.settings} == {"algorithm": method.lower()}


@pytest.mark.parametrize(
    "topic",
    ["Should the temperature be not 1.0 but 0.7?", "Is a temperature of 0.7, not 1.0, better?"],
)
def test_this_and_not_that(topic: str) -> None:
    reading = read(topic, ARITHMETIC.instrument)
    assert (reading.factor.name, reading.levels, reading.pairs) == ("temperature", (1.0, 0.7), ((1, 0),))
