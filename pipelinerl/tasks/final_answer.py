r"""What a reference of mathematics says: the answer at its end, and wrong answers that look like it.

References are answers, or whole solutions that end in `#### 42` (GSM8K) or in a box (MATH). The scorers `math` and `math_boxed` read
them by `final_answer`; a rehearsal tries what `near_misses` makes of them. Text only: no mathematics is understood here.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|(-?(?:\d[\d.,/]*\d|\d|[A-Za-z]))(?![\w{]))|\\f?box\s*(\{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LAST_BOXES = 16
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:(?:,|\{,\}|\\[,!]|,\\!)+\d{3})*(?:\.\d+)?")
_PAIR = re.compile(r"([(\[]|\\frac\{)([^,(){}\[\]]+)(,|\}\{)([^,(){}\[\]]+)([)\]}])|()(\d+)([:/])(\d+)()")
_AROUND = re.compile(
    r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[,!;: $%]|\^\{?\\circ\}?|_\{?\d+\}?$|[$%.,~°()\[\]£€+]|\s|\b[A-Za-z]{2,}\b"
)


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Start, end and content of the last boxes of `text`, `\boxed 42` included; a content is None where the text ends inside its box."""
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
    """The answer in a reference; empty where there is none."""
    _, mark, last = reference.rpartition("####")
    if mark:
        return (last.strip().splitlines() or [""])[0].strip()
    boxed = boxes(reference)
    return (boxed[-1][2] or "") if boxed else reference.strip()


def near_misses(answer: str) -> list[str]:
    """Answers that differ from `answer` for sure: its first number, the other sign, its two parts exchanged."""
    bare, misses = re.sub(r"^\$+|\$+$|^\\\(|\\\)$", "", answer.strip()).strip(), list[str]()
    if "####" in bare or len(bare) > 100:
        return []
    numbers = _NUMBER.findall(bare)
    if number := _NUMBER.search(bare):
        before = re.sub(r"^\s*[A-Za-z]\s*=", "", bare[: number.start()])
        rest = _AROUND.sub("", f"{before} {bare[number.end() :]}")
        is_one = len({one.lstrip("0") for one in numbers}) == 1 and not re.search(r"[A-Za-z^!/*]", rest)
        if (rest and not is_one) or re.search(r"[A-Za-z]{2,}", re.sub(r"\\[a-z]+", "", before)):
            misses.append(number[0])
        if not re.search(r"[,=<>:|]|\\(?:pm|text|begin|in|le|ge|cup|mp|mathrm)|\b[a-z]{3,}\b(?<!\\)", bare) and re.search(
            "[1-9]", bare
        ):
            misses.append(bare.removeprefix("-") if bare.startswith("-") else f"-{bare.removeprefix('+')}")
    if (pair := _PAIR.fullmatch(bare)) and [*pair.groups()].count(None) == 5:
        opening, first, middle, second, closing = [part for part in pair.groups() if part is not None]
        if first.strip() != second.strip():
            misses.append(f"{opening}{second.strip()}{middle}{first.strip()}{closing}")
    return misses
