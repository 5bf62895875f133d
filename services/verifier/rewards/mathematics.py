r"""Scores an answer of mathematics: finds it in the completion, and compares it with the reference by value.

References are read as LaTeX (`final_answer` finds the answer in a solution). Both sides are compared as a text first, then by their form: lists and
sets in any order, tuples, intervals and matrices part by part, equations up to a factor, numbers exactly, other expressions by their values
to 280 digits at several points. What cannot be read earns nothing unless the texts agree.
"""

from __future__ import annotations

import re
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipelinerl.tasks.final_answer import boxes, final_answer
from services.verifier.rewards.expressions import (
    MOST_CHARACTERS,
    Node,
    Number,
    Unreadable,
    agree,
    evaluate,
    inexact,
    precise,
    read,
    symbols,
    tidy,
)
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer, reference_answer
from mpmath import mpc, mp

_TAIL_CHARACTERS = 4000
"""What is looked at of a completion without a box."""
_LONGEST_TEXT = 200
_THOUGHT = r"(?:think|thinking|thought|reasoning)"
_CLAIM = re.compile(
    r"\b(?:answer|option|choice|result|solution)s?\b(?:[\s*_]*[:=]|[^.\n:=$\\]{0,60}?\b(?:is|are|be)\b)[\s*_:]*|####\s*", re.IGNORECASE
)
_REASON = re.compile(r"[\s,(]+(?:because|since|as|which|where|when|for|so|if|i\.e\.|that is)\b|\.(?:\s|$)|[!?\n]", re.IGNORECASE)
_HEDGE = re.compile(r"\b(?:not|never|neither|less|more|least|most|between|either|maybe|perhaps|nor|cannot|than|about|around)\b|n['’]t\b", re.IGNORECASE)
_RETRACTED = re.compile(r"\b(?:wait|actually|rather|instead|correction|should be|no,|mistake|correct myself)", re.IGNORECASE)
_ATOM = r"(?:\d[\d.,]*\d|\d|\\[a-zA-Z]+(?:\s*\{[^{}\n]{0,80}\})*|\{[^{}\n]{0,80}\}|[-+*/^=()\[\]!%°:√π∞±²³$\\_½¼¾]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
_SPAN = re.compile(rf"{_ATOM}(?:[ \t]*(?:,[ \t]*|;[ \t]*|\b(?:or|and)\b[ \t]*)?{_ATOM})*")
_MATH_SPAN = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_CHOICE = re.compile(r"\(([A-J])\)|([A-J])[.):]?|(?:\(([A-J])\)|([A-J])[.):])\s*([^-+*/^=<>\s].*)", re.DOTALL)


def thoughtless(text: str) -> str:
    """`text` without the thoughts in it; nothing of one that the text ends in."""
    ends = [match.end() for match in re.finditer(rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷", text)]
    text = text[ends[-1] :] if ends else text
    return re.split(rf"<{_THOUGHT}>|\[THINK\]|◁think▷", text, maxsplit=1)[0]


def _boxed(text: str) -> tuple[str | None, int]:
    """What the last box says, and where it ends; boxes that only commas, `and` or `or` part are one list."""
    found = boxes(text)
    if not found:
        return None, 0
    _, end, content = found[-1]
    position, contents = len(found) - 1, [content]
    while content is not None and position > 0 and found[position - 1][2] is not None:
        between = text[found[position - 1][1] : found[position][0]]
        connector = re.fullmatch(r"[\s$]*(,|;|,?\s*(?:and|or)|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*", between)
        if connector is None:
            break
        contents.insert(0, found[position - 1][2])
        contents.insert(1, " or " if "or" in connector[1] else ", ")
        position -= 1
    return (None if content is None else "".join(filter(None, contents))), end


def claims(text: str, *, boxed: bool) -> list[str]:
    """What `text` gives as its answer: all of it has to be right. Empty where there is none."""
    text = re.sub("[−–‒]", "-", thoughtless(text))
    box, end = _boxed(text)
    if boxed:
        return [box] if box else []
    tagged = re.findall(r"<answer>((?:(?!</?answer>).)*)</answer>", text[-_TAIL_CHARACTERS:], re.DOTALL)
    if tagged and not (found := boxes(text)) or tagged and found and text.rfind("<answer>") > found[-1][0]:
        return claims(tagged[-1], boxed=False)
    if found := boxes(text):
        if not box:
            return []
        later = text[end:][-_TAIL_CHARACTERS:]
        told = _told(later)
        if told is None and _RETRACTED.search(later):
            told = _last_span(later)
        return [box, told] if told and re.search(r"\d|^\W*[A-J]\W*$", told) else [box]
    tail = text[-_TAIL_CHARACTERS:]
    told = _told(tail)
    if told is None and len(text) <= _LONGEST_TEXT:
        whole = tidy(text)
        try:
            if read(whole).kind != "text" or not re.search(r"\d", whole):
                return [text]
        except Unreadable:
            if "\n" not in text.strip() and not re.search(r"\d", text):
                return [text]
    told = told or _last_span(tail)
    return [told] if told else []


def _told(text: str) -> str | None:
    """What follows the last "the answer is"."""
    match = None
    for match in _CLAIM.finditer(text):
        pass
    if match is None:
        return None
    rest = text[match.end() :].lstrip()
    if (math := _MATH_SPAN.match(rest)) and math.end() == len(rest.rstrip(" .*")):
        return rest[: math.end()]
    end = _REASON.search(rest)
    rest = rest[: end.start()] if end else rest
    try:
        node = read(tidy(rest))
        if node.kind != "text":
            return rest
    except Unreadable:
        pass
    if _HEDGE.search(match[0] + rest):
        return rest
    spans = _spans(rest)
    return spans[0] if len(spans) == 1 else rest


def _spans(sentence: str) -> list[str]:
    spans = [match[0].strip(" .,;:") for match in _MATH_SPAN.finditer(sentence)] or [match[0].strip(" .,;:") for match in _SPAN.finditer(sentence)]
    return [span for span in spans if re.search(r"\d|\\[a-z]|[=^]", span)]


def _last_span(text: str) -> str | None:
    """The last mathematics of the last sentence that has any."""
    for sentence in reversed(re.split(r"(?<=[.!?])\s+|\n", text)):
        if spans := _spans(sentence):
            rest = sentence[sentence.rfind(spans[-1]) :]
            return None if _HEDGE.search(sentence) else (rest if _is_readable(rest) else spans[-1])
    return None


def _is_readable(text: str) -> bool:
    try:
        return read(tidy(text)).kind != "text"
    except Unreadable:
        return False


# --- comparing


def _key(text: str) -> str:
    """Of a text: what has to agree where it is not read as mathematics."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.replace("\x02", "")).replace("\\{", "{").replace("\\}", "}")
    return re.sub(r"[A-Za-z]{2,}", lambda word: word[0].lower(), text).replace(r"\frac", "frac")


_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()


def _words(text: str) -> list[str]:
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text.replace("\x02", "").lower()))
    words = [word for word in words if word not in ("the", "a", "an")]
    months = [word[:3] if word[:3] in _MONTHS and len(word) > 2 else word for word in words]
    return sorted(months) if months != words or any(word in _MONTHS for word in words) else words


def same(reference: str, answer: str) -> bool:
    """Whether two answers, as texts, are the same."""
    a, b = tidy(reference), tidy(answer)
    if not a or not b:
        return False
    if _key(a) == _key(b):
        return True
    choices = [_CHOICE.fullmatch(re.sub(r"\x02", "", text)) for text in (a, b)]
    if any(choices):
        letters, contents = zip(*(_choice(choice, text) for choice, text in zip(choices, (a, b), strict=True)), strict=True)
        if all(letters):
            return letters[0] == letters[1] and (not all(contents) or same(*contents))
        return all(contents) and same(*contents)
    try:
        left, right = read(a), read(b)
    except Unreadable:
        left = right = Node("text", "")
    if "text" in (left.kind, right.kind):
        is_text = all(re.search(r"[A-Za-z]{2}", text.replace("\x02", "")) and not re.search(r"[\\^=<>{}+*/-]", text) for text in (a, b))
        return is_text and _words(a) == _words(b)
    with precise():
        return _same(left, right)


def _choice(found: re.Match[str] | None, text: str) -> tuple[str, str]:
    if found is None:
        return "", text
    return next(filter(None, found.groups()[:4])), found[5] or ""


def _labelled(node: Node) -> tuple[str, Node]:
    """The name that an answer gives itself (x = 5, f(x) = 2x, x in an interval), and the rest. Raises `Unreadable` for 41 = 42."""
    if node.kind == "list" and node.parts and node.parts[0].kind == "relation":
        pairs = [_labelled(part) for part in node.parts]
        label = pairs[0][0]
        if label and all(pair[0] in (label, "") and not (pair[0] == "" and symbols(pair[1])) for pair in pairs):
            return label, Node("list", node.name, tuple(pair[1] for pair in pairs))
    if node.kind == "relation":
        names = node.name.split()
        if set(names) <= {"=", "in"}:
            first, *rest = node.parts
            if not _is_label(first) and _is_label(rest[-1]) and len(rest) == 1:
                first, rest = rest[0], [first]
            if _is_label(first):
                if not _all_same(rest):
                    raise Unreadable("unequal sides")
                return str(first), rest[-1]
            if _all_same(node.parts):
                return "", node.parts[-1]
            if len(node.parts) > 2 or not symbols(node):
                raise Unreadable("unequal sides")
        elif names[-1] == "~" and set(names) <= {"=", "~"}:
            exact = node.parts[: names.index("~") + 1]
            label, value = _labelled(Node("relation", "= " * (len(exact) - 1), exact)) if len(exact) > 1 else ("", exact[0])
            return label, value
    return "", node


def _is_label(node: Node) -> bool:
    is_function = node.kind == "call" and node.name in ("f", "g", "h", "prime")
    return (node.kind == "symbol" and node.name not in ("e", "i", r"\pi")) or is_function or node.kind == "text"


def _all_same(parts: Any) -> bool:
    return all(_same(parts[0], part) for part in parts[1:])


def _variants(node: Node) -> list[Node]:
    """Both of an expression with a plus-minus sign."""
    def turned(node: Any, sign: str) -> Any:
        if not isinstance(node, Node):
            return node
        kind = {"pm": sign, "mp": "-" if sign == "+" else "+"}.get(node.kind, node.kind)
        return Node(kind, node.name, tuple(turned(part, sign) for part in node.parts))

    both = [turned(node, sign) for sign in "+-"]
    return both if both[0] != both[1] else [node]


def _as_interval(node: Node) -> Node:
    """An inequality of one variable, alone on its side, as the interval that it means."""
    infinity = Node("symbol", r"\infty")
    if node.kind == "list" and node.name == "or":
        return Node("union", "", tuple(map(_as_interval, node.parts)))
    if node.kind != "relation" or not {"<", "<=", ">", ">="}.issuperset(names := node.name.split()):
        return node
    parts = list(node.parts)
    if names[0][0] == ">":
        parts, names = parts[::-1], [name.replace(">", "<") for name in reversed(names)]
    if len(parts) == 2 and parts[0].kind == "symbol":
        parts, names = [Node("neg", "", (infinity,)), *parts], ["<", *names]
    elif len(parts) == 2:
        parts, names = [*parts, infinity], [*names, "<"]
    if len(parts) != 3 or parts[1].kind != "symbol" or not {"<", "<="}.issuperset(names):
        return node
    return Node("group", ("[" if names[0] == "<=" else "(") + ("]" if names[1] == "<=" else ")"), (parts[0], parts[2]))


def _same(a: Node, b: Node) -> bool:
    if a == b:
        return True
    (label_a, bare_a), (label_b, bare_b) = _labelled(a), _labelled(b)
    if label_a and label_b and label_a != label_b:
        return a.kind == b.kind == "relation" and _same_relation(a, b)
    if label_a or label_b or (bare_a, bare_b) != (a, b):
        return _same(bare_a, bare_b)
    if "union" in (a.kind, b.kind) or (a.kind == "relation") is not (b.kind == "relation"):
        a, b = _as_interval(a), _as_interval(b)
    (a, *more_a), (b, *more_b) = _variants(a), _variants(b)
    if more_a or more_b or "list" in (a.kind, b.kind) or "union" in (a.kind, b.kind):
        return _same_sets(Node("list", a.name, (a, *more_a)) if more_a else a, Node("list", b.name, (b, *more_b)) if more_b else b)
    if a.kind == b.kind == "relation":
        return _same_relation(a, b)
    if a.kind in ("group", "matrix", "ratio") or b.kind in ("group", "matrix", "ratio"):
        a, b = _as_matrix(a), _as_matrix(b)
        return (a.kind, a.name, len(a.parts)) == (b.kind, b.name, len(b.parts)) and all(map(_same, a.parts, b.parts))
    if a.kind == "text" or b.kind == "text":
        return a.kind == b.kind and _words(a.name) == _words(b.name)
    return _same_quantity(a, b)


def _as_matrix(node: Node) -> Node:
    rows = node.parts
    if node.kind == "group" and node.name == "[]" and all(row.kind == "group" and row.name == "[]" for row in rows):
        return Node("matrix", "", tuple(Node("group", "row", row.parts) for row in rows))
    return node


def _same_sets(a: Node, b: Node) -> bool:
    elements = []
    for node in (a, b):
        parts = node.parts if node.kind in ("list", "union") else (node,)
        elements.append([one for part in parts for one in _variants(part)])
    if any(len(those) > 64 for those in elements) or not all(elements):
        return not any(elements)
    has_inequalities = any(part.kind == "relation" and "=" not in part.name.split() for part in elements[0])
    if has_inequalities and {a.name, b.name} == {"and", "or"}:
        return False
    if "union" in (a.kind, b.kind):
        elements = [[_as_interval(part) for part in those] for those in elements]
        if "and" in (a.name, b.name):
            return False
    (first, second) = elements
    if not (len(first) == len(second) or "text" not in {part.kind for part in first}):
        return False
    return all(any(_same(x, y) for y in second) for x in first) and all(any(_same(x, y) for x in first) for y in second)


_UNITS = {
    "cm": "centimeter", "mm": "millimeter", "m": "meter", "km": "kilometer", "kg": "kilogram", "g": "gram", "mg": "milligram", "ml": "milliliter",
    "l": "liter", "in": "inch", "inches": "inch", "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "lb": "pound", "oz": "ounce",
    "hr": "hour", "h": "hour", "min": "minute", "sec": "second", "s": "second", "metre": "meter", "centimetre": "centimeter", "usd": "dollar",
    "kilometre": "kilometer", "litre": "liter", "mph": "mile per hour", "/": "per", "sq": "square", "cubic": "cubic", "rad": "radian", "buck": "dollar",
}  # fmt: skip


def _unit(name: str) -> str:
    words = []
    for word in name.split():
        if word.startswith("^"):
            words.insert(max(len(words) - 1, 0), "square" if word == "^2" else "cubic")
        elif word not in ("of", "the"):
            singular = word if len(word) < 3 or word in ("inches",) else word.removesuffix("s")
            words.append(_UNITS.get(word, _UNITS.get(singular, singular)))
    return " ".join(words)


def _same_quantity(a: Node, b: Node) -> bool:
    """Of two with units these have to agree; of one with a unit, the other may leave it out. A percent sign and degrees have a value too."""
    units = [node.name if node.kind == "unit" else "" for node in (a, b)]
    if all(units):
        return _unit(units[0]) == _unit(units[1]) and _same(a.parts[0], b.parts[0])
    if any(units):
        bare, other, name = (a.parts[0], b, units[0]) if units[0] else (b.parts[0], a, units[1])
        if name in ("%", "degree"):
            if _same_value(a, b):
                return True
            if name == "%" and symbols(other) == frozenset() and abs(inexact(evaluate(other, {}))) < 1:
                return bool(units[0]) and _same(bare, other)
        return _same(bare, other)
    return _same_value(a, b)


def _points(names: frozenset[str]) -> Iterator[dict[str, Number]]:
    """Values of the variables: positive ones, small and large, then of either sign."""
    for number, (low, span, signs) in enumerate(((0, 1, False), (1, 1, False), (2, 3, False), (0, 2, True), (1, 3, True))):
        point = {}
        for name in names:
            seed = zlib.crc32(f"{name} {number}".encode())
            sign = -1 if signs and (seed >> 20) % 3 else 1
            point[name] = sign * (low + span * Fraction(seed % 9973 + 1, 9979))
        yield point


def _values(nodes: tuple[Node, ...], names: frozenset[str]) -> Iterator[list[Number]]:
    """Of all nodes at each point at which they have values; those of points with negative coordinates only if all are real."""
    for number, point in enumerate(_points(names)):
        try:
            values = [evaluate(node, point) for node in nodes]
        except Unreadable:
            if not names:
                raise
            continue
        if number < 3 or not any(isinstance(value, mpc) and abs(value.imag) > mp.eps * 2**40 for value in values):
            yield values
        if not names:
            return


def _same_value(a: Node, b: Node) -> bool:
    names = symbols(a) | symbols(b)
    found = list(_values((a, b), names))
    return len(found) >= min(2, 1 + len(names)) and all(agree(x, y) for x, y in found)


def _same_relation(a: Node, b: Node) -> bool:
    """Up to a factor, which is positive where the order counts."""
    signs = [node.name.replace("in", "=") for node in (a, b)]
    sides = [node.parts for node in (a, b)]
    for number, sign in enumerate(signs):
        if sign.startswith(">"):
            signs[number], sides[number] = " ".join(reversed(sign.replace(">", "<").split())), sides[number][::-1]
    if signs[0] != signs[1]:
        return False
    if len(sides[0]) != 2 or any(side.kind not in ("symbol", "number", "+", "-", "*", "/", "^", "neg", "call", "unit") for pair in sides for side in pair):
        return all(map(_same, *sides))
    names, ratios = symbols(a) | symbols(b), list[Number]()
    if symbols(a) != symbols(b) or not names:
        return False
    for left, right in _values(tuple(Node("-", "", pair) for pair in sides), names):
        if left == 0 or right == 0:
            return False
        if not isinstance(left, Fraction) or not isinstance(right, Fraction):
            left, right = inexact(left), inexact(right)
        ratios.append(left / right)
    if len(ratios) < 3 or not all(agree(ratios[0], ratio) for ratio in ratios[1:]):
        return False
    return signs[0] in ("=", "!=", "==") or (not isinstance(ratios[0], mpc) and ratios[0] > 0)


# --- the scorer


class _TooSlow(Exception):
    pass


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@lru_cache(maxsize=4096)
def reference_text(text: str) -> str:
    """The answer in a reference. Raises `BadReference` where none can be marked."""
    answer = final_answer(thoughtless(text))
    plain = tidy(answer)
    depth = re.sub(r"\\[{}]", "", answer)
    if not plain or not re.search(r"\w|\\[a-zA-Z{]", plain):
        raise BadReference("answer", f"{text[:80]!r} is not a mathematical expression")
    if depth.count("{") != depth.count("}"):
        raise BadReference("answer", f"{text[:80]!r} is not a mathematical expression: its braces are not in pairs")
    try:
        node = read(plain)
        if not symbols(node) and node.kind in ("number", "+", "-", "*", "/", "^", "neg", "call"):
            with precise():
                evaluate(node, {})
    except Unreadable as problem:
        if "division by zero" in str(problem):
            raise BadReference("answer", f"{text[:80]!r} has no value: {problem}") from problem
        if len(plain) > _LONGEST_TEXT:
            fix = "give the answer alone, after ####, or in a box"
            raise BadReference("answer", f"{text[:80]!r} ... is not a mathematical expression but a text of {len(text)} characters; {fix}") from problem
    return answer


def math_scorer(timeout_s: float, *, boxed: bool = False) -> Scorer:
    r"""1 when the answer and the reference are equal as mathematics: `1/2`, `0.5` and `\frac{1}{2}` are one answer.

    It takes the last box, or what follows "the answer is", or the last expression. With `boxed`, only what the last `\boxed{...}` holds
    counts; a text without it, or cut inside it, is wrong. Thoughts in `<think>` are never an answer.

    A comparison that takes too long is interrupted by SIGALRM, well before `timeout_s`, so this runs on a process's main thread.
    """

    def score(item: RewardInput) -> Score:
        wanted = reference_text(reference_answer(item))
        if item.answer is None:
            return NO_ANSWER
        try:
            with _alarm(timeout_s / 4):
                found = [claim for claim in claims(item.answer, boxed=boxed) if len(claim) <= MOST_CHARACTERS]
                if not found:
                    return Score(0.0, r"no closed \boxed{} in the answer" if boxed else "no mathematical expression in the answer")
                if all(same(wanted, claim) for claim in found):
                    return Score(1.0)
        except (_TooSlow, Unreadable, ArithmeticError, RecursionError):
            pass
        return Score(0.0, "not equal to the reference answer")

    return score
