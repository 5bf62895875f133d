"""Load a trained policy into this process. The services do not use this module, which needs torch and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from sys import maxsize
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.errors import FieldError, first_line
from pipelinerl.prompts import answer_end, control_tokens, encoded_prompt
from pipelinerl.recipe.loading import recipe_from_data, recipe_of_run
from pipelinerl.run_dir import Checkpoint
from pipelinerl.tasks.source import Problem


class Policy:
    """A checkpoint's model, with prompts in the form of its task. Attributes: `path`, `version` (None if unknown), `name` such
    as `v20`, `task`, `model`, `tokenizer`, and the `temperature` and `max_tokens` that evaluations use."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint, or an adapter onto its base model. Prompts have the form of the first task of the run's
        recipe. Without a recipe, they use the chat template if there is one. Raises `FieldError` if the model does not load."""
        path, self.version = checkpoint.path, checkpoint.version
        self.path = path
        self.name = "policy" if self.version is None else f"v{self.version}"
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.tokenizer)
            model: Any = AutoModelForCausalLM.from_pretrained(path)
            self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        except Exception as error:  # a damaged file raises errors of safetensors, tokenizers or torch, with no common base
            raise FieldError("RUN", str(path), f"transformers cannot load it: {first_line(error)}") from error
        file, style = checkpoint.run / "recipe.yaml", "chat" if self.tokenizer.chat_template else "plain"
        usual = {"name": "none", "model": {"source": "path", "name": str(path)}, "sampling": {"max_tokens": 512}}
        usual["task"] = {"prompt_style": style}
        recipe = recipe_of_run(file) if file.is_file() else recipe_from_data(usual, str(path))
        share = next(iter(recipe.mixture.values()))
        self.max_tokens, self.temperature, self._stop = share.max_tokens, recipe.evaluation.temperature, recipe.sampling.stop
        self.task = share.task.model_copy(update={"prompt_style": style}) if share.task.is_episodic else share.task
        named = self.model.generation_config.eos_token_id
        of_chat = answer_end(self.tokenizer) if self.task.prompt_style == "chat" else None
        self._ends = {self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named]), of_chat}
        self._ends |= {*recipe.sampling.stop_token_ids}

    def prompt(self, question: str, messages: list[dict[str, str]] | None = None) -> list[int]:
        """Return the tokens of a question, or of `messages` that end with it, in the form that training uses."""
        problem = Problem(question, messages=tuple(messages or ()))
        _, tokens = encoded_prompt(problem, self.task, self.tokenizer, control_tokens(self.tokenizer))
        return tokens

    def generate(self, questions: list[str] | str, max_tokens: int = 64, temperature: float = 0.0) -> list[str]:
        """Return one completion for each question; a single text counts as a list. A temperature of 0 is greedy."""
        asked = [questions] if isinstance(questions, str) else questions
        return ["".join(self.stream(self.prompt(question), max_tokens, temperature)) for question in asked]

    def stream(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[str]:
        """Yield the completion of a prompt in pieces, without special tokens and stop texts. Raises `FieldError` if the prompt
        fills the model's context, or the weights give NaN."""
        return pieces(self._texts(prompt, max_tokens, temperature), self._stop)

    @torch.inference_mode()
    def _texts(self, prompt: list[int], max_tokens: int, temperature: float) -> Iterator[str]:
        """Yield the completion so far after each token, sampled as in training, without the model's own top_p and top_k."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or maxsize
        if len(prompt) >= context:
            raise FieldError("prompt", f"{len(prompt)} tokens", f"the model's context has {context}; shorten the prompt")
        tokens, cache, inputs = list[int](), None, torch.tensor([prompt], device=self.model.device)
        while len(tokens) < min(max_tokens, context - len(prompt)):
            output = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = output.logits[0, -1].float(), output.past_key_values
            if logits.isnan().any():
                raise FieldError("RUN", str(self.path), "its weights give no numbers (NaN); use an earlier version")
            chances = (logits / max(temperature, 1e-5)).softmax(-1)  # a smaller divisor could make the logits overflow
            inputs = (torch.multinomial(chances, 1) if temperature > 0 else logits.argmax()).view(1, 1)
            if int(inputs) in self._ends:
                return
            tokens.append(int(inputs))
            yield self.tokenizer.decode(tokens, skip_special_tokens=True)


def pieces(texts: Iterable[str], stops: list[str]) -> Iterator[str]:
    """Yield what each text appends to the previous text, up to the first stop text. No part of a stop text is yielded."""
    text, num_shown, held_back = "", 0, max(map(len, stops), default=1) - 1
    for text in texts:
        if found := [at for stop in stops if (at := text.find(stop)) >= 0]:
            text = text[: min(found)]
            break
        if len(text) - held_back > num_shown and not text.endswith("\ufffd"):  # U+FFFD: an incomplete character
            num_shown, begin = len(text) - held_back, num_shown
            yield text[begin:num_shown]
    yield text[num_shown:]
