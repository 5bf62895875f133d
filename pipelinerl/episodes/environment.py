"""An environment: code that starts an episode, answers each turn of the policy, and gives the episode's reward.

    from pipelinerl.episodes import Done, Turn

    class GuessNumber:
        def start(self, row, seed):
            self.number = random.Random(seed).randrange(100)
            return "Guess my number from 0 to 99."

        def reply(self, turn: Turn):
            guess = int(turn.text)
            if guess == self.number:
                return Done(1.0)
            return "higher" if guess < self.number else "lower"

Each episode has its own object in its own process. All samples of a prompt get the same row and seed. After a fault, an episode
may run again from its start: if it behaves the same for the same row, seed and turns, it continues from the turns already
sampled. Nothing here calls a model or runs an environment.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelinerl.errors import UserError

Messages = list[dict[str, Any]]
"""Messages in OpenAI's form: `{"role": "user", "content": "..."}`; a tool's answer also has `tool_call_id`."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy asked for. `arguments_json` is the policy's own text, which need not be JSON."""

    id: str
    name: str
    arguments_json: str

    def arguments(self) -> dict[str, Any]:
        """Return the parsed arguments. Raises `ValueError` unless they are a JSON object."""
        arguments = json.loads(self.arguments_json or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are {self.arguments_json!r:.200}, not a JSON object")
        return arguments


@dataclass(frozen=True)
class Turn:
    """One turn that the policy sampled. `messages`: the whole conversation so far, this turn included."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` (cut at `sampling.max_tokens`) or `tool_calls`."""
    messages: Messages


@dataclass(frozen=True)
class Done:
    """The end of an episode. `correct` decides whether a held-out problem counts as solved; None: solved if the reward reaches
    `reward.correct`. `metrics` are averaged over episodes."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None


Start = Messages | str
"""A text stands for one message of the user."""
Reply = Messages | str | Done


class Environment(Protocol):
    """Interface of the user's class in `task: {source: environment, name: "package.module:Class"}`. `task.config` goes to its
    constructor. Both methods may be async. The class may have an attribute `tools`, functions or schemas in OpenAI's form that
    the policy may call; the environment answers the calls itself."""

    def start(self, row: Mapping[str, Any], seed: int) -> Start | Awaitable[Start]:
        """Return the first messages. `row`: the problem's line of `task.path`, or `{}`."""
        ...

    def reply(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Return what the policy reads next, or `Done`."""
        ...


def check_environment_class(kind: Callable[..., Any], config: Mapping[str, Any]) -> None:
    """Raise `UserError` if a class lacks the methods of an `Environment` or does not take `config`. Creates no instance."""
    wanted = {"start": ("row", "seed"), "reply": ("turn",)} if isinstance(kind, type) else {}
    for method, parameters in wanted.items():
        if not callable(getattr(kind, method, None)):
            fix = "an environment is a class with start(self, row, seed) and reply(self, turn)"
            raise UserError(f"{kind.__name__} has no method {method}; {fix}")
        if inspect.isfunction(plain := inspect.getattr_static(kind, method)):  # not a static or class method
            _bind(f"{kind.__name__}.{method}", plain, ("self", *parameters))
    _bind(getattr(kind, "__name__", repr(kind)), kind, config=config)


def _bind(name: str, function: Callable[..., Any], arguments: tuple[str, ...] = (), config: Mapping[str, Any] = {}) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as for a class in C; then the call itself reports the error
        return
    try:
        signature.bind(*arguments, **config)
    except TypeError as error:
        given = ", ".join(arguments) or f"task.config = {config}"
        raise UserError(f"{name}{signature} is called with {given}: {error}") from error
