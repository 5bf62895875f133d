"""Turn a problem into the tokens of a prompt with the recipe's chat template, so that no text becomes a control token.

A text from a row, a tool, an environment or an agent may spell a control token, such as `<|im_end|>`. Before the chat template
renders such a text, a mark is inserted into the spelled token. The tokenizer then encodes the parts before and after the mark
separately. A tokenizer is any object with the interface of Hugging Face's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ModelConfig, TaskConfig
from pipelinerl.recipe.loading import is_template, no_template_file
from pipelinerl.tasks.source import Problem, conversation

log = logging.getLogger(__name__)

_MARK = f"k{secrets.token_hex(12)}q"
"""Mark that is inserted where a text spells a control token. Nobody can guess it; JSON and templates leave it unchanged."""
_PREFIX = 3
"""Number of a control token's first characters that a search looks for, before it compares the whole token."""


def use_chat_template(tokenizer: Any, model: ModelConfig) -> None:
    """Set the recipe's chat template on the tokenizer, with `chat_template_kwargs` as defaults of its variables. Servers of
    checkpoints then need no further setting. Raises `FieldError` if `chat_template` is not a template, or if there
    is no template for the variables."""
    if model.chat_template:
        if not is_template(model.chat_template):
            raise no_template_file(model.chat_template)
        tokenizer.chat_template = model.chat_template
    if model.chat_template_kwargs:
        if not tokenizer.chat_template:
            fix = "the model has no chat template that could read them; name one with model.chat_template, or leave them out"
            raise FieldError("model.chat_template_kwargs", model.chat_template_kwargs, fix)
        # Jinja reads Python's literals, and drops the newline after a tag (trim_blocks), so the prompt begins as before.
        defaults = "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
            for name, value in model.chat_template_kwargs.items()
        )
        given = tokenizer.chat_template
        named = {name: defaults + text for name, text in given.items()} if isinstance(given, dict) else defaults + given
        tokenizer.chat_template = named


def written(tokenizer: Any, messages: list[Any], tools: list[Any] | None = None, *, begins_turn: bool = True) -> str:
    """Render messages with the chat template. Raises the template's errors."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use" if tools and "tool_use" in template else "default")
    # Pass the template, because an engine's tokenizer renders with copies of itself, which have the model's own template.
    arguments = {"chat_template": template, "tokenize": False, "add_generation_prompt": begins_turn}
    return str(tokenizer.apply_chat_template(messages, tools=tools or None, **arguments))


_ASK = {"role": "user", "content": "Question"}
_ANSWER = "Answer7"
"""Placeholder for an answer: a text that no template contains or trims."""
_ANSWERED = {"role": "assistant", "content": _ANSWER}


def after_answer(tokenizer: Any, *, asked_again: bool = False) -> str:
    """Return what the template writes after an answer, with a new question if `asked_again`. Raises the template's errors."""
    messages = [_ASK, _ANSWERED, *([_ASK] if asked_again else [])]
    return written(tokenizer, messages, begins_turn=False).rpartition(_ANSWER)[2]


class ControlTokens:
    """A tokenizer for prompts that lets no text become a control token, such as `<|im_end|>` of Qwen3.

    Control tokens are added tokens that are special, contain `|`, or enclose messages in the chat template, where tags such as
    `<think>` do not count. In the result of a tool, all added tokens are control tokens.

    `has_own_encoder`: True for gpt-oss, whose own encoder never reads added tokens in texts. `parted` then inserts no marks.
    """

    def __init__(self, tokenizer: Any, *, has_own_encoder: bool = False) -> None:
        self._tokenizer = tokenizer
        added = {} if has_own_encoder else tokenizer.added_tokens_decoder
        added = {token_id: (token.content, token.special) for token_id, token in added.items()}
        try:
            ids = tokenizer.encode(written(tokenizer, [_ASK, _ANSWERED, _ASK], begins_turn=False))
        except Exception:  # noqa: BLE001 - there is no template, or it refuses this conversation
            ids = []
        self._all = Spellings({text for text, _ in added.values()})
        # Tags such as <think> belong to answers, so texts may spell them. Tokens of roles contain a bar, unlike other tags.
        frame = {text for token_id, (text, _) in added.items() if token_id in ids and "think" not in text}
        self.texts = frame | {text for text, special in added.values() if special or "|" in text or "｜" in text}
        self._control = Spellings(self.texts)

    def parted(self, value: Any) -> Any:
        """Return `value` (messages, tools or a text) with `_MARK` inside each control token that its texts spell."""
        if isinstance(value, list | tuple):
            return [self.parted(item) for item in value]
        is_result = isinstance(value, Mapping) and value.get("role") == "tool"
        return (self._all if is_result else self._control).parted(value)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a text that will be continued, without the tokens that the tokenizer adds at the end of a text. A control
        token into which `parted` put its mark is encoded as ordinary text."""
        first, *others = text.split(_MARK)
        token_ids = list(self._tokenizer.encode(first, add_special_tokens=add_special_tokens))
        if add_special_tokens:
            bare = list(self._tokenizer.encode(first, add_special_tokens=False))
            ends = (at for at in range(len(token_ids), 0, -1) if token_ids[:at][-len(bare) :] == bare)
            token_ids = token_ids[: next(ends, len(token_ids))]
        if not others:
            return token_ids
        # Some tokenizers put a space before a first word, so encode each part after a line end, which is then removed.
        line_end, *behind = self._tokenizer(["\n", *(f"\n{part}" for part in others)], add_special_tokens=False)["input_ids"]
        following = list[int]()
        for part, ids in zip(others, behind, strict=True):
            is_whole = ids[: len(line_end)] == line_end
            following += ids[len(line_end) :] if is_whole else self._tokenizer.encode(part, add_special_tokens=False)
        return token_ids + following


control_tokens = lru_cache(maxsize=8)(ControlTokens)
"""Returns the cached `ControlTokens` of a tokenizer, whose chat template must not change afterwards."""


@lru_cache(maxsize=8)
def answer_end(tokenizer: Any) -> int | None:
    """Return the token with which the chat template ends an answer, because engines may not know it. None means that it is the
    tokenizer's end token, which engines know, that plain text ends answers, or that the template fails. Raises `FieldError`
    without a template."""
    if not tokenizer.chat_template:
        fix = "this tokenizer has no chat template; use plain, or name one with model.chat_template"
        raise FieldError("task.prompt_style", "chat", fix)
    try:
        text = after_answer(tokenizer).lstrip() or after_answer(tokenizer, asked_again=True).lstrip()
    except Exception as error:  # noqa: BLE001 - a template calls raise_exception, or fails on a field that is not there
        log.warning("the chat template fails, so only the model's end tokens, not the template's, end an answer: %s", error)
        return None
    first = tokenizer.encode(text, add_special_tokens=False)[:1]
    known = (tokenizer.eos_token_id, *(token for token in first if token not in tokenizer.added_tokens_decoder))
    return next((int(token) for token in first if token not in known), None)


class Spellings:
    """Find tokens in texts. The time grows with the different prefixes and lengths of the tokens, not with their number."""

    def __init__(self, tokens: set[str]) -> None:
        self._tokens = {token for token in tokens if len(token) > 1}
        self._lengths = sorted(set(map(len, self._tokens)), reverse=True)
        prefixes = sorted({re.escape(token[:_PREFIX]) for token in self._tokens})
        self._begins = re.compile(f"(?={'|'.join(prefixes)})") if prefixes else None

    def found(self, text: str) -> Iterator[tuple[int, str]]:
        for at in (match.start() for match in self._begins.finditer(text)) if self._begins else ():
            for length in self._lengths:
                if (spelled := text[at : at + length]) in self._tokens:
                    yield at, spelled
                    break

    def first(self, text: str) -> str:
        """Return the first of the tokens that occurs in the text; "" if there is none."""
        return next((spelled for _, spelled in self.found(text)), "")

    def parted(self, value: Any) -> Any:
        if isinstance(value, str):
            begins = [0, *(at + 1 for at, _ in self.found(value)), len(value)]
            return _MARK.join(value[start:end] for start, end in itertools.pairwise(begins))
        if isinstance(value, Mapping):
            return {self.parted(key): self.parted(item) for key, item in value.items()}
        return [self.parted(item) for item in value] if isinstance(value, list | tuple) else value


def encoded_prompt(problem: Problem, config: TaskConfig, tokenizer: Any, control: ControlTokens) -> tuple[str, list[int]]:
    """Return text and tokens of a problem's prompt, with instruction and system prompt. Control tokens that the row
    spells become ordinary text. The chat template writes the special tokens; without it, the tokenizer adds them. Raises
    `FieldError` if the template refuses the prompt."""
    given, is_chat = problem.messages or ({"role": "user", "content": problem.question},), config.prompt_style == "chat"
    messages = conversation(control.parted(given), config)
    try:
        text = written(tokenizer, messages) if is_chat else str(messages[-1]["content"])
    except Exception as error:  # a template calls raise_exception, is not Jinja, or fails on a field that is not there
        raise refusal(problem, config, messages, error, lambda others: written(tokenizer, others)) from error
    return text.replace(_MARK, ""), control.encode(text, add_special_tokens=not is_chat)


def refusal(
    problem: Problem, config: TaskConfig, messages: list[Any], error: Exception, write: Callable[[list[Any]], object]
) -> FieldError:
    """Return the `FieldError` for a prompt that the chat template refused with `error`. The system message is to blame if
    `write` accepts the prompt without it."""
    if messages[0]["role"] == "system" and len(messages) > 1:
        with contextlib.suppress(Exception):  # if this fails too, the system message is not the cause
            write(messages[1:])
            fix = 'set task.system_prompt: "" and put its text into task.instruction'
            if problem.messages and problem.messages[0]["role"] == "system":
                fix = f"the prompt of {problem.place} begins with a system message; put its text into the question"
            told = f"the model's chat template takes no system message ({error}); {fix}"
            return FieldError("task.system_prompt", config.system_prompt, told)
    shown = repr(messages).replace(_MARK, "")
    told = f"the model's chat template refuses {shown:.200}: {error}".replace(_MARK, "")
    return FieldError("task.prompt_style", config.prompt_style, told)
