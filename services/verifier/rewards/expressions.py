r"""Reads mathematics as people and models write it, in LaTeX or plainly, into a tree, and evaluates it.

`read` turns `\frac{1}{2}`, `x^2 + 1`, `(3, 4]` or `18 dollars` into a `Node`; `evaluate` gives the value of one: an exact fraction where it
is one, otherwise a number of 300 digits. Nothing is evaluated while it is read, and what would be too large is refused, since the text
may be hostile. Whether two trees are the same answer is decided in `services.verifier.rewards.mathematics`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from mpmath import mp, mpc, mpf

MOST_CHARACTERS = 2000
"""Length of a text that is read; no answer is longer."""
_DEEPEST = 40
_EXACT_BITS = 65_536
"""Size of exact numbers: 2004! has 19,000 bits."""
_PRECISION_BITS, _RANGE_BITS, _EQUAL_BITS = 1000, 450, 930
"""Precision of other numbers, the range of their exponents, and how many bits have to agree."""

Number = Any
"""A `Fraction`, or an `mpf` or `mpc` of `mpmath`."""


class Unreadable(ValueError):
    """The text is no mathematics that is known here, or its value is too large to compute."""


class Node(NamedTuple):
    """`kind` is an operation (`+`, `*`, `/`, `^`, `call`, ...), a leaf (`number`, `symbol`, `text`), or a form of several parts (`list`,
    `group`, `relation`, `union`, `matrix`, `unit`). `name` tells forms of one kind apart; `parts` are nodes, or a leaf's value."""

    kind: str
    name: str
    parts: tuple[Any, ...] = ()


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_UNICODE = {
    "−": "-", "–": "-", "‒": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "±": r"\pm ", "∞": r"\infty ",
    "π": r"\pi ", "√": r"\sqrt ", "°": r"^\circ ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "⟨": r"\langle ", "⟩": r"\rangle ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "½": " 1/2 ",
    "¼": " 1/4 ", "¾": " 3/4 ", "⅓": " 1/3 ", "⅔": " 2/3 ", "’": "'", "£": r"\pounds ", "€": r"\euro ", "∓": r"\mp ", "％": r"\%",
}  # fmt: skip
_MARKED = "\x02"
"""Stands before each letter that `\\text` makes a word's."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|texttt|textsf|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname\*?|bf|rm)\s*\{([^{}]*)\}")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{array}"),
        (r"\\(?:displaystyle|textstyle|limits|left\s*\.|right\s*\.|left(?![a-z])|right(?![a-z])|[bB]igg?[lrm]?(?![a-z])|mathbf|bf|rm)", ""),
        (r"\\(?:dfrac|tfrac|cfrac)(?![a-z])", r"\\frac"),
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"\\(?:pounds|euro)\s*(-?\d[\d.,]*)", r" \1 pounds "),
        (r"(?:\\\$|(?<![\d$])\$)\s*(-?\d[\d.,]*)((?:\s*(?:thousand|million|billion|trillion)\b)?)(?!.*\$)", r" \1\2 dollars "),
        (r"\\\$|\$|\\[()](?![a-z])|\\\[|\\\]", " "),
        (r"(?<![\d.,])(?:(?<![(\[{])|(?<=\{)(?<!\\\{))(\d{1,3})(,|\\[,;: ]|~|\s|_)\d{3}(?:\2\d{3})*(?!,?\d)", lambda found: re.sub(r"\D", "", found[0])),
        (r"\\(?:,|;|:|>|quad|qquad|hspace\{[^{}]*\}|phantom\{[^{}]*\})|~|(?<!\\)\\(?=\s)", " "),
        (r"(?<=[\d)])\s*(?:\\cdot|\\times|x|X)\s*(?=10\s*\^)", r"\\times "),
        (r"\*\*(?=[-\w(])(?<=[\w)]\*\*)|\*\*(?=\{)", "^"),
        (r"\*\*|`", " "),
    )
]
_SETS = (r"\mathbb{R}", r"\mathbb R", r"\Bbb{R}", r"\R")


def tidy(text: str) -> str:
    """`text` with one spelling for each thing: no spacing, no dollar signs of mathematics, no separators of thousands."""
    text = re.sub(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+", lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = "".join(_UNICODE.get(letter, letter) for letter in text)
    for _ in range(3):
        text = _TEXT.sub(_words, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return re.sub(r"(?<![\d\x02a-zA-Z])\s+|\s+(?![\d\x02a-zA-Z])", " ", text).strip().rstrip(".;:,!").strip()


def _words(found: re.Match[str]) -> str:
    content, is_math = found[1], not found[0].startswith((r"\text", r"\mbox", r"\hbox"))
    if is_math and len(content.strip()) == 1:
        return f"{content.strip()} "
    if is_math and content.strip() in _FUNCTIONS:
        return rf"\{content.strip()} "
    if re.fullmatch(r"\W*[A-Z]\W*", content):
        return content
    return f" {re.sub('[A-Za-z]', lambda letter: _MARKED + letter[0], content)} "


_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "asin", "acos", "atan",
    "log", "ln", "lg", "exp", "sqrt", "cbrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm", "det",
}  # fmt: skip
_SHORT_WORDS = {
    "cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "yd", "mi", "lb", "lbs", "oz", "hr", "hrs", "mph", "kph", "am", "pm", "AM", "PM", "sq",
    "is", "of", "an", "we", "it", "my", "no", "No", "as", "by", "at", "be", "he", "if", "on", "in", "We", "It", "So", "so", "do", "us", "kmh",
    "GB", "MB", "why", "my", "Hz", "kHz", "ms", "rpm", "pts", "st", "nd", "rd", "th", "dm", "cc", "hm", "pt", "qt", "Mr", "Ms", "up", "me",
}  # fmt: skip
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=",
    r"\geqslant": ">=", "<=": "<=", ">=": ">=", "!=": "!=", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\in": "in", r"\equiv": "==",
    r"\to": "->", r"\mapsto": "->", r"\rightarrow": "->", "==": "=",
}  # fmt: skip
_OPEN = {"(": ")", "[": ")", r"\{": r"\}", r"\lbrace": r"\rbrace", r"\langle": r"\rangle", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_CLOSE = {")", "]", r"\}", r"\rbrace", r"\rangle", "}", r"\rfloor", r"\rceil"}
_TOKEN = re.compile(
    r"\s+|(?:\x02[A-Za-z])+|\d+(?:\.\d+)?(?:[eE][-+]?\d+(?![\dA-Za-z.]))?|\.\d+|\\[A-Za-z]+|\\.|<=|>=|!=|==|->|[A-Za-z]+|.", re.DOTALL
)
_SYMBOLS = {"alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "vartheta", "lambda", "mu", "nu", "rho", "sigma", "tau", "phi",
            "varphi", "omega", "Omega", "Delta", "Gamma", "Sigma", "Phi", "psi", "eta", "zeta", "xi", "kappa", "chi", "ell", "pi", "infty",
            "emptyset", "varnothing", "ldots", "dots", "cdots"}  # fmt: skip
_MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNITS = {
    "not", "no", "or", "and", "more", "less", "fewer", "than", "least", "most", "wrong", "incorrect", "below", "above", "under", "over", "off", "half",
    "halves", "third", "thirds", "quarter", "fourth", "fourths", "fifth", "fifths", "sixth", "eighth", "eighths", "tenth", "tenths", "hundredth",
    "to", "minus", "plus", "times", "squared", "cubed", "point", "but", "dozen", "maybe", "then", "if", "is", "pairs", "score", "hundreds",
    "thousandths", "hundredths", "was", "isn", "never", "greater", "larger", "smaller", "divided", "modulo", "mod", "base", "approximately", "either",
}  # fmt: skip


def _tokens(text: str) -> list[str]:
    """Words keep the mark; single letters, numbers, commands and signs stand for themselves; spaces go."""
    found = list[str]()
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.isspace():
            continue
        if token.startswith(_MARKED):
            word = token.replace(_MARKED, "")
            found.append({"and": "and", "or": "or"}.get(word.lower(), _MARKED + word))
        elif token.isalpha() and len(token) > 1:
            found += _letters(token)
        else:
            found.append(token)
    return found


def _letters(run: str) -> list[str]:
    if run in ("and", "or"):
        return [run]
    if run in _FUNCTIONS or run in _SYMBOLS:
        return ["\\" + run]
    if run in ("oo", "inf", "infinity"):
        return [r"\infty"]
    if run in _SHORT_WORDS or (len(run) > 2 and re.search("[aeiouyAEIOUY]", run) and not re.fullmatch("[a-dxyzA-Z]+", run)):
        return [_MARKED + run]
    for name in sorted(_FUNCTIONS, key=len, reverse=True):
        if run.startswith(name):
            return ["\\" + name, *run[len(name) :]]
    if run.endswith("pi") and len(run) <= 4:
        return [*run[:-2], r"\pi"]
    return [*run]


class _Reader:
    """Recursive descent: a list of relations of unions of sums of products of powers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth, self._in_bars = tokens, 0, 0, 0

    def all(self) -> Node:
        node = self._items()
        if self._at < len(self._tokens):
            raise Unreadable(f"{self._peek()!r} is out of place")
        return node

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[self._at + ahead] if self._at + ahead < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if not token or (wanted and token not in wanted):
            raise Unreadable(f"{token!r} where {' or '.join(wanted) or 'more'} is needed")
        self._at += 1
        return token

    def _items(self) -> Node:
        items, how = [self._relation()], ""
        while self._peek() in (",", ";", "and", "or"):
            separator = self._take()
            if separator in (",", ";") and self._peek() in ("and", "or"):
                separator = self._take()
            how = separator if separator in ("and", "or") else how
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("list", how, tuple(items))

    def _relation(self) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("nested too deeply")
        parts, operators = [self._ratio()], list[str]()
        while (operator := _RELATIONS.get(self._peek())) is not None:
            self._take()
            operators.append(operator)
            parts.append(self._ratio())
        self._depth -= 1
        return Node("relation", " ".join(operators), tuple(parts)) if operators else parts[0]

    def _ratio(self) -> Node:
        parts = [self._union()]
        while self._peek() == ":":
            self._take()
            parts.append(self._union())
        return Node("ratio", "", tuple(parts)) if len(parts) > 1 else parts[0]

    def _union(self) -> Node:
        parts = [self._with_unit()]
        while self._peek() in (r"\cup", r"\bigcup"):
            self._take()
            parts.append(self._with_unit())
        return Node("union", "", tuple(parts)) if len(parts) > 1 else parts[0]

    def _with_unit(self) -> Node:
        """A sum with the words after it; a percent sign and degrees are units too."""
        if self._peek().startswith(_MARKED):
            return self._text()
        node, words = self._sum(), list[str]()
        while self._peek().startswith(_MARKED) or (words and self._peek() in ("/", "^", "a")):
            token = self._take()
            if token.startswith(_MARKED):
                words.append(token[1:].lower())
            elif token == "^":
                is_braced = self._peek() == "{" and bool(self._take())
                words.append("^" + self._take("2", "3"))
                if is_braced:
                    self._take("}")
            else:
                words.append(token)
        while words and words[0] in _MULTIPLIERS:
            node = Node("*", "", (node, Node("number", "", (Fraction(10) ** _MULTIPLIERS[words.pop(0)],))))
        if _NO_UNITS.intersection(words):
            raise Unreadable(f"{' '.join(words)!r} after a number")
        if words == ["percent"]:
            words = ["%"]
        if words in (["degrees"], ["degree"]):
            return Node("unit", "degree", (node,))
        return Node("unit", " ".join(words), (node,)) if words else node

    def _text(self) -> Node:
        words = list[str]()
        while (token := self._peek()) and (token.startswith(_MARKED) or (token not in _RELATIONS and token not in ("and", "or", ",", ";"))):
            if token in _CLOSE or token in _OPEN:
                raise Unreadable("words and mathematics in one")
            words.append(self._take().removeprefix(_MARKED).lower())
        return Node("text", " ".join(words))

    def _sum(self) -> Node:
        node = self._product()
        while (sign := self._peek()) in ("+", "-", r"\pm", r"\mp"):
            self._take()
            node = Node(sign.removeprefix("\\"), "", (node, self._product()))
        return node

    def _product(self) -> Node:
        """Also where nothing stands between the factors."""
        node = self._signed()
        while True:
            token = self._peek()
            if token in ("*", r"\cdot", r"\times", r"\ast"):
                self._take()
                node = Node("*", "", (node, self._signed()))
            elif token in ("/", r"\div"):
                self._take()
                node = Node("/", "", (node, self._signed()))
            elif self._begins_factor(token):
                if token[0].isdigit() and self._tokens[self._at - 1][0].isdigit():
                    node = self._mixed(node)
                else:
                    right = self._power()
                    is_mixed = token == r"\frac" and self._is_whole(node) and self._is_proper(right)
                    node = Node("+" if is_mixed else "*", "", (node, right))
            else:
                return node

    def _mixed(self, whole: Node) -> Node:
        """As in 1 1/2."""
        top = Node("number", "", (Fraction(self._take()),))
        self._take("/")
        right = Node("/", "", (top, self._power()))
        if not (self._is_whole(whole) and self._is_proper(right)):
            raise Unreadable("two numbers side by side")
        return Node("+", "", (whole, right))

    @staticmethod
    def _is_whole(node: Node) -> bool:
        return node.kind == "number" and node.parts[0].denominator == 1

    def _is_proper(self, node: Node) -> bool:
        return node.kind == "/" and all(map(self._is_whole, node.parts)) and 0 < node.parts[0].parts[0] < node.parts[1].parts[0]

    def _begins_factor(self, token: str) -> bool:
        if token == "|":
            return not self._in_bars
        is_command = token.startswith("\\") and token[1:] in (*_FUNCTIONS, *_SYMBOLS, "frac", "sqrt", "binom", "dbinom", "tbinom", "begin", "mathbb")
        return bool(token) and (token[0].isalnum() and token not in ("and", "or") or token in ("(", "{", "[", r"\lfloor", r"\lceil", r"\{") or is_command)

    def _signed(self) -> Node:
        sign = self._peek()
        if sign in ("-", "+", r"\pm", r"\mp"):
            self._take()
            self._depth += 1
            if self._depth > _DEEPEST:
                raise Unreadable("nested too deeply")
            node = self._signed_product() if sign in ("-", "+") else self._signed()
            self._depth -= 1
            if sign == "+":
                return node
            return Node("neg", "", (node,)) if sign == "-" else Node(sign[1:], "", (Node("number", "", (Fraction(0),)), node))
        return self._power()

    def _signed_product(self) -> Node:
        """What a sign stands before: also the fraction of a mixed number, so that -1 1/2 is less than -1."""
        if self._peek() in ("-", "+", r"\pm", r"\mp"):
            return self._signed()
        node = self._power()
        token = self._peek()
        if token and token[0].isdigit() and self._tokens[self._at - 1][0].isdigit():
            return self._mixed(node)
        if token == r"\frac" and self._is_whole(node):
            right = self._power()
            return Node("+" if self._is_proper(right) else "*", "", (node, right))
        return node

    def _power(self) -> Node:
        node = self._primary()
        while True:
            token = self._peek()
            if token == "!" and self._peek(1) != "=":
                self._take()
                node = Node("call", "factorial", (node,))
            elif token in (r"\%", "%"):
                self._take()
                node = Node("unit", "%", (node,))
            elif token == "^":
                self._take()
                node = self._raised(node)
            elif token == "'":
                self._take()
                node = Node("call", "prime", (node,))
            else:
                return node

    def _raised(self, node: Node) -> Node:
        is_braced = self._peek() == "{" and self._peek(1) == r"\circ"
        if is_braced or self._peek() == r"\circ":
            self._at += 3 if is_braced else 1
            return Node("unit", "degree", (node,))
        return Node("^", "", (node, self._argument(signed=True)))

    def _argument(self, *, signed: bool = False) -> Node:
        r"""Of a command: what stands in braces, or one digit or letter; \frac12 has two. After ^ a whole number, and a power of it."""
        token = self._peek()
        if signed and token in ("-", "+"):
            self._take()
            inner = self._argument(signed=True)
            return Node("neg", "", (inner,)) if token == "-" else inner
        if not signed and token and token[0].isdigit() and len(token) > 1 and token.isdigit():
            self._tokens[self._at] = token[1:]
            return Node("number", "", (Fraction(token[0]),))
        node = self._primary()
        if signed and self._peek() == "^":
            self._take()
            return self._raised(node)
        return node

    def _primary(self) -> Node:
        token = self._take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self._number(token)
        if token == "|":
            self._in_bars += 1
            node = self._items()
            self._in_bars -= 1
            self._take("|")
            return Node("call", "abs", (node,))
        if token in _OPEN:
            return self._group(token)
        if token.isalpha() and len(token) == 1:
            return self._symbol(token)
        if not token.startswith("\\"):
            raise Unreadable(f"{token!r} is out of place")
        return self._command(token[1:])

    def _number(self, token: str) -> Node:
        mantissa, _, exponent = token.lower().partition("e")
        if len(exponent) > 4:
            raise Unreadable("too large an exponent")
        value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
        if self._peek() == r"\overline" and self._peek(1) == "{" and self._peek(2).isdigit() and self._peek(3) == "}":
            digits = self._peek(2)
            self._at += 4
            if self._tokens[self._at - 5] == ".":
                raise Unreadable("a point without digits")
            places = len(mantissa.partition(".")[2])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        elif self._peek() == "." and self._peek(1) == r"\overline" and self._peek(3).isdigit():
            digits = self._peek(3)
            self._at += 5
            value += Fraction(int(digits), 10 ** len(digits) - 1)
        node = Node("number", "", (value,))
        if self._peek() == "_":
            self._take()
            base = self._argument()
            return Node("unit", f"base {base.parts[0]}", (node,))
        return node

    def _symbol(self, name: str) -> Node:
        if self._peek() == "_":
            self._take()
            start = self._at
            self._primary()
            name += "_" + "".join(self._tokens[start : self._at]).strip("{}").replace(_MARKED, "")
        if name in ("f", "g", "h") and self._peek() == "(":
            return Node("call", name, (self._primary(),))
        return Node("symbol", name)

    def _group(self, opening: str) -> Node:
        wanted = (")", "]") if opening in ("(", "[") else (_OPEN[opening],)
        if self._peek() in wanted:
            self._take()
            return Node("list", "")
        bars, self._in_bars = self._in_bars, 0
        node = self._items()
        self._in_bars = bars
        if opening == r"\{" and self._peek() in (r"\mid", "|", r"\vert"):  # {x | x > 3}
            self._take()
            node = self._items()
        closing = self._take(*wanted)
        if opening in (r"\lfloor", r"\lceil"):
            return Node("call", "floor" if opening == r"\lfloor" else "ceil", (node,))
        items = node.parts if node.kind == "list" and node.name == "" else (node,)
        if opening in (r"\{", r"\lbrace"):
            return Node("list", "", items)
        if opening == r"\langle" or len(items) == 1 and opening + closing in ("()", "[]", "{}"):
            return Node("group", "()", items) if len(items) > 1 else items[0]
        if opening == "{":
            return node
        return Node("group", opening + closing, items)

    def _command(self, name: str) -> Node:
        if name == "frac":
            return Node("/", "", (self._argument(), self._argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Node("call", "binomial", (self._argument(), self._argument()))
        if name == "sqrt":
            index = Node("number", "", (Fraction(2),))
            if self._peek() == "[":
                self._take()
                index = self._sum()
                self._take("]")
            return Node("call", "root", (self._argument(), index))
        if name == "begin":
            return self._matrix()
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _SYMBOLS:
            if name in ("emptyset", "varnothing"):
                return Node("list", "")
            return self._symbol("\\" + name)
        raise Unreadable(f"\\{name} is not known")

    def _matrix(self) -> Node:
        self._take("{")
        name = "".join(iter(self._take, "}"))
        kind = {"v": "v"}.get(name.removesuffix("matrix"), "") if name.endswith("matrix") else {"array": ""}.get(name)
        if kind is None:
            raise Unreadable(f"\\begin{{{name}}} is not known")
        rows = [[self._sum()]]
        while (token := self._take("&", "\\\\", r"\end")) != r"\end":
            if token == "&":
                rows[-1].append(self._sum())
            elif self._peek() != r"\end":
                rows.append([self._sum()])
        self._take("{")
        while self._take() != "}":
            pass
        return Node("matrix", kind, tuple(Node("group", "row", tuple(row)) for row in rows))

    def _function(self, name: str) -> Node:
        name = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name)
        base = power = None
        while self._peek() in ("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                power = self._argument(signed=True)
        if power == Node("neg", "", (Node("number", "", (Fraction(1),)),)) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        if self._peek() in ("(", "[", "{", "|"):
            argument = self._power() if power is None else self._primary()
        else:
            argument = self._power()
            while self._begins_factor(self._peek()) and self._peek() not in ("(", "[", "{") and self._peek()[1:] not in _FUNCTIONS - {"sqrt"}:
                argument = Node("*", "", (argument, self._power()))
        parts = (argument, base) if base is not None else (argument,)
        node = Node("call", name, parts)
        return node if power is None else Node("^", "", (node, power))


@lru_cache(maxsize=2048)
def read(text: str) -> Node:
    """The tree of a text that `tidy` gave. Raises `Unreadable`."""
    if len(text) > MOST_CHARACTERS:
        raise Unreadable("too long for an answer")
    if text in _SETS:
        text = r"(-\infty, \infty)"
    text = re.sub(r"\\(?:in|isin)\s*\\mathbb\s*\{?[A-Z]\}?", "", text)
    over = re.fullmatch(r"\{?([^{}]+)\\over(?![a-z])([^{}]+)\}?", text)
    return _Reader(_tokens(rf"\frac{{{over[1]}}}{{{over[2]}}}" if over else text)).all()


def symbols(node: Node) -> frozenset[str]:
    """The names of the variables of an expression."""
    if node.kind == "symbol":
        return frozenset() if node.name in ("e", "i", r"\pi") else frozenset((node.name,))
    return frozenset().union(*(symbols(part) for part in node.parts if isinstance(part, Node)))


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > _EXACT_BITS:
            raise Unreadable("too large a number")
        return value
    size = abs(value)
    if not mp.isfinite(size) or (size != 0 and abs(mp.mag(size)) > _RANGE_BITS and mp.mag(size) > -_EQUAL_BITS):
        raise Unreadable("too large or too small a number")
    return value


def inexact(value: Number) -> Number:
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _power_of(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) > _EXACT_BITS or bits * abs(exponent) > _EXACT_BITS + 64:
                raise Unreadable("too large a power")
            if base == 0 and exponent < 0:
                raise Unreadable("a division by zero")
            return base ** int(exponent)
        if base > 0 and (root := _exact_root(base, exponent.denominator)) is not None:
            return _power_of(root, Fraction(exponent.numerator))
    if abs(inexact(exponent)) > 10**6:
        raise Unreadable("too large a power")
    if base == 0 and inexact(exponent).real > 0:
        return Fraction(0)
    return inexact(base) ** inexact(exponent)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if degree > 64:
        return None
    tops = [_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if None in tops else Fraction(tops[0] or 0, tops[1] or 1)


def _integer_root(value: int, degree: int) -> int | None:
    with mp.workprec(value.bit_length() + 64):
        root = int(mp.nint(mp.root(value, degree)))
    return root if root**degree == value else None


def _root(value: Number, degree: Number) -> Number:
    if isinstance(degree, Fraction) and degree.denominator == 1 and degree > 0:
        is_negative = isinstance(value, Fraction | mpf) and value < 0
        if is_negative and degree % 2:
            return -_root(-value, degree)
        if value == 0:
            return Fraction(0)
        if isinstance(value, Fraction) and not is_negative and (exact := _exact_root(value, int(degree))) is not None:
            return exact
    return _power_of(value, 1 / degree)


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= 5000:
            raise Unreadable("the factorial of a negative or a very large number")
        return Fraction(math.factorial(int(value)))
    if abs(value) > 1000:
        raise Unreadable("too large a factorial")
    return mp.gamma(inexact(value) + 1)


def _whole(value: Number, name: str) -> Number:
    if isinstance(value, mpc):
        raise Unreadable(f"the {name} of a complex number")
    rounded = math.floor if name == "floor" else math.ceil
    return Fraction(rounded(value)) if isinstance(value, Fraction) else Fraction(int(getattr(mp, name)(value)))


def _opaque(name: str, value: Number) -> Number:
    """Some smooth function that belongs to the name: of f(x) it is known only that equal arguments have equal values."""
    x, seed = inexact(value), zlib.crc32(name.encode())
    return (seed % 97 + 3) + x * (seed % 89 + 2) / 7 + x**3 / (seed % 83 + 5) + mp.sin(x)


def _logarithm(value: Number, base: Number) -> Number:
    if value == 0 or base in (0, 1):
        raise Unreadable("no logarithm")
    return mp.log(inexact(value)) / mp.log(inexact(base))


_CALLS: dict[str, Callable[..., Number]] = {
    "root": _root,
    "factorial": _factorial,
    "abs": abs,
    "floor": lambda value: _whole(value, "floor"),
    "ceil": lambda value: _whole(value, "ceil"),
    "binomial": lambda n, k: _factorial(n) / (_factorial(k) * _factorial(n - k)),
    "cbrt": lambda value: _root(value, Fraction(3)),
    "exp": lambda value: _power_of(+mp.e, value),
    "ln": lambda value: _logarithm(value, +mp.e),
    "lg": lambda value: _logarithm(value, Fraction(10)),
    "log": lambda value, base=Fraction(1237, 211): _logarithm(value, base),
    **{name: (lambda value, name=name: _opaque(name, value)) for name in ("f", "g", "h", "prime")},
    **{
        name: (lambda value, function=function: getattr(mp, function)(inexact(value)))
        for name, function in (
            *((name, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")),
            ("arcsin", "asin"), ("arccos", "acos"), ("arctan", "atan"),
        )
    },
}  # fmt: skip


def evaluate(node: Node, variables: Mapping[str, Number]) -> Number:
    """The value where `variables` have theirs. The precision is that of `precise`. Raises `Unreadable`."""
    match node:
        case Node("number", _, (value,)):
            return _bounded(value)
        case Node("symbol", name):
            if name in ("e", r"\pi"):
                return +mp.e if name == "e" else +mp.pi
            return mpc(0, 1) if name == "i" else variables[name]
        case Node("unit", "degree", (inner,)):
            return inexact(evaluate(inner, variables)) * mp.pi / 180
        case Node("unit", "%", (inner,)):
            return evaluate(inner, variables) / 100
        case Node("call", name, parts) if name in _CALLS:
            values = [evaluate(part, variables) for part in parts]
            try:
                return _bounded(_CALLS[name](*values))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise Unreadable(f"{name} has no value") from error
        case Node("+" | "-" | "*" | "/" | "^" as sign, _, (left, right)):
            a, b = evaluate(left, variables), evaluate(right, variables)
            if sign == "^":
                return _bounded(_power_of(a, b))
            if isinstance(a, Fraction) is not isinstance(b, Fraction):
                a, b = inexact(a), inexact(b)
            if sign == "/" and b == 0:
                raise Unreadable("a division by zero")
            return _bounded(a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b)
        case Node("neg", _, (inner,)):
            return -evaluate(inner, variables)
    raise Unreadable(f"{node.kind} has no value")


def precise() -> Any:
    """The context in which values are computed and compared."""
    return mp.workprec(_PRECISION_BITS)


def agree(a: Number, b: Number) -> bool:
    """Whether two values are equal: fractions exactly, others to 280 digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = inexact(a), inexact(b)
    return bool(abs(a - b) <= mpf(2) ** -_EQUAL_BITS * max(abs(a), abs(b), 1))
