r"""Score mathematics: find the answer in a completion, and compare it with the reference by value.

Answers are compared as text first, and then by their form: lists and sets in any order; tuples, intervals and matrices part by
part; equations up to a factor; numbers exactly; other expressions by their values at several points. An answer that cannot be
parsed is right only if its text agrees with the reference's."""

from __future__ import annotations

import re
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import mpc

from pipelinerl.tasks.final_answer import boxes, final_answer, outside, thoughts
from services.verifier.rewards import expressions
from services.verifier.rewards.expressions import Node, Number, Unreadable, evaluate, inexact, symbols
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer, reference_answer

_TAIL_CHARACTERS = 4000
"""Number of characters at the end of a completion that are searched for an answer outside a box."""
_LONGEST_TEXT = 200
_CLAIM = re.compile(
    r"\b(?:answer|option|choice|result|solution)s?\b(?:[\s*_]{0,9}[:=]|[^.\n:=$\\]{0,60}?\b(?:is|are|be)\b)[\s*_:]{0,99}(?:(?:option|choice)\s)?|####\s{0,9}",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"(?<!\bor)[\s,(]+(?:because|since|as|which|where|when|for|so|if|i\.e\.|that is)\b|[.!?](?:\s|$)|\n", re.IGNORECASE
)
_HEDGE = re.compile(
    r"\b(?:not|never|neither|less|more|least|most|between|either|maybe|perhaps|nor|cannot|than|about|around|wrong|no|but)\b|n't\b",
    re.IGNORECASE,
)
_GIVEN = re.compile(
    r"\W*(?:out of|of|among|given|if|suppose|assume|when|whenever|while|step|case|part|problem|question|exercise)\b[^,]*$",
    re.IGNORECASE,
)
"""Beginning of a sentence that probably repeats the problem, such as `Given`."""
_RETRACTED = re.compile(
    r"\b(?:wait|actually|rather|instead|correction|should be|no,|mistake|correct myself|i think)", re.IGNORECASE
)
_ATOM = (
    r"(?:\d[\d.,]*\d|\d|\\[a-zA-Z]+(?:\s?\{[^{}\n]{0,80}\})*|\{[^{}\n]{0,80}\}|[-+*/^=<>()\[\]!%°×·÷:√π∞±²³$\\_½¼¾]"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z']))"
)
_SPAN = re.compile(rf"{_ATOM}(?:[ \t]{{0,9}}(?:[,;][ \t]{{0,9}})?(?:\b(?:or|and)\b[ \t]{{0,9}})?{_ATOM})*")
_MATH_SPAN = re.compile(r"\$\$[^$]+\$\$|\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_JOINT = re.compile(r"[\s$]*(?:(?:,|;|,?\s*(?:and|or)|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*)")
_CHOICE = re.compile(r"\(([A-J])\)|([A-J])[.):]?|(?:\(([A-J])\)|([A-J])[.):])\s*([^-+*/^=<>\s].*)", re.DOTALL)
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d{1,4}/\d\d?/\d{1,4}")
_MONTH = re.compile(
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?|dec(ember)?"
)


def claims(text: str, *, boxed: bool) -> list[str]:
    """Return the answer that `text` gives, and a later answer that may replace it, if any; [] if `text` gives none. The score
    is 1 only if all returned answers are right."""
    text = re.sub(r"[−–‒]|\b[Nn]egative (?=[\d\\$])|\b[Mm]inus (?=[\d\\$])", "-", outside(thoughts(text), text))
    found, tagged = boxes(text), text.rfind("<answer>")
    if boxed or (found and found[-1][0] > tagged):
        given, end = _joined_boxes(text, found) if found else ("", 0)
        given = given if len(given) <= _TAIL_CHARACTERS else ""
        given = _claimed(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", given)) or given
        if boxed or not given:
            return [given] if given else []
    elif tagged >= 0 and (closed := text.find("</answer>", tagged)) >= 0:
        inner, end = claims(text[tagged + len("<answer>") : closed], boxed=False), closed
        given = inner[0] if inner else ""
    else:
        tail = text[-_TAIL_CHARACTERS:]
        given = _claimed(tail) or (text if len(text) <= _LONGEST_TEXT and _is_whole(text) else "") or _last_span(tail)
        return [given] if given else []
    later = text[end:][-_TAIL_CHARACTERS:]
    retracted = _claimed(later) or (_last_span(later) if _RETRACTED.search(later) else "")
    return [given, retracted] if re.search(r"\d|^\W*[A-J]\W*$", retracted) else [given]


def _joined_boxes(text: str, found: list[tuple[int, int, str | None]]) -> tuple[str, int]:
    """Return the content and end position of the last box, or of the last boxes if only commas, `and` or `or` separate them."""
    start, end, content = found[-1]
    given = content or ""
    for before, closed, earlier in reversed(found[:-1]):
        between = text[closed:start]
        if not given or earlier is None or not _JOINT.fullmatch(between):
            break
        given, start = f"{earlier}{' or ' if 'or' in between else ', '}{given}", before
    return given, end


def _claimed(text: str) -> str:
    *_, match = (None, *_CLAIM.finditer(text))
    if match is None:
        return ""
    rest = text[match.end() :].lstrip()
    if (math := _MATH_SPAN.match(rest)) and re.fullmatch(r"[\s.*]*", rest[math.end() :].split("\n")[0]):
        return math[0]
    rest = _REASON.split(rest, maxsplit=1)[0]
    spans = _spans(rest)
    is_settled = not _is_mathematics(rest) and not re.search(rf"{_HEDGE.pattern}|\bor\b", match[0] + rest, re.IGNORECASE)
    return spans[0] if len(spans) == 1 and is_settled else rest


def _is_whole(text: str) -> bool:
    """Return whether the whole text is an answer: mathematics, words without numbers, or a date."""
    is_answer = not re.search(r"\d", text) or (any(map(_MONTH.fullmatch, _words(text))) and len(_words(text)) < 5)
    return _is_mathematics(text) or ("\n" not in text.strip() and is_answer)


def _spans(sentence: str) -> list[str]:
    spans = [match[0].strip(" .,;:") for match in _MATH_SPAN.finditer(sentence) or ()]
    spans = spans or [match[0].strip(" .,;:") for match in _SPAN.finditer(sentence)]
    return [span for span in spans if re.search(r"\d|\\[a-z]|[=^]", span)]


def _last_span(text: str) -> str:
    """Return the last expression, with its unit, of the last sentence that has one; "" if it hedges or repeats the problem."""
    for sentence in reversed(re.split(r"(?<=[.!?])\s+|\n", text)):
        sentence = re.split(r"\s(?:because|since)\b", sentence)[0]
        if spans := _spans(sentence):
            rest = sentence[sentence.rfind(spans[-1]) :]
            is_given = _GIVEN.match(sentence[: len(sentence) - len(rest)])
            return "" if is_given or _HEDGE.search(sentence) else rest if _is_mathematics(rest) else spans[-1]
    return ""


def _is_mathematics(text: str) -> bool:
    def has_words(node: Any, *, is_label: bool = False) -> bool:
        if not isinstance(node, Node):
            return False
        in_parts = (has_words(part, is_label=node.kind == "relation" and not i) for i, part in enumerate(node.parts))
        return (not is_label or " " in node.name) if node.kind == "text" else any(in_parts)

    try:
        return not has_words(expressions.read(expressions.tidy(text)))
    except Unreadable:
        return False


def _key(text: str) -> str:
    """Return a key of `text` that ignores differences in spaces, braces and the capitals of words."""
    text = re.sub(r"([\^_]|pmod)\{(\w)\}(?!\w)", r"\1\2", text.replace("\x02", ""))
    return re.sub(
        r"[A-Z][a-z]{3,}|(?i:yes|no|true|false)", lambda word: word[0].lower(), re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    )


def _words(text: str) -> list[str]:
    """Return lower-case words without articles and a few verbs; those of a date are sorted."""
    words = re.findall(r"[^\W_]+", re.sub(r"(?<=\d)\s*(?:st|nd|rd|th)\b", "", text.replace("\x02", "").lower()))
    words = [word.removesuffix("s") for word in words if word not in ("the", "a", "an", "there", "is", "are")]
    has_month = any(map(_MONTH.fullmatch, words))
    return sorted(word[:3] if _MONTH.fullmatch(word) else word for word in words) if has_month else words


def same(reference: str, answer: str) -> bool:
    """Return whether two texts are the same answer."""
    a, b = expressions.tidy(reference), expressions.tidy(answer)
    if not a or not b or _key(a) == _key(b):
        return bool(a and b)
    choices = [_CHOICE.fullmatch(text.replace("\x02", "")) for text in (a, b)]
    if any(choices):
        letters = ["".join(filter(None, found.groups()[:4])) if found else "" for found in choices]
        contents = [(found[5] or "") if found else text for found, text in zip(choices, (a, b), strict=True)]
        if all(letters):
            return letters[0] == letters[1] and (not all(contents) or same(*contents))
        return all(contents) and same(*contents)
    if _DATE.fullmatch(a) or _DATE.fullmatch(b):
        return False
    is_prose = all(re.search("[a-z]{3}", text) and not re.search(r"[\\^=<>{}+*/-]", text) for text in (_key(a), _key(b)))
    if is_prose and _words(a) == _words(b):
        return True
    try:
        with expressions.precise():
            return _same(wanted := expressions.read(a), _total(expressions.read(b), wanted))
    except Unreadable:
        return False


def _total(answer: Node, wanted: Node) -> Node:
    """Return the right side of an answer such as `m + n = 7` if a number is wanted, else the whole answer."""
    is_equation = answer.kind == "relation" and answer.name == "=" and _is_sum(answer.parts[0])
    return answer.parts[1] if is_equation and not symbols(wanted) | symbols(answer.parts[1]) else answer


def _is_sum(node: Node) -> bool:
    """Return whether the left side of an equation is only a label: a sum of letters except x, y and z, or a set's size."""
    if node.kind == "+":
        return all((part.kind == "symbol" and part.name not in ("x", "y", "z")) or _is_sum(part) for part in node.parts)
    return node.kind == "call" and node.name == "abs" and node.parts[0].name.isupper()


def _labelled(node: Node) -> tuple[str, Node]:
    """Split an answer such as x = 5 into its label, "" if none, and the rest."""
    if node.kind == "list" and node.parts and node.parts[0].kind == "relation":
        pairs = [_labelled(part) for part in node.parts]
        if all(label == pairs[0][0] or not (label or symbols(value)) for label, value in pairs):
            return pairs[0][0], node._replace(parts=tuple(value for _, value in pairs)) if pairs[0][0] else node
    names = node.name.split()
    if node.kind != "relation" or not {"=", "in", "~"}.issuperset(names):
        return "", node
    parts = list(node.parts[: names.index("~") + 1] if "~" in names else node.parts)
    if "~" in names and abs(1 - inexact(_ratio(*(evaluate(node.parts[i], {}) for i in (len(parts) - 1, len(parts)))))) > 0.01:
        raise Unreadable("not about equal")
    if len(parts) == 2 and _is_label(parts[1]) and not _is_label(parts[0]):
        parts.reverse()
    label = str(parts.pop(0)) if _is_label(parts[0]) and len(parts) > 1 else ""
    if all(_same(parts[0], part) for part in parts[1:]):
        return label, parts[-1]
    return "", node  # its sides differ, as in 41 = 42


def _is_label(node: Node) -> bool:
    if node.kind == "text":
        return not _HEDGE.search(node.name)
    is_segment = node.kind == "*" and all(part.kind == "*" or part.name.isupper() for part in node.parts)  # as AB in AB = 5
    is_composed = (node.kind == "group" or is_segment) and all(map(_is_label, node.parts))
    return is_composed or (node.kind == "symbol" and node.name not in ("e", "i", r"\pi"))


def _variants(node: Node) -> list[Node]:
    """Return two variants of an expression, with the upper and with the lower signs of ± and ∓; one if it has no such sign."""

    def turned(part: Any, signs: dict[str, str]) -> Any:
        if not isinstance(part, Node):
            return part
        return Node(signs.get(part.kind, part.kind), part.name, tuple(turned(inner, signs) for inner in part.parts))

    both = [turned(node, {"pm": plus, "mp": minus}) for plus, minus in ("+-", "-+")]
    return both if both[0] != both[1] else [node]


def _as_interval(node: Node) -> Node:
    """Convert an inequality such as x > 3 or 1 < x ≤ 2 to an interval; return any other node unchanged."""
    infinity = Node("symbol", r"\infty")
    names, parts = _ascending(node) if node.kind == "relation" else ([], [])
    if len(parts) == 2 and parts[1].kind == "symbol":
        parts, names = [*parts, infinity], [*names, "<"]
    elif len(parts) == 2:
        parts, names = [Node("neg", "", (infinity,)), *parts], ["<", *names]
    if len(parts) != 3 or parts[1].kind != "symbol" or not {"<", "<="}.issuperset(names):
        return node
    return Node("group", f"{'(['[names[0] == '<=']}{')]'[names[1] == '<=']}", (parts[0], parts[2]))


def _ascending(relation: Node) -> tuple[list[str], list[Node]]:
    """Return a relation's signs and sides, with the smaller side first: x > 3 becomes 3 < x."""
    names, parts = relation.name.split(), list(relation.parts)
    return ([name.replace(">", "<") for name in names[::-1]], parts[::-1]) if names[0][0] == ">" else (names, parts)


def _same(a: Node, b: Node) -> bool:
    if a == b:
        return True
    (label_a, bare_a), (label_b, bare_b) = _labelled(a), _labelled(b)
    if a.kind == b.kind == "relation":
        is_equation = a.name == b.name == "=" and (label_a != label_b or "relation" in (bare_a.kind, bare_b.kind))
        if is_equation or bare_a.kind == bare_b.kind == "relation":
            return _same_relation(a, b)
    if label_a and label_b and label_a != label_b:
        return False
    if (bare_a, bare_b) != (a, b):
        return _same(bare_a, bare_b)
    if "union" in (a.kind, b.kind) or (a.kind == "relation") is not (b.kind == "relation"):
        a, b = _as_interval(a), _as_interval(b)
    many_a, many_b = _variants(a), _variants(b)
    if len(many_a) + len(many_b) > 2 or {"list", "union"} & {a.kind, b.kind}:
        return _same_sets(a, b)
    if {"group", "matrix", "ratio"} & {a.kind, b.kind}:
        a, b = _as_matrix(a), _as_matrix(b)
        return (a.kind, a.name, len(a.parts)) == (b.kind, b.name, len(b.parts)) and all(map(_same, a.parts, b.parts))
    if "text" in (a.kind, b.kind):
        return a.kind == b.kind and _words(a.name) == _words(b.name)
    return _same_quantity(a, b)


def _as_matrix(node: Node) -> Node:
    if node.kind == "group" and node.name == "[]" and all(row.kind == "group" and row.name == "[]" for row in node.parts):
        return Node("matrix", "", tuple(row._replace(name="row") for row in node.parts))
    return node


def _same_sets(a: Node, b: Node) -> bool:
    """Return whether two sets have the same elements. Inequalities joined by `and` differ from those joined by `or`."""
    is_union = "union" in (a.kind, b.kind)
    parts = [node.parts if node.kind in ("list", "union") else (node,) for node in (a, b)]
    sets = [[variant for part in those for variant in _variants(part)] for those in parts]
    has_inequalities = is_union or any(part.kind == "relation" and part.name != "=" for part in sets[0])
    if (has_inequalities and "and" in (a.name, b.name) and a.name != b.name) or max(map(len, sets)) > 64:
        return False
    first, second = [[_as_interval(part) for part in parts] for parts in sets] if is_union else sets

    def is_same(x: Node, y: Node) -> bool:
        try:
            return _same(x, y)
        except Unreadable:
            return False

    found = [[is_same(x, y) for y in second] for x in first]
    return all(map(any, found)) and all(map(any, zip(*found, strict=True))) and bool(first) is bool(second)


_UNITS: dict[str, str] = dict(re.findall(
    r"(\S+):(\w+)", "cm:centimeter mm:millimeter m:meter km:kilometer kg:kilogram g:gram mg:milligram ml:milliliter l:liter"
    " in:inch inches:inch ft:foot feet:foot yd:yard mi:mile lb:pound oz:ounce hr:hour h:hour min:minute sec:second s:second"
    " metre:meter centimetre:centimeter kilometre:kilometer litre:liter usd:dollar buck:dollar /:per sq:square a:per"
)) | {"mph": "mile per hour", "kph": "kilometer per hour"}  # fmt: skip


def _unit(name: str) -> str:
    words = list[str]()
    for word in name.split():
        if word.startswith("^"):
            words.insert(max(len(words) - 1, 0), "square" if word == "^2" else "cubic")
        elif word not in ("of", "the"):
            singular = word.removesuffix("s") if len(word) > 2 else word
            words.append(_UNITS.get(word) or _UNITS.get(singular, singular))
    return " ".join(words)


def _same_quantity(a: Node, b: Node) -> bool:
    """Compare quantities: two units must agree, 50% equals 50 and 0.5, and 180° equals 180 and pi."""
    names = [node.name if node.kind == "unit" else "" for node in (a, b)]
    if all(names):
        first, second = sorted((f"{_unit(name)} " for name in names), key=len)
        is_longer = second.startswith(first) and not {"per", "square", "cubic"}.intersection(second[len(first) :].split())
        return is_longer and _same(a.parts[0], b.parts[0])
    if not any(names):
        return _same_value(a, b)
    (name, measured, bare) = (names[0], a, b) if names[0] else (names[1], b, a)
    if name in ("%", "degree") and _same_value(a, b):
        return True
    is_share = name == "%" and not symbols(bare) and abs(inexact(evaluate(bare, {}))) < 1
    is_other = measured is b and (is_share or name.startswith("base "))
    return not is_other and _same(measured.parts[0], bare)


def _values(nodes: tuple[Node, ...]) -> Iterator[list[Number]]:
    """Yield the values of all nodes at several points, skipping those with negative coordinates where a value is complex."""
    names = frozenset[str]().union(*map(symbols, nodes))
    if not names:
        yield [evaluate(node, {}) for node in nodes]
    for number, (low, span) in enumerate(((0, 1), (1, 1), (2, 3), (0, 2), (1, 3)) if names else ()):
        seeds = {name: zlib.crc32(f"{name} {number}".encode()) for name in names}
        point = {
            name: (low + span * Fraction(seed % 9973 + 1, 9979)) * (-1 if number > 2 and (seed >> 20) % 3 else 1)
            for name, seed in seeds.items()
        }
        try:
            values = [evaluate(node, point) for node in nodes]
        except Unreadable:
            continue
        if number < 3 or not any(isinstance(value, mpc) and abs(value.imag) > 1e-200 for value in values):
            yield values


def _same_value(a: Node, b: Node) -> bool:
    found = list(_values((a, b)))
    return len(found) >= (2 if symbols(a) | symbols(b) else 1) and all(expressions.agree(x, y) for x, y in found)


def _ratio(a: Number, b: Number) -> Number:
    return a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else inexact(a) / inexact(b)


def _same_relation(a: Node, b: Node) -> bool:
    """Compare equations and inequalities up to a factor, which must be positive for <, ≤, > and ≥."""
    ordered = _ascending(a), _ascending(b)
    signs, sides = [names for names, _ in ordered], [parts for _, parts in ordered]
    if signs[0] != signs[1]:
        return False
    if len(signs[0]) > 1 or {"text", "group", "list", "matrix", "union", "ratio"} & {part.kind for part in a.parts + b.parts}:
        return all(map(_same, *sides))
    found = list(_values(tuple(Node("-", "", tuple(pair)) for pair in sides)))
    if symbols(a) != symbols(b) or len(found) < 3 or any(0 in values for values in found):
        return False
    ratios = [_ratio(*pair) for pair in found]
    is_positive = not isinstance(ratios[0], mpc) and ratios[0] > 0
    return all(expressions.agree(ratios[0], ratio) for ratio in ratios) and (is_positive or signs[0][0] in ("=", "!="))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after `seconds` of CPU time."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, ring)
    # The timer repeats every second, since Python ignores an exception that is raised in a callback of its garbage collector.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@lru_cache(maxsize=4096)
def reference_text(text: str) -> str:
    """Return the answer in a reference. Raises `BadReference` if answers cannot be compared with it."""
    answer = final_answer(outside(thoughts(text), text))
    plain, quoted = expressions.tidy(answer), f"{text[:80]!r}"
    if not re.search(r"\w|\\[a-zA-Z{]", plain):
        raise BadReference("answer", f"{quoted} is not a mathematical expression")
    braces = re.sub(r"\\[{}]", "", answer)
    if braces.count("{") != braces.count("}"):
        raise BadReference("answer", f"{quoted} is not a mathematical expression: its braces do not match")
    try:
        with expressions.precise():
            node = expressions.read(plain)
            if not symbols(node):
                _same_value(node, node)
    except Unreadable as problem:
        if "division by zero" in str(problem):
            raise BadReference("answer", f"{quoted} has no value: {problem}") from problem
        if len(plain) > _LONGEST_TEXT:
            fault = f"{quoted} is not a mathematical expression but a text of {len(text)} characters"
            raise BadReference("answer", f"{fault}; give the answer alone, after #### or in a box") from problem
    return answer


def math_scorer(timeout_s: float, *, boxed: bool = False) -> Scorer:
    r"""Return a scorer that gives 1 if answer and reference are mathematically equal, such as `1/2`, `0.5` and `\frac{1}{2}`.

    The answer is the last box or <answer>, else the text after "the answer is", else the last expression. With `boxed`, only a
    closed `\boxed{...}` counts. A SIGVTALRM timer limits a comparison to a quarter of `timeout_s` in CPU time, so the scorer
    must run on the main thread. After this time, the answer is wrong.
    """

    def score(item: RewardInput) -> Score:
        wanted = reference_text(reference_answer(item))
        if item.answer is None:
            return NO_ANSWER
        if item.completion.strip() and not outside(thoughts(item.completion, item.prompt), item.completion):
            return Score(0.0, "the completion is only a thought")
        try:
            with _alarm(timeout_s / 4):
                found = claims(item.answer, boxed=boxed)
                if not found:
                    return Score(
                        0.0, r"no closed \boxed{} in the answer" if boxed else "no mathematical expression in the answer"
                    )
                if all(same(wanted, claim) for claim in found):
                    return Score(1.0)
        except (TimeoutError, ArithmeticError, RecursionError):
            return Score(0.0, "the answer is too large to compare")
        return Score(0.0, "not equal to the reference answer")

    return score
