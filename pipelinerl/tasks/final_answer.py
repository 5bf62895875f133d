r"""Find the final answer in a mathematics reference, and make wrong answers that look like it.

A reference is an answer, or a whole solution that ends with `#### 42` (GSM8K) or contains `\boxed{42}` (MATH). Mathematics
scorers read references with `final_answer`. `pipelinerl.recipe.rehearsal` tests scorers with `near_misses`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|(-?(?:\d[\d.,/]*\d|\d|[A-Za-z]))(?![\w{]))|\\f?box\s*(\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LAST_BOXES = 16
_PAIR = re.compile(r"(\(|\[|\\frac\{|)([^,(){}\[\]:/]+)(, ?|\}\{|:|/)([^,(){}\[\]:/]+)(\)|\]|\}|)")
"""Two parts that a near miss exchanges, such as (1, 2), \\frac{1}{2}, 1:2 or 1/2. `near_misses` checks the brackets."""
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*/\s*\\mathrm\s*\{[^{}]*\})?|[A-Za-z]{2,}|\\?%|\^\{?\\circ\}?)[A-Za-z\s^\d]*$|_\{?\d+\}?$|^[A-Za-z]\s*="
)
_NEUTRAL = re.compile(r"(?:\\frac|\\cdot|\\times|\\[{}]|[|{}()\[\]\s/*^!.+])*1?(?:[|{}()\[\]\s!.]|\\[{}])*")
"""Text around a number that may leave its value unchanged, such as brackets, a division by 1, or the factorial of 2."""

_BEGINS_THOUGHT = r"<(?:think|thinking|thought|reasoning)>|\[THINK\]|◁think▷"
_ENDS_THOUGHT = r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]|◁/think▷"

FOUND_NONE = "reward.answer_pattern found no answer"
"""Message of a reward of 0 if no answer was found in the completion."""


def thoughts(text: str, prompt: str = "") -> list[tuple[int, int]]:
    """Return start and end of each thought in a completion. The first may begin in `prompt`, and the last may have no end tag.
    An end tag without a beginning ends a thought that began where the previous thought ended, or with the completion."""
    found = list[tuple[int, int]]()
    begin = 0 if re.search(rf"(?:{_BEGINS_THOUGHT})\s*$", prompt) else None
    for tag in re.finditer(f"({_BEGINS_THOUGHT})|{_ENDS_THOUGHT}", text):
        if not tag[1]:
            found.append((begin if begin is not None else found[-1][1] if found else 0, tag.end()))
        begin = (tag.start() if begin is None else begin) if tag[1] else None
    return found if begin is None else [*found, (begin, len(text))]


def outside(ranges: Sequence[tuple[int, int]], text: str) -> str:
    """Return `text` without the ranges, which are in order. Line ends separate the remaining parts."""
    starts, stops = [0, *(stop for _, stop in ranges)], [*(start for start, _ in ranges), len(text)]
    return "\n".join(text[start:stop] for start, stop in zip(starts, stops, strict=True)).strip()


def occurs(reference: str, text: str) -> bool:
    """Return whether a text contains the final answer of a reference by itself, not as part of a longer word or number."""
    answer = final_answer(reference)
    no_sign = r"(?<!(?<![\w)\]}])[-−])" if answer[:1].isdigit() else ""  # -42 is not 42, but 10-42 contains it
    return bool(answer) and re.search(rf"(?<![\w.]){no_sign}{re.escape(answer)}(?!\w|\.\w)", text) is not None


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Return start, end and content of the last `_LAST_BOXES` boxes, such as `\boxed 42`. A cut-off box has content None."""
    found = list[tuple[int, int, str | None]]()
    for match in list(_BOX.finditer(text))[-_LAST_BOXES:]:
        if match[2]:
            found.append((match.start(), match.end(), match[2]))
            continue
        depth, content, end = 0, None, len(text)
        for brace in _BRACE.finditer(text, match.end() - 1):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                content, end = text[match.end() : brace.start()].strip(), brace.end()
                break
        found.append((match.start(), end, content))
    return found


def final_answer(reference: str) -> str:
    """Return the answer that a reference marks by `####`, a box, words such as "answer is" or a list of one quoted text;
    without a mark, return the whole reference."""
    _, mark, last = reference.rpartition("####")
    if mark:
        return (last.strip().splitlines() or [""])[0].strip()
    if boxed := boxes(reference):
        return boxed[-1][2] or ""
    told = re.search(
        r"""(?:.*\banswer\b\s*(?:is\b|:|=)+|^\[["'])\s*(.+?)(?:["']\])?$""", reference.strip(), re.DOTALL | re.IGNORECASE
    )
    return told[1] if told else reference.strip()


def bare_answer(reference: str) -> str:
    """Return the final answer in lower case, without currency signs and digit separators. If it is a number, its unit and its
    trailing decimal zeros are also removed."""
    bare = re.sub(r"\\[!,;: $()]|[$~£€]|(?<=\d),(?=\d{3}(?!\d))", "", final_answer(reference)).lower().strip(" .")
    number = re.fullmatch(r"(-?\d+)(\.\d+)?\s*[a-z%]{0,12}", bare)
    return number[1] + (number[2] or "").rstrip("0").rstrip(".") if number else bare


def near_misses(answer: str) -> list[str]:
    """Return up to three wrong answers like `answer`: its first number alone, the negated answer, a pair with swapped parts."""
    bare, misses = re.sub(r"\\[!,;: $()]|[$~£€]", "", answer).strip(" ."), list[str]()
    bare = bare if bare[:1] in ("(", "[") else re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", "", bare)
    number = re.search(r"\d+(?:\.\d+)?", bare)
    if number is None or len(bare) > 100 or re.search(r"\(?\b[A-J]\)|approx|mathbb", bare):
        return []
    without_unit = _UNIT.sub("", bare)
    rest = without_unit.replace(number[0], "", 1)
    is_alone = _NEUTRAL.fullmatch(rest) or re.fullmatch(rf"[,;=\s{number[0]}]*", rest) or re.search("[=!]", rest)
    if not is_alone and not (number[0] in ("0", "1") and not re.search(r"\d", rest)):
        misses.append(number[0])
    has_words = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\\text", without_unit)
    has_parts = re.search(r"[,;=<>:|_]|\\(?:[{]|(?:pm|mp|begin|in|leq?|geq?|neq?|cup|mid)(?![a-z]))", bare)
    if not has_words and not has_parts and re.search("[1-9]", bare):
        misses.append(bare[1:].strip() if bare.startswith("-") else f"-{bare.removeprefix('+')}")
    if pair := _PAIR.fullmatch(bare):
        opening, first, middle, second, closing = pair.groups()
        is_pair = (opening + middle.strip() + closing) in ("(,)", "[,]", "(,]", "[,)", r"\frac{}{}", ":", "/")
        if is_pair and first.lstrip("-") != second.lstrip("-"):
            misses.append(f"{opening}{second}{middle}{first}{closing}")
    return list(dict.fromkeys(misses))
