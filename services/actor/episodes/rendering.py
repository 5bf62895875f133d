"""Convert a request's messages to the context of its turn, and the turn to its answer.

Recorded tokens are never rendered again; only the messages after them are rendered. If the model's format cannot do that, or if
the request's history was not recorded, the whole history is rendered and begins a branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelinerl.errors import as_unicode
from pipelinerl.messages.sequences import TokenIds
from services.actor.engine import before_stop
from services.actor.episodes.episode import RecordedTurn
from services.actor.episodes.formats import Answer, ChatFormat, Message, ToolCall, Tools, Unrenderable, parsed_json

ROLES = ("system", "user", "assistant", "tool")


class Rendering:
    """Converts between messages and tokens in the chat format of a model."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    def context(self, served: list[RecordedTurn], messages: list[Message], tools: Tools) -> TokenIds:
        """Return the turn's context, int32[context]. It extends the last turn in `served` that is part of the request's
        history, if any. No text of `messages` or `tools` becomes a control token. Raises `Unrenderable`."""
        turn = _last_known(served, _history(messages, tools))
        messages, tools = self._chat.control.parted(messages), self._chat.control.parted(tools)
        token_ids = None
        if turn is not None:
            prompt_ids, sampled_ids = turn.context_token_ids.tolist(), turn.made.completion_token_ids.tolist()
            num_known = len(turn.messages) - 1
            token_ids = self._chat.extend(prompt_ids, sampled_ids, messages, num_known, tools)
        return np.array(token_ids or self._chat.render(messages, tools), dtype=np.int32)

    def answer(
        self, turn: RecordedTurn, messages: list[Message], tools: Tools, stop: tuple[str, ...] = (), may_call: bool = True
    ) -> Answer:
        """Return the turn as a message, without the stop string that ended it. Stores the history in the turn, for comparison
        with the next request."""
        prompt_ids, sampled_ids = turn.context_token_ids.tolist(), turn.made.completion_token_ids.tolist()
        parsed = self._chat.parse(sampled_ids, prompt_ids, tools if may_call else [])
        calls = tuple(
            ToolCall(as_unicode(call.name), as_unicode(call.arguments), as_unicode(call.id) or _call_id(turn, number))
            for number, call in enumerate(parsed.tool_calls)
        )
        answer = Answer(before_stop(parsed.content, stop), before_stop(parsed.reasoning, stop), calls)
        turn.messages = _history([*messages, message_of(answer)], tools)
        return answer


def message_of(answer: Answer) -> Message:
    """Return an answer as the message that a client gets."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def read_messages(given: Any) -> list[Message]:
    """Read a request's messages: text parts are joined, arguments of calls parsed. Raises `Unrenderable`."""
    if not isinstance(given, list) or not given:
        raise Unrenderable("messages: give a list with at least one message")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _read_message(given: Any, where: str) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise Unrenderable(f"{where}.role: {role!r} is not one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _text_of(given.get("content"), f"{where}.content")}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(field), str):
            message[field] = given[field]
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [_read_call(call) for call in calls]
        except (KeyError, TypeError, AttributeError) as error:
            raise Unrenderable(f"{where}.tool_calls: each needs function.name and function.arguments") from error
    return message


def _read_call(given: Any) -> dict[str, Any]:
    function = given["function"]
    arguments = parsed_json(function["arguments"])
    return {
        "id": given.get("id") or "",
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": arguments},
    }


def _text_of(content: Any, where: str) -> str:
    parts = content if isinstance(content, list) else ["" if content is None else content]
    try:
        return "".join(part if isinstance(part, str) else part["text"] for part in parts)
    except (TypeError, KeyError) as error:
        raise Unrenderable(f"{where}: only text is supported, as a string or as parts of type text") from error


def _history(messages: list[Message], tools: Tools) -> tuple[Any, ...]:
    """Return a key by which histories are compared: tools, and each message's role, content, names, and calls with ids and
    parsed arguments. Reasoning and empty fields, which clients drop or add, do not count."""
    return (
        json.dumps(tools, sort_keys=True),
        *(
            json.dumps(
                [message["role"], message.get("content", ""), message.get("name"), message.get("tool_call_id")]
                + [
                    [call["id"], call["function"]["name"], parsed_json(call["function"]["arguments"])]
                    for call in message.get("tool_calls", ())
                ],
                sort_keys=True,
            )
            for message in messages
        ),
    )


def _last_known(served: list[RecordedTurn], history: tuple[Any, ...]) -> RecordedTurn | None:
    """Return the turn whose messages and answer are the longest proper start of `history`. Among equal turns, one that no
    other turn extends is preferred."""
    extended = {id(turn.extends) for turn in served}
    known = [
        turn
        for turn in served
        if turn.messages and len(turn.messages) < len(history) and history[: len(turn.messages)] == turn.messages
    ]
    return max(known, key=lambda turn: (len(turn.messages), id(turn) not in extended), default=None)


def _call_id(turn: RecordedTurn, number: int) -> str:
    """Return the id of a turn's call, which never changes. It has nine letters and digits, as Mistral's templates require."""
    digest = hashlib.blake2b(turn.token_ids.tobytes(), digest_size=8, salt=number.to_bytes(8, "little"))
    return digest.hexdigest()[:9]
