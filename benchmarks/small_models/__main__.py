"""Makes the small models of `pipelinerl/models`: Llamas of up to a million parameters, each taught demonstrations of one task.

    python -m benchmarks.small_models            # all of them: about ten minutes on one core
    python -m benchmarks.small_models guess      # one of them

The models are files of the package, so that a run learns from its first second and starts from the same weights on every
machine. They are saved in bfloat16; a recipe loads them in its own `model.dtype`.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.small_models.demonstrations import DEMONSTRATIONS, PLAYERS, play_episode
from benchmarks.small_models.supervised import Demonstrated, Lessons, character_tokenizer, train
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.recipe.model_folder import SMALL_MODELS
from pipelinerl.tasks.source import Split, episode_seed, make_source

MILLION = {"hidden_size": 192, "num_heads": 6, "intermediate_size": 640}
MODELS = {
    "arithmetic": Lessons(128, **MILLION, steps=450),
    "repeated-addition": Lessons(
        576, **MILLION, careful=(0.3, 0.95), careful_in_lessons=1.0, lessons=0.88, steps=480, batch_size=16
    ),
    "code": Lessons(64, careful=(0.5,), steps=150),  # brackets set or left out, whatever the problem
    "guess": Lessons(64, careful=(0.3,), careful_in_lessons=0.3, steps=400),
    "calculator": Lessons(64, careful=(0.5,), careful_in_lessons=0.5, steps=600),
}
"""By name of the recipe whose task they are taught. With a call or without, a problem of `calculator` is shown equally often; a
guess of `guess` is any number that all answers so far allow, or, more often, that the last one allows."""


def make(name: str, folder: Path) -> None:
    lessons, task = MODELS[name], load_recipe(name).task
    assert task is not None
    characters, demonstrated = demonstrations(lessons, task)
    tokenizer = character_tokenizer(lessons.max_context, characters)
    llama = make_llama(lessons, tokenizer)
    train(llama, tokenizer, lessons, demonstrated, lambda step, loss: _say(name, step, lessons.steps, loss))
    llama.config.dtype = torch.bfloat16
    llama.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(name: str, step: int, steps: int, loss: float) -> None:
    if step % 10 == 0:
        print(f"{name}: step {step} of {steps}, loss {loss:.3f}", flush=True)


def demonstrations(lessons: Lessons, task: TaskConfig) -> tuple[str, Demonstrated]:
    """Return all characters that may occur, and what gives demonstrations without end."""
    if task.name in PLAYERS:
        player, indices = PLAYERS[task.name], itertools.count()

        def played(careful: Sequence[float], rng: random.Random) -> list[str]:
            return play_episode(player, task.config, episode_seed(lessons.seed, Split.TRAIN, next(indices)), careful, rng)

        return player.characters, played
    family, questions = DEMONSTRATIONS[task.name], demonstration_questions(lessons, task)

    def worked_out(careful: Sequence[float], rng: random.Random) -> list[str]:
        question = next(questions)
        return [question, family.demonstrate(question, careful, rng)]

    return family.characters, worked_out


def demonstration_questions(lessons: Lessons, task: TaskConfig) -> Iterator[str]:
    """Yield training questions without end, none of them in the held-out split."""
    source = make_source(task, lessons.seed)
    heldout = {source.problem(Split.HELDOUT, index).question for index in range(task.heldout_problems)}
    questions = (source.problem(Split.TRAIN, index).question for index in itertools.count())
    return (question for question in questions if question not in heldout)


def make_llama(lessons: Lessons, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights by `lessons.seed`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=lessons.hidden_size,
        num_hidden_layers=lessons.num_layers,
        num_attention_heads=lessons.num_heads,
        num_key_value_heads=lessons.num_heads,
        head_dim=lessons.head_dim,
        intermediate_size=lessons.intermediate_size,
        max_position_embeddings=lessons.max_context,
        tie_word_embeddings=False,
        initializer_range=lessons.initializer_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(lessons.seed)
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[*MODELS, []], help="models to make; all unless given")
    parser.add_argument("--threads", type=int, default=1, help="more do not help models this small")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.name or MODELS:
        make(name, SMALL_MODELS / name)


if __name__ == "__main__":
    main()
