"""Write conversations as tokens in a model's chat format, and read sampled turns as messages.

There are three formats: a renderer of the package `renderers`, which knows many model families; any other chat template;
and, for a model without a template, the joined texts. All can extend sampled tokens without tokenizing them again.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from pipelinerl.episodes import ToolCall
from pipelinerl.errors import PipelineRLError, as_unicode
from pipelinerl.prompts import ControlTokens, after_answer, written
from pipelinerl.recipe.fields import ModelConfig

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""A message of OpenAI's chat completions, from `endpoint.read_messages`. Its content is a string; absent fields are omitted."""
Tools = list[dict[str, Any]]

_KEPT_TEXTS, _KEPT_CHARACTERS = 1024, 16_384
"""Maximum number of texts, and of characters per text, in the cache of encoded texts. The cache takes up to 80 MB."""


class Unrenderable(PipelineRLError):
    """A request that is invalid, or whose messages or tools this model's format cannot write."""


@dataclass(frozen=True)
class Answer:
    """A sampled turn as a message."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ChatFormat(Protocol):
    """A model's chat format. `stop_token_ids` end a turn; `control` encodes texts without making control tokens of them."""

    stop_token_ids: tuple[int, ...]
    control: ControlTokens

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        """Return the tokens of all messages and of the opening of the model's next turn. Raises `Unrenderable`."""

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        """Like `render`, but begin with `prompt_ids` and `sampled_ids`, the recorded tokens of the first `num_known` messages.
        Return None if the format cannot extend these tokens. Raises `Unrenderable`."""

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        """Read a sampled turn, which may call `tools`, as a message."""


def chat_format(tokenizer: Any, model: ModelConfig) -> ChatFormat:
    """Return the format of a recipe's model: without a chat template, `PlainFormat`. If the recipe sets neither a chat template
    nor `chat_template_kwargs`, it is the renderer known for the model, if any. Otherwise, it is the first renderer, with these
    kwargs, that writes the template's tokens for the `PROBES`, or else the template itself."""
    if not tokenizer.chat_template:
        return PlainFormat(tokenizer)
    from renderers.base import MODEL_RENDERER_MAP  # this import takes almost a second

    if model.name in MODEL_RENDERER_MAP and not (model.chat_template or model.chat_template_kwargs):
        return FamilyFormat(tokenizer, MODEL_RENDERER_MAP[model.name])
    for name in sorted(set(MODEL_RENDERER_MAP.values())):
        try:
            found = FamilyFormat(tokenizer, name, model.chat_template_kwargs)
        except Exception:  # noqa: BLE001 - renderers raise different errors if the tokenizer lacks their special tokens
            continue
        if _writes_the_template(found, tokenizer):
            log.info("chat format of %s: renderer %s, which writes the same tokens as its chat template", model.name, name)
            return found
    log.info("chat format of %s: its chat template", model.name)
    return TemplateFormat(tokenizer)


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Says nothing.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_CALL = {"id": "probe1234", "type": "function", "function": {"name": "probe_tool", "arguments": {"word": "a"}}}
_ASK: list[Message] = [{"role": "user", "content": "one"}]
_CALLED: list[Message] = [
    *_ASK,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "probe1234", "content": "three"},
]
PROBES: tuple[tuple[list[Message], Tools], ...] = (
    (_ASK, []),
    ([{"role": "system", "content": "zero"}, *_ASK, {"role": "assistant", "content": "two"}, *_ASK], []),
    (_ASK, [_TOOL]),
    (_CALLED, [_TOOL]),
)
"""Conversations and tools for which a renderer must write the same tokens as a chat template."""


def _writes_the_template(found: ChatFormat, tokenizer: Any) -> bool:
    control = ControlTokens(tokenizer)
    for messages, tools in PROBES:
        text = _tried(tokenizer, messages, tools)
        try:
            if text and found.render(messages, tools) != control.encode(text):
                return False
        except Unrenderable:
            return False
    return True


def _tried(tokenizer: Any, messages: list[Message], tools: Tools) -> str:
    """Render messages with the chat template; return "" if it refuses them, as some refuse system messages or tools."""
    try:
        return written(tokenizer, messages, tools)
    except Exception:  # noqa: BLE001 - the template called raise_exception, or needs a field
        return ""


class RendererTokenizer:
    """The part of a tokenizer that renderers need. It has a cache, because renderers encode the whole conversation for each
    turn. It lacks `__call__`, so that renderers do not compute character offsets, which are slow and unused."""

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.convert_tokens_to_ids, self.decode = tokenizer.convert_tokens_to_ids, tokenizer.decode
        self.apply_chat_template, self.chat_template = tokenizer.apply_chat_template, tokenizer.chat_template
        self.all_special_tokens = tokenizer.all_special_tokens
        self._control, self._kept = control, lru_cache(_KEPT_TEXTS)(lambda text: array("i", control.encode(text)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens or len(text) > _KEPT_CHARACTERS:
            return self._control.encode(text, add_special_tokens=add_special_tokens)
        return list(self._kept(text))


class FamilyFormat:
    """The format of a model family, written by the renderer `family` of the package `renderers`. `variables`: the recipe's
    `chat_template_kwargs`, which become the renderer's settings of the same names."""

    def __init__(self, tokenizer: Any, family: str, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        from renderers import config_from_name, create_renderer

        # gpt-oss has its own encoder, Harmony, which never reads special tokens in text.
        self.control = ControlTokens(tokenizer, has_own_encoder=family == "gpt-oss")
        self._tokenizer, kind = RendererTokenizer(tokenizer, self.control), type(config_from_name(family))
        known: dict[str, Any] = {name: value for name, value in variables.items() if name in kind.model_fields}
        self.renderer = create_renderer(self._tokenizer, kind(**known))
        self._keeping = create_renderer(self._tokenizer, kind(**{**known, "thinking_retention": "all"}))
        self.stop_token_ids = tuple(self.renderer.get_stop_token_ids())

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        named = _with_tool_names(messages)
        try:
            return list(self.renderer.render_ids(named, tools=tools or None, add_generation_prompt=True))
        except Exception as error:  # renderers have no common base for their errors
            raise Unrenderable(f"the model's chat format does not take these messages: {error}") from error

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        new, known = _with_tool_names(messages)[num_known:], [*prompt_ids, *sampled_ids]
        # Some renderers refuse to extend a turn by a user's message, because the template then drops earlier thoughts.
        # `_keeping` extends such a turn if rendering the whole conversation anew gives the same text apart from white space.
        for renderer in (self.renderer, self._keeping):
            try:
                bridged = renderer.bridge_to_next_turn(prompt_ids, sampled_ids, new, tools=tools or None)
            except Exception as error:
                raise Unrenderable(f"the model's chat format does not take these messages: {error}") from error
            if bridged is None or bridged.token_ids[: len(known)] != known:
                continue
            token_ids = list(bridged.token_ids)
            if renderer is not self.renderer and (anew := self.render(messages, tools)) != token_ids:
                # Arrays are decoded faster than lists, whose tokens transformers inspects one by one.
                texts = {"".join(self._tokenizer.decode(np.array(ids)).split()) for ids in (token_ids, anew)}
                if len(texts) > 1:
                    continue
            return token_ids
        return None

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        parsed = self.renderer.parse_response(sampled_ids, prompt_ids=prompt_ids, tools=tools or None)
        attempts = parsed.tool_calls if tools else []
        # A call of an unknown tool is passed on, for the agent to answer.
        calls = tuple(
            ToolCall(call.id or "", call.name, _as_json(call.arguments))
            for call in attempts
            if call.name and call.status in ("ok", "unknown_tool")
        )
        reasoning = parsed.reasoning_content or ""
        if not calls and parsed.tool_calls:  # no call is valid, so all count as text
            return Answer("".join([parsed.content, *(call.raw for call in parsed.tool_calls)]), reasoning)
        return Answer(parsed.content or "", reasoning, calls)


_TOOLS_TEXT = """You can call these functions, each described by a JSON schema:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class TemplateFormat:
    """The format of any chat template. `extend` appends the text that the template writes after the recorded turn, unless later
    messages change earlier text. Tool calls have the form of Hermes models. A template without tools gets them as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        self._end, self._after_end = self._turn_end(asked_again=False)
        self._is_next_role = self._end is None
        """True if a turn ends with the token that begins the next role's message."""
        if self._is_next_role:
            self._end, _ = self._turn_end(asked_again=True)
        self.stop_token_ids = tuple(sorted({self._end, tokenizer.eos_token_id} - {None}))
        self._has_system = bool(_tried(tokenizer, [{"role": "system", "content": "zero"}, *_ASK], []))
        calls = [call.name for call in _hermes_calls(_tried(tokenizer, _CALLED, [_TOOL])) if call]
        self._has_tools = "probe_tool" in _tried(tokenizer, _ASK, [_TOOL]) and "probe_tool" in calls
        """True if the template writes tools, and writes calls in the form of Hermes models."""

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        return self.control.encode(self._text(messages, tools))

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        if self._end is None:
            return None
        known = self._text(messages[:num_known], tools, begins_turn=False)
        everything = self._text(messages, tools)
        end = "" if self._is_next_role else self._tokenizer.decode([self._end]) + self._after_end
        said = messages[num_known - 1].get("content", "").strip()
        if not (everything.startswith(known) and known.endswith(end) and said in known):
            return None
        if not known.startswith(self._text(messages[: num_known - 1], tools)):  # `known` lacks a turn's start, such as <think>
            return None
        rest, is_ended = everything[len(known) :], sampled_ids[-1:] == [self._end]
        if self._is_next_role:
            new = self.control.encode(rest)
            if new[:1] != [self._end] or not known.endswith(said):  # another role, or text between answer and role, follows
                return None
            return [*prompt_ids, *sampled_ids, *(new[1:] if is_ended else new)]
        closed = [] if is_ended else [self._end]
        return [*prompt_ids, *sampled_ids, *closed, *self.control.encode(self._after_end + rest)]

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        text = _decoded(self._tokenizer, sampled_ids, self.stop_token_ids)
        calls = _hermes_calls(text) if tools else []
        if not calls or None in calls:
            return Answer(text)
        return Answer(_TOOL_CALL.split(text, maxsplit=1)[0].rstrip("\n"), "", tuple(filter(None, calls)))

    def _text(self, messages: list[Message], tools: Tools, *, begins_turn: bool = True) -> str:
        if not self._has_tools:
            messages, tools = _with_tools_as_text(messages, tools, in_system=self._has_system), []
        try:
            return written(self._tokenizer, messages, tools, begins_turn=begins_turn)
        except Exception as error:  # the template called raise_exception, or needs a field that is missing
            raise Unrenderable(f"the model's chat template does not take these messages: {error}") from error

    def _turn_end(self, *, asked_again: bool) -> tuple[int | None, str]:
        """Return the special token that ends an answer, or None, and the text after it. `asked_again`: a user turn follows."""
        try:
            tokens = self.control.encode(after_answer(self._tokenizer, asked_again=asked_again))
        except Exception:  # noqa: BLE001 - `render` will say why the template refuses a conversation
            return None, ""
        if not tokens or tokens[0] not in self._tokenizer.get_added_vocab().values():
            return None, ""
        return tokens[0], str(self._tokenizer.decode(tokens[1:]))


class PlainFormat:
    """The format of a model without a chat template: the tokenizer's begin token, if any, and the text of all messages. The
    end-of-sequence token, if any, follows an assistant's message."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        self._begin = list(tokenizer("")["input_ids"])[:1]
        self._end = tokenizer.eos_token_id
        if self._begin == [self._end] != [tokenizer.bos_token_id]:  # the tokenizer adds an end token, but no begin token
            self._begin = []
        self.stop_token_ids: tuple[int, ...] = () if self._end is None else (int(self._end),)

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        if tools:
            raise Unrenderable("tools need a model with a chat template, and this one has none")
        return [*self._begin, *self._tokens(messages)]

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        ends = self.stop_token_ids
        closed = () if not ends or sampled_ids[-1:] == [*ends] else ends
        return [*prompt_ids, *sampled_ids, *closed, *self._tokens(messages[num_known:])]

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        return Answer(_decoded(self._tokenizer, sampled_ids, self.stop_token_ids))

    def _tokens(self, messages: list[Message]) -> list[int]:
        token_ids: list[int] = []
        for message in messages:
            token_ids += self.control.encode(message.get("content", ""))
            if message["role"] == "assistant":
                token_ids += self.stop_token_ids
        return token_ids


def _with_tool_names(messages: list[Message]) -> list[Message]:
    """Add the name of the function to tool messages that lack it, since some formats write the name."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: {"name": call["function"]["name"]} for call in calls if call["id"]}
    return [{**names.get(m.get("tool_call_id"), {}), **m} if m["role"] == "tool" else m for m in messages]


def _with_tools_as_text(messages: list[Message], tools: Tools, *, in_system: bool) -> list[Message]:
    """For a template without tools, return `messages` with tools, calls and results as text in the form of Hermes models.
    `in_system`: the template takes a system message."""
    said: list[Message] = []
    if tools:
        text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        first = messages[0]
        if first["role"] == "system":
            messages = [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        elif in_system:
            messages = [{"role": "system", "content": text}, *messages]
        else:
            messages = [{**first, "content": f"{text}\n\n{first.get('content', '')}"}, *messages[1:]]
    for message in messages:
        content = message.get("content", "")
        if message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if said and said[-1].get("results"):
                said[-1]["content"] += f"\n{result}"
            else:
                said.append({"role": "user", "content": result, "results": True})
            continue
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        said.append({"role": message["role"], "content": "\n".join([*([content] if content or not calls else []), *calls])})
    return said


def _hermes_calls(text: str) -> list[ToolCall | None]:
    """Return the tool calls in `text`, with None for each invalid one."""
    return [
        ToolCall("", call["name"], _as_json(call["arguments"]))
        if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
        else None
        for call in map(parsed_json, _TOOL_CALL.findall(text))
    ]


def _decoded(tokenizer: Any, token_ids: list[int], ends: tuple[int, ...]) -> str:
    if token_ids and token_ids[-1] in ends:
        token_ids = token_ids[:-1]
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def parsed_json(text: Any) -> Any:
    """Parse JSON and return its value, with lone surrogates replaced. Anything that is not JSON is returned unchanged."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
        return json.loads(as_unicode(json.dumps(value, ensure_ascii=False))) if "\\u" in text else value
    except (ValueError, RecursionError):
        return text
