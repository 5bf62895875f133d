"""Worked solutions of the problems that a small model is shown first: right throughout, some careful and some in a hurry.

A demonstration goes through a problem's additions from left to right. After each it either writes the result down and goes on
from there (careful), or hurries on to the next and adds several at once (hasty). Sums of `chain_sum`:

    12+7-5+8=    12+7=19;19-5=14;14+8=22;#22        careful throughout
    12+7-5+8=    12+7-5=14;14+8=22;#22              hasty once
    12+7-5+8=    12+7-5+8=22;#22                    hasty throughout

In those of `repeated_addition` each step is like the question, with fewer additions left:

    04x7+1037=    03x7+1044=02x7+1051=01x7+1058=00x7+1065        careful throughout
    04x7+1037=    03x7+1044=01x7+1058=00x7+1065                  hasty once

All of these are right. A small model learns single additions well and several at once badly, so that a hasty habit makes it
answer wrong although it could do better: what reinforcement learning then finds.

One-line functions have brackets where the order of operations needs them (careful), or lack them (hasty), and are wrong then:

    +3*2-1=    def f(x):return (x+3)*2-1        careful
    +3*2-1=    def f(x):return x+3*2-1          hasty

In an environment a demonstration is an episode of it. `GuessNumber`: any number that all hints allow (careful), or that the
last hint allows (hasty). `Calculator`: a call and what it says (careful), or the right answer at once, which a small model
cannot know of long products (hasty).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl.episodes import Done, Turn
from pipelinerl.tasks.environments import Calculator, GuessNumber
from pipelinerl.tasks.families import in_brackets

ANSWER_MARK = "#"
SUM_CHARACTERS = "0123456789+-=;# "
_SUM = re.compile(r"(-?\d+)((?:[+-]-?\d+)*)=")
_TERM = re.compile(r"([+-])(-?\d+)")
_OPERATION = re.compile(r"[+*-]\d")
_REPEATED = re.compile(r"(\d+)x(\d+)\+(\d+)=")

Demonstrate = Callable[[str, Sequence[float], random.Random], str]
"""The completion that works out a compact question. Item i of the second argument: the probability of writing down the result
of addition i + 1; the last one holds for all further additions. Raises `ValueError` for another family's question."""
Play = Callable[[Any, list[str], bool, random.Random], str]
"""What to say in an environment after all that was given and said in turn, carefully or not."""


@dataclass(frozen=True)
class Demonstrations:
    """What a warm start needs to know about a family of problems. `characters`: all of compact questions and of solutions."""

    characters: str
    demonstrate: Demonstrate


@dataclass(frozen=True)
class Player:
    """What it needs to know about an environment. `make` takes `task.config`."""

    characters: str
    make: Callable[..., Any]
    play: Play


def play_episode(player: Player, config: dict[str, Any], seed: int, careful: Sequence[float], rng: random.Random) -> list[str]:
    """What was given and what the player said, in turn. `careful`: as of `Demonstrate`, by turn."""
    environment = player.make(**config)
    texts = [environment.start({}, seed)]
    for position in itertools.count():
        texts.append(player.play(environment, texts, _is_careful(position, careful, rng), rng))
        messages = [
            {"role": "assistant" if said else "user", "content": text}
            for text, said in zip(texts, itertools.cycle((False, True)), strict=False)
        ]
        reply = environment.reply(Turn(texts[-1], (), "stop", messages))
        if isinstance(reply, Done):
            break
        texts.append(reply)
    return texts


def play_guess(environment: GuessNumber, texts: list[str], is_careful: bool, rng: random.Random) -> str:
    hints = list(zip(map(int, texts[1::2]), texts[2::2], strict=True))
    heeded = hints if is_careful else hints[-1:]
    lowest = max((guess + 1 for guess, hint in heeded if hint == ">"), default=0)
    highest = min((guess - 1 for guess, hint in heeded if hint == "<"), default=environment.limit - 1)
    return f"{rng.randint(lowest, highest):0{environment.width}}"


def play_calculator(environment: Calculator, texts: list[str], is_careful: bool, rng: random.Random) -> str:
    if len(texts) > 1:
        return "#" + texts[-1].removesuffix(";")
    first, second = texts[0].removesuffix("=").split("*")
    return f"[{first}*{second}]" if is_careful else f"#{int(first) * int(second)}"


def demonstrate_sum(question: str, careful: Sequence[float], rng: random.Random) -> str:
    """Works out `12+7-5=`. The last partial sum is always written."""
    total, terms = parse_sum(question)
    steps, pending = [], str(total)
    for position, (text, value) in enumerate(terms):
        pending, total = pending + text, total + value
        is_last = position == len(terms) - 1
        if is_last or _is_careful(position, careful, rng):
            steps.append(f"{pending}={total};")
            pending = str(total)
    return f"{''.join(steps)}{ANSWER_MARK}{total}"


def parse_sum(question: str) -> tuple[int, list[tuple[str, int]]]:
    """First number of `12+7-5=`, and of each further term its text (`-5`) and value. Raises `ValueError`."""
    match = _SUM.fullmatch(question)
    if match is None:
        raise ValueError(f"{question!r} is not a sum like '12+7-5='")
    terms = [
        (operator + number, int(number) if operator == "+" else -int(number)) for operator, number in _TERM.findall(match[2])
    ]
    return int(match[1]), terms


def demonstrate_repeated_addition(question: str, careful: Sequence[float], rng: random.Random) -> str:
    """Works out `12x7+1037=`. All steps have as many characters as the question, the last one too: what the next one needs is
    always as far away."""
    match = _REPEATED.fullmatch(question)
    if match is None:
        raise ValueError(f"{question!r} is not a repeated addition like '12x7+1037='")
    width, (times, step, start) = len(match[1]), map(int, match.groups())
    written = [done for done in range(1, times) if _is_careful(done - 1, careful, rng)]
    return "=".join(f"{times - done:0{width}}x{step}+{start + step * done}" for done in [*written, times])


def demonstrate_function(question: str, careful: Sequence[float], rng: random.Random) -> str:
    """Writes the program of `+3*2-1=`."""
    operations = _OPERATION.findall(question)
    if "".join(operations) + "=" != question:
        raise ValueError(f"{question!r} is not a chain of operations like '+3*2-1='")
    return "def f(x):return " + in_brackets(operations, [_is_careful(i, careful, rng) for i in range(len(operations))])


def _is_careful(position: int, careful: Sequence[float], rng: random.Random) -> bool:
    return rng.random() < careful[min(position, len(careful) - 1)]


DEMONSTRATIONS = {
    "chain_sum": Demonstrations(SUM_CHARACTERS, demonstrate_sum),
    "repeated_addition": Demonstrations("0123456789+x=", demonstrate_repeated_addition),
    "one_line_function": Demonstrations("0123456789+-*=():defxrtun ", demonstrate_function),
}
"""By reasoning-gym family."""
PLAYERS = {
    "pipelinerl.tasks.environments:GuessNumber": Player("0123456789?<>", GuessNumber, play_guess),
    "pipelinerl.tasks.environments:Calculator": Player("0123456789*=[];#?", Calculator, play_calculator),
}
"""By name of the environment."""
