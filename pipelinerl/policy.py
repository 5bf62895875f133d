"""Load a trained policy into this process. It needs torch and transformers, and the services do not use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from pipelinerl.errors import FieldError
from pipelinerl.prompts import control_tokens, encoded_prompt
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.run_dir import read_json, resumable
from pipelinerl.tasks.source import Problem

_INFO = "pipelinerl.json"


def checkpoint_of(folder: Path, version: int | None = None) -> Path:
    """Return the folder of a policy: `folder` if it is a checkpoint, else the checkpoint of a version (None: the newest) in
    the folder of a run. Raises `FieldError` if there is none."""
    if (folder / "config.json").is_file() and version is None:
        return folder
    found = {number: path.parents[1] for number, path in resumable(folder).items()}
    final = folder / "checkpoint"
    if (final / "config.json").is_file():
        found[int(read_json(final / _INFO).get("policy_version") or max(found, default=0))] = final
    if not found:
        raise FieldError("RUN", str(folder), "has no checkpoint yet; give a run that has one, or the folder of a checkpoint")
    if version is None:
        return found[max(found)]
    if version not in found:
        raise FieldError(
            "version",
            version,
            f"its checkpoint is not there (checkpoint.keep); use one of {', '.join(map(str, sorted(found)))}",
        )
    return found[version]


class Policy:
    """A checkpoint with the prompts of its task. Attributes: `path`, `version` (None if unknown), `model`, `tokenizer`."""

    def __init__(self, path: Path) -> None:
        """Load a checkpoint. Its task is the first one of the run's recipe; without a recipe, prompts are chats."""
        self.path, self.version = path, read_json(path / _INFO).get("policy_version")
        files = (folder / "recipe.yaml" for folder in path.resolve().parents[:2])
        recipe = next((recipe_of_run(file) for file in files if file.is_file()), None)
        task = next(iter(recipe.mixture.values())).task if recipe is not None else TaskConfig(prompt_style="chat")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.task = (
            task.model_copy(update={"prompt_style": "chat"}) if task.is_episodic and self.tokenizer.chat_template else task
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        self.model = model.to(device).eval()

    def prompt(self, question: str, messages: list[dict[str, str]] | None = None) -> list[int]:
        """Return the tokens of a question, or of a conversation that ends with it, as the policy saw them in training."""
        problem = Problem(question, messages=tuple(messages or ()))
        _, tokens = encoded_prompt(problem, self.task, self.tokenizer, control_tokens(self.tokenizer))
        return tokens

    def generate(self, questions: list[str], max_tokens: int = 64, temperature: float = 0.0) -> list[str]:
        """Return one completion for each question. A temperature of 0 is greedy."""
        return ["".join(self.stream(self.prompt(question), max_tokens, temperature)) for question in questions]

    def stream(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[str]:
        """Yield the completion of a prompt in pieces, without special tokens."""
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        tokens = torch.tensor([prompt], device=self.model.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        asked = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "max_new_tokens": max_tokens, **sampling}
        generating = Thread(target=self.model.generate, kwargs={**asked, "streamer": streamer}, daemon=True)
        generating.start()
        yield from streamer
        generating.join()
