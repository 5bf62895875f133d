"""One training run by TRL's GRPOTrainer, in TRL's environment: `python -m benchmarks.trl_run JOB.json`, started by versus_trl.

The job (`versus_trl.trl_job`) has the recipe, the initial model, and the recipe's own problems in their order. Rewards are the
verifier's functions, called in this process. The loss is the recipe's, smaller by the constant `loss_scale`: Adam does not see
it, and clipping and epsilon are scaled for it. What differs: TRL adds 1e-4 to a group's standard deviation instead of 1e-6,
trains on padded rows, and does not clip where our bound follows the length of completions. With several steps per generation,
a token of positive advantage whose importance weight exceeds `clamp` has no gradient, where ours has that of the truncated
weight; one of negative advantage counts in full, where ours is truncated.

Policies are saved every few steps; the clock stands still meanwhile. Imports nothing of ours that needs torch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from pipelinerl.recipe.fields import Recipe
from services.verifier.rewards.compose import make_reward
from services.verifier.rewards.item import RewardInput

LOSS_TYPES = {"batch": "dr_grpo", "sequence": "grpo", "token": "dapo"}
"""Of TRL, by `algorithm.normalization`."""
PAGE_TOKENS, PREFILL_TOKENS = 16, 512
"""Of continuous batching: tokens of a page of its cache, and of a forward pass at most unless there are more sequences."""


def trainer_settings(recipe: Recipe, job: dict[str, Any]) -> GRPOConfig:
    """TRL's settings for the recipe on CPU: no 16-bit products, no recomputed activations, figures kept in memory only."""
    trainer, algorithm, sampling = recipe.trainer, recipe.algorithm, recipe.sampling
    return GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=recipe.seed,
        shuffle_dataset=False,
        max_steps=trainer.steps,
        per_device_train_batch_size=trainer.batch_size // job["micro_batches"],
        gradient_accumulation_steps=job["micro_batches"],
        steps_per_generation=job["micro_batches"] * job["steps_per_generation"],
        num_generations=sampling.group_size,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        use_transformers_continuous_batching=job["continuous"],
        transformers_continuous_batching_config=cache_size(recipe, job["steps_per_generation"]),
        beta=0.0,
        loss_type=LOSS_TYPES[algorithm.normalization],
        scale_rewards="group" if algorithm.normalize_std else "none",
        epsilon=1.0,
        epsilon_high=algorithm.clamp - 1,
        learning_rate=trainer.learning_rate,
        max_grad_norm=(trainer.max_grad_norm or 0.0) / job["loss_scale"],  # 0: no clipping
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def cache_size(recipe: Recipe, steps_per_generation: int) -> dict[str, int]:
    """Of continuous batching: room for all sequences of a generation. Left to itself, it sizes cache and masks by the machine's
    memory, and fills them anew for each generation: minutes on CPU."""
    sequences = recipe.trainer.batch_size * steps_per_generation
    pages = math.ceil(recipe.model.max_context / PAGE_TOKENS)
    return {
        "page_size": PAGE_TOKENS,
        "num_blocks": sequences * pages,
        "max_batch_tokens": max(sequences, PREFILL_TOKENS),
        "max_requests_per_batch": sequences,
    }


def optimizer_of(model: PreTrainedModel, recipe: Recipe, job: dict[str, Any]) -> tuple[AdamW, LambdaLR]:
    """The recipe's AdamW, and its schedule as the job has it: learning rates by step."""
    trainer, rates = recipe.trainer, job["learning_rates"]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = AdamW(
        [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=trainer.learning_rate,
        betas=(trainer.beta1, trainer.beta2),
        eps=trainer.epsilon / job["loss_scale"],
        fused=True,
    )
    return optimizer, LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)] / trainer.learning_rate)


def reward_function(recipe: Recipe, end_token: int | None) -> Callable[..., list[float]]:
    """The recipe's reward as TRL calls one; `reference` is the data set's column."""
    reward = make_reward(recipe.reward, recipe.task)

    def score(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], reference: list[str], **_: Any
    ) -> list[float]:
        return [
            reward(
                RewardInput(
                    prompt=prompt,
                    completion=completion,
                    answer=reward.find_answer(completion),
                    reference=json.loads(about),
                    completion_tokens=len(token_ids),
                    max_tokens=recipe.sampling.max_tokens,
                    finish_reason="stop" if token_ids and token_ids[-1] == end_token else "length",
                    task=recipe.task.name,
                )
            ).value
            for prompt, completion, token_ids, about in zip(prompts, completions, completion_ids, reference, strict=True)
        ]

    return score


class PolicySaver(TrainerCallback):
    """Notes when each step ended, in seconds of training since its begin, and saves every `every` steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._began_at = 0.0
        self.ended_s: dict[int, float] = {}
        self.saving_s: dict[int, float] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **_: Any) -> None:
        step, now = state.global_step, time.perf_counter()
        self.ended_s[step] = now - self._began_at - sum(self.saving_s.values())
        if step % self._every == 0 or step == state.max_steps:
            model.save_pretrained(self._folder / f"step-{step}")
        self.saving_s[step] = time.perf_counter() - now


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    recipe, folder = Recipe.model_validate_json(job["recipe"]), Path(job["folder"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    texts = [problem["prompt"] for problem in job["problems"]]
    if tokenizer(text=texts)["input_ids"] != [problem["token_ids"] for problem in job["problems"]]:
        raise SystemExit("TRL's tokenizer gives the prompts other tokens than ours: the comparison would not be one")
    attention = "eager" if job["eager"] else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=recipe.model.dtype, attn_implementation=attention)
    saver = PolicySaver(folder, job["every"])
    trainer = GRPOTrainer(
        model,
        reward_function(recipe, tokenizer.eos_token_id),
        trainer_settings(recipe, job),
        train_dataset=Dataset.from_list([{key: one[key] for key in ("prompt", "reference")} for one in job["problems"]]),
        processing_class=tokenizer,
        callbacks=[saver],
        optimizers=optimizer_of(model, recipe, job),
    )
    trainer.remove_callback(PrinterCallback)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "grad_norm" in entry}
    steps, generated = [], {}
    for step, ended_s in saver.ended_s.items():
        entry = logged[step]
        if "reward" in entry:  # a step that generated, also for those after it
            generated = {"reward_mean": entry["reward"], "completion_tokens_mean": entry["completions/mean_length"]}
        grad_norm = entry["grad_norm"] * job["loss_scale"]
        times = {"time_s": round(ended_s, 4), "saving_s": saver.saving_s[step]}
        steps.append({"step": step, **times, "grad_norm": grad_norm, **generated})
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (folder / "steps.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
