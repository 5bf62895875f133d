"""How model families write conversations as tokens, and how a sampled turn reads as a message.

Three formats: a renderer of the package `renderers`, which knows some 25 model families; any other chat template; and a model
without one, for which texts are joined. Each can extend tokens that were sampled, without making them again.
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

from pipelinerl.errors import PipelineRLError, as_unicode
from pipelinerl.prompts import ControlTokens, after_answer, written
from pipelinerl.recipe.fields import ModelConfig

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""Of OpenAI's chat completions, as `rendering.read_messages` returns it: content is text, fields without value are left out."""
Tools = list[dict[str, Any]]


_KEPT_TEXTS, _KEPT_CHARACTERS = 1024, 16_384
"""Of a conversation's messages; with their tokens up to 80 MB."""


class Unrenderable(PipelineRLError):
    """Messages or tools that this model's format has no tokens for, or that are no messages."""


@dataclass(frozen=True)
class ToolCall:
    """`arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """A sampled turn as a message."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ChatFormat(Protocol):
    """How a model family writes conversations. `stop_token_ids` end a turn; `control` parts texts that spell control tokens."""

    stop_token_ids: tuple[int, ...]
    control: ControlTokens

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        """The tokens of all messages, up to where the model's next turn begins. Raises `Unrenderable`."""
        ...

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        """`prompt_ids` and `sampled_ids`, which are the first `num_known` messages, as they are, and after them the tokens of
        the other messages, up to where the model's next turn begins. None: this format would write the known ones otherwise
        now. Raises `Unrenderable`."""
        ...

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        """`tools`: those that may be called."""
        ...


def chat_format_of(tokenizer: Any, model: ModelConfig) -> ChatFormat:
    """The format of a recipe's model. A template of the recipe's own, or values for its variables, count more than the model's
    name."""
    is_changed = bool(model.chat_template or model.chat_template_kwargs)
    return chat_format(tokenizer, "" if is_changed else model.name, model.chat_template_kwargs)


def chat_format(tokenizer: Any, model: str, variables: Mapping[str, Any] = MappingProxyType({})) -> ChatFormat:
    """The format of a Hugging Face tokenizer's model. `model`: the recipe's name of it. `variables`: what the chat template's
    defaults were changed to.

    A family's renderer is taken by the model's name, or else because it writes the same tokens as the chat template for every
    conversation of `PROBES`: so do copies in folders, and models that were trained further.
    """
    if not tokenizer.chat_template:
        return PlainFormat(tokenizer)
    from renderers.base import MODEL_RENDERER_MAP  # imports most of a second's worth

    if model in MODEL_RENDERER_MAP:
        return FamilyFormat(tokenizer, MODEL_RENDERER_MAP[model])
    for name in sorted(set(MODEL_RENDERER_MAP.values())):
        try:
            found = FamilyFormat(tokenizer, name, variables)
        except Exception:  # noqa: BLE001 - each says in a way of its own that the tokenizer lacks its special tokens
            continue
        if _writes_the_template(found, tokenizer):
            log.info("chat format of %s: renderer %s, which writes the tokens of its chat template", model, name)
            return found
    log.info("chat format of %s: its chat template", model)
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
"""Conversations, with their tools, on which a family's renderer has to agree with a chat template."""


def _writes_the_template(found: ChatFormat, tokenizer: Any) -> bool:
    control = ControlTokens(tokenizer)
    for messages, tools in PROBES:
        try:
            token_ids = control.encode(written(tokenizer, messages, tools))
        except Exception:  # noqa: BLE001 - a template that knows no system message, or no tools
            continue
        try:
            if found.render(messages, tools) != token_ids:
                return False
        except Unrenderable:
            return False
    return True


class RendererTokenizer:
    """What renderers need of a tokenizer. They write a conversation anew with each of its turns, so the tokens of its texts are
    kept. Without `__call__` they ask for no character offsets, which nobody here reads and which take most of the time."""

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.convert_tokens_to_ids, self.decode = tokenizer.convert_tokens_to_ids, tokenizer.decode
        self.apply_chat_template, self.chat_template = tokenizer.apply_chat_template, tokenizer.chat_template
        self.all_special_tokens = tokenizer.all_special_tokens
        self._control, self._kept = control, lru_cache(_KEPT_TEXTS)(self._encoded)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens or len(text) > _KEPT_CHARACTERS:
            return self._control.encode(text, add_special_tokens=add_special_tokens)
        return list(self._kept(text))

    def _encoded(self, text: str) -> array[int]:
        return array("i", self._control.encode(text))


class FamilyFormat:
    """A renderer of the package `renderers`, by its name there: one model family's format, written down by hand.

    Renderers do not extend turns by a user's message where their template drops thoughts then. If there were none, so that it
    writes the same text but for white space, the recorded tokens are extended nevertheless. Some renderers have `variables` of
    the chat template as settings.
    """

    def __init__(self, tokenizer: Any, family: str, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        from renderers import config_from_name, create_renderer

        # Harmony's own encoder, of gpt-oss, reads no special token in texts.
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
        except Exception as error:  # what a renderer raises for messages that it does not take is its own
            raise Unrenderable(f"the model's chat format does not take these messages: {error}") from error

    def extend(
        self, prompt_ids: list[int], sampled_ids: list[int], messages: list[Message], num_known: int, tools: Tools
    ) -> list[int] | None:
        new, known = _with_tool_names(messages)[num_known:], [*prompt_ids, *sampled_ids]
        for renderer in (self.renderer, self._keeping):
            try:
                bridged = renderer.bridge_to_next_turn(prompt_ids, sampled_ids, new, tools=tools or None)
            except Exception as error:
                raise Unrenderable(f"the model's chat format does not take these messages: {error}") from error
            if bridged is None or bridged.token_ids[: len(known)] != known:
                continue
            if renderer is self.renderer or self._is_written(bridged.token_ids, messages, tools):
                return list(bridged.token_ids)
        return None

    def _is_written(self, token_ids: list[int], messages: list[Message], tools: Tools) -> bool:
        anew = self.render(messages, tools)
        if anew == token_ids:
            return True
        # As arrays: of a list, transformers looks at every token first.
        texts = [self._tokenizer.decode(np.array(ids)).split() for ids in (token_ids, anew)]
        return "".join(texts[0]) == "".join(texts[1])

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        parsed = self.renderer.parse_response(sampled_ids, prompt_ids=prompt_ids, tools=tools or None)
        attempts = parsed.tool_calls if tools else []
        # A tool that is not among those given is the agent's to answer.
        calls = tuple(
            ToolCall(call.name, _as_json(call.arguments), call.id or "")
            for call in attempts
            if call.name and call.status in ("ok", "unknown_tool")
        )
        reasoning = parsed.reasoning_content or ""
        if not calls and parsed.tool_calls:  # what looks like a call and is none is text
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
    """Any chat template. What comes after a recorded turn is what the template writes after it, if it writes all before it as
    it did. Tools are called as Hermes models do: by the template where it knows tools, otherwise by what is said here."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        self._end, self._after_end = self._turn_end(asked_again=False)
        self._is_next_role = self._end is None
        """Whether a turn is ended by the token that begins the next role's message."""
        if self._is_next_role:
            self._end, _ = self._turn_end(asked_again=True)
        self.stop_token_ids = tuple(sorted({self._end, tokenizer.eos_token_id} - {None}))
        self._has_tools, self._has_system = self._knows_tools(), self._knows([{"role": "system", "content": "zero"}, *_ASK])

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
        rest, is_ended = everything[len(known) :], sampled_ids[-1:] == [self._end]
        if self._is_next_role:
            new = self.control.encode(rest)
            if new[:1] != [self._end] or not known.endswith(said):  # another role's, or text between answer and role
                return None
            return [*prompt_ids, *sampled_ids, *(new[1:] if is_ended else new)]
        closed = [] if is_ended else [self._end]
        return [*prompt_ids, *sampled_ids, *closed, *self.control.encode(self._after_end + rest)]

    def parse(self, sampled_ids: list[int], prompt_ids: list[int], tools: Tools) -> Answer:
        text = _decoded(self._tokenizer, sampled_ids, self.stop_token_ids)
        written = list(_TOOL_CALL.finditer(text)) if tools else []
        calls = [call for match in written if (call := _hermes_call(match[1]))]
        if not calls or len(calls) < len(written):
            return Answer(text)
        return Answer(text[: written[0].start()].rstrip("\n"), "", tuple(calls))

    def _text(self, messages: list[Message], tools: Tools, *, begins_turn: bool = True) -> str:
        if not self._has_tools:
            messages, tools = _with_tools_as_text(messages, tools, in_system=self._has_system), []
        try:
            return written(self._tokenizer, messages, tools, begins_turn=begins_turn)
        except Exception as error:  # a template calls raise_exception, or fails on a field that is not there
            raise Unrenderable(f"the model's chat template does not take these messages: {error}") from error

    def _turn_end(self, *, asked_again: bool) -> tuple[int | None, str]:
        """The token that the template writes after an assistant's content, and the text after that; None: it writes none."""
        tokens = self.control.encode(after_answer(self._tokenizer, asked_again=asked_again))
        if not tokens or tokens[0] not in self._tokenizer.get_added_vocab().values():
            return None, ""
        return tokens[0], str(self._tokenizer.decode(tokens[1:]))

    def _knows(self, messages: list[Message]) -> bool:
        try:
            return bool(written(self._tokenizer, messages))
        except Exception:  # noqa: BLE001 - it calls raise_exception
            return False

    def _knows_tools(self) -> bool:
        """Whether the template writes tools, and calls as Hermes models do."""
        try:
            with_tools, called = (written(self._tokenizer, messages, [_TOOL]) for messages in (_ASK, _CALLED))
        except Exception:  # noqa: BLE001 - it does not know the role, or what a call has
            return False
        calls = [call for match in _TOOL_CALL.finditer(called) if (call := _hermes_call(match[1]))]
        return "probe_tool" in with_tools and any(call.name == "probe_tool" for call in calls)


class PlainFormat:
    """A model without chat template: the messages' texts one after another, each tokenised by itself, an assistant's ended with
    the end-of-sequence token, all after the token that the tokenizer begins a text with, if it has such a one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.control = tokenizer, ControlTokens(tokenizer)
        self._begin = list(tokenizer("")["input_ids"])[:1]
        self._end = tokenizer.eos_token_id
        if self._begin == [self._end] != [tokenizer.bos_token_id]:  # one that only ends texts
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
    """A tool's message names its function where the client did not: some formats write that."""
    names = {
        call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ()) if call["id"]
    }
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _with_tools_as_text(messages: list[Message], tools: Tools, *, in_system: bool) -> list[Message]:
    """For a template that knows no tools: they, calls and results as text, as Hermes models write it. The tools are part of the
    system message or, in a template without one, of the first message."""
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


def _hermes_call(text: str) -> ToolCall | None:
    call = parsed_json(text)
    if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
        return ToolCall(call["name"], _as_json(call["arguments"]))
    return None


def _decoded(tokenizer: Any, token_ids: list[int], ends: tuple[int, ...]) -> str:
    if token_ids and token_ids[-1] in ends:
        token_ids = token_ids[:-1]
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def parsed_json(text: Any) -> Any:
    """JSON's value, its texts as Unicode; what is no JSON as it is."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
        return json.loads(as_unicode(json.dumps(value, ensure_ascii=False))) if "\\u" in text else value
    except (ValueError, RecursionError):
        return text
