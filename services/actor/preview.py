"""`python -m services.actor.preview`: show a recipe's prompts as its policy will see them, before a run loads any model.

Standard input is a JSON object with the keys `recipe`, `source` (the tokenizer's folder or GGUF file) and `problems` (one
problem for each problem set, by the set's path in the recipe). Standard output is a `rehearsal.Preview` as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from pipelinerl.episodes import tool_of
from pipelinerl.errors import FieldError
from pipelinerl.prompts import after_answer, answer_end, control_tokens, encoded_prompt, refusal, use_chat_template, written
from pipelinerl.recipe.fields import ModelConfig, Recipe, TaskConfig
from pipelinerl.recipe.model_folder import text_config
from pipelinerl.tasks.source import Problem, conversation
from services.actor.episodes.formats import Unrenderable, chat_format

_SHOWN = 160


def preview(recipe: Recipe, source: str, problems: dict[str, Problem]) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": [], "mistakes": [], "control": [], "special": [], "doubts": []}
    from transformers import AutoTokenizer

    model, folder, file = recipe.model, Path(source), {}
    if source.endswith(".gguf"):
        folder, file = folder.parent, {"gguf_file": folder.name}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code, **file)
    found["special"] = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    size = text_config(config).get("vocab_size") if (config := folder / "config.json").is_file() else None
    try:
        template = model.chat_template or tokenizer.chat_template
        if unread := unread_variables(template, model.chat_template_kwargs) if template else []:
            fix = f"the chat template never reads {', '.join(unread)}; correct the name, or leave it out"
            found["doubts"].append(("model.chat_template_kwargs", model.chat_template_kwargs, fix))
    except TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        found["mistakes"].append(("model.chat_template", template, f"is not valid Jinja{line}: {error}; correct it"))
        return found
    for place, problem in problems.items():
        share = recipe.sets_by_place[place]
        try:
            if not found["control"]:
                use_chat_template(tokenizer, model)
                found["control"] = sorted(control_tokens(tokenizer).texts)
            token_ids = _token_ids(problem, share.task, tokenizer, model)
            if size and (largest := max(token_ids, default=0)) >= size:
                token = tokenizer.convert_ids_to_tokens(largest)
                fix = f"prompts contain {token} (id {largest}), but vocab_size is {size:,}; use the model's own tokenizer"
                raise FieldError("model.name", model.name, fix)
        except FieldError as wrong:
            field = wrong.field if wrong.field.startswith("model.") else f"{place}{wrong.field}"
            found["mistakes"].append((field, wrong.value, wrong.fix))
        else:
            lines = "".join(f"\n    | {line}" for line in shown(token_ids, tokenizer).split("\n"))
            if share.task.prompt_style == "chat" and not share.task.tools:
                found["doubts"] += [
                    ("model.chat_template", model.chat_template or "the model's", fix)
                    for fix in template_doubts(problem, share.task, tokenizer)
                ]
            told = f"{f'{share.name}: ' if place else ''}{len(token_ids):,} tokens, special ones in ⟨⟩{lines}"
            found["rows"].append(("prompt", told))
    return found


def unread_variables(template: Any, names: Mapping[str, Any]) -> list[str]:
    """Return the `names` that no template reads. `template` is a string or a dictionary of strings. Raises `TemplateError`."""
    environment, read = Environment(extensions=["jinja2.ext.loopcontrols"]), set[str]()
    for text in template.values() if isinstance(template, dict) else (template,):
        without = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text)  # a tag that only transformers knows
        read |= meta.find_undeclared_variables(environment.parse(without))
    return [name for name in names if name not in read]


def template_doubts(problem: Problem, task: TaskConfig, tokenizer: Any) -> Iterator[str]:
    """Yield faults of the prompt that the chat template writes: it lacks a message, it ends with the text that ends an
    answer, or it contains a marker such as `<|x|>` that is not a token of the model."""
    messages = conversation(problem.messages or [{"role": "user", "content": problem.question}], task)
    text, known = written(tokenizer, messages), tokenizer.get_vocab()
    for message in messages:
        if message["content"].strip() not in text:
            yield f"leaves out the {message['role']} message, {message['content']!r:.60}; render all messages"
    end = ""
    with contextlib.suppress(TemplateError):  # a template may refuse such a conversation
        end = after_answer(tokenizer).strip()
    if end and text.rstrip().endswith(end):
        yield f"ends prompts with {end!r}, the end of an answer; begin an answer if add_generation_prompt is true"
    others = [one for one in re.findall(r"<[|｜][^<>\s]+[|｜]>", text) if one not in known]
    if others and not any(others[0] in message["content"] for message in messages):
        yield f"writes {others[0]}, which is not a token of this model; use the model's own template"


def _token_ids(problem: Problem, task: TaskConfig, tokenizer: Any, model: ModelConfig) -> list[int]:
    if not task.tools:
        if task.prompt_style == "chat":
            answer_end(tokenizer)
        return encoded_prompt(problem, task, tokenizer, control_tokens(tokenizer))[1]
    chat, names = chat_format(tokenizer, model), [path.split(":") for path in task.tools]
    tools = [dict(tool_of(getattr(importlib.import_module(module), name)).schema) for module, name in names]
    messages = chat.control.parted(conversation([{"role": "user", "content": problem.question}], task))
    try:
        return chat.render(messages, tools)
    except Unrenderable as error:
        raise refusal(problem, task, messages, error, lambda others: chat.render(others, tools)) from error


def shown(token_ids: list[int], tokenizer: Any) -> str:
    """Return the text of a prompt with the tokenizer's added tokens in ⟨⟩. The middle of a long prompt is left out."""
    added, left_out = tokenizer.added_tokens_decoder, len(token_ids) - 2 * _SHOWN
    texts = []
    for part in [token_ids] if left_out <= 0 else [token_ids[:_SHOWN], token_ids[-_SHOWN:]]:
        texts.append("")
        for is_added, run in itertools.groupby(part, added.__contains__):
            ids = list(run)
            texts[-1] += "".join(f"⟨{added[one].content}⟩" for one in ids) if is_added else tokenizer.decode(ids)
    return f"\n[... {left_out:,} tokens are not shown ...]\n".join(texts)


def main() -> int:
    asked = json.load(sys.stdin)
    recipe = Recipe.model_validate_json(json.dumps(asked["recipe"]))
    if not asked["source"].endswith(".gguf"):
        sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do not need it, and load five seconds sooner
    with contextlib.redirect_stdout(sys.stderr):
        found = preview(recipe, asked["source"], {place: Problem(**problem) for place, problem in asked["problems"].items()})
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
