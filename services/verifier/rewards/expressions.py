r"""Parse mathematics, in LaTeX or plain text, into a tree, and evaluate it.

`read` turns `\frac{1}{2}`, `x^2 + 1`, `(3, 4]` or `18 dollars` into a `Node`. `evaluate` returns its value: an exact fraction
if possible, otherwise a number with 300 digits. The text may be hostile, so `read` computes nothing, and `evaluate`
refuses values that are too large.
"""

from __future__ import annotations

import math
import operator
import re
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

from mpmath import mp, mpc, mpf

MOST_CHARACTERS = 2000
_EXACT_BITS = 65_536
"""Maximum size of exact numbers, in bits. For comparison, 2004! has 19,000 bits."""
_PRECISION_BITS, _RANGE_BITS, _EQUAL_BITS = 1000, 450, 930
"""Precision of inexact numbers, the bound of their binary exponents, and the number of bits that must agree."""

Number = Any
"""A `Fraction`, or an `mpf` or `mpc` of `mpmath`."""


class Unreadable(ValueError):
    """The text is not mathematics in a known form, or its value is too large to compute."""


class Node(NamedTuple):
    """A node of an expression's tree."""

    kind: str
    """An operation (`+`, `*`, `/`, `^`, `call`, ...), a leaf (`number`, `symbol`, `text`) or another form (`list`, `group`,
    `relation`, `ratio`, `union`, `matrix`, `unit`)."""
    name: str = ""
    """It distinguishes nodes of one kind: the function of a `call`, the symbol, the unit, or the brackets of a `group`."""
    parts: tuple[Any, ...] = ()
    """Operands, or the value of a `number`."""


def number(value: int | str | Fraction) -> Node:
    return Node("number", "", (Fraction(value),))


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_CHARACTERS = str.maketrans({
    **dict.fromkeys("−–‒—", "-"), **dict.fromkeys("\u00a0\u2009\u202f", " "), **dict.fromkeys("÷⁄∕", "/"), "×": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ",
    "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "°": r"\degree ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "θ": r"\theta ", "½": " 1/2 ", "¼": " 1/4 ", "¾": " 3/4 ", "⅓": " 1/3 ", "⅔": " 2/3 ", "£": r"\pounds ",
    "€": r"\euro ", "’": "'", "\u200b": "", **{chr(0xFEE0 + code): chr(code) for code in range(33, 127)},
})  # fmt: skip
_MARK = "\x02"
"""Prefix of each letter inside `\\text`, and of each token that is a word, to tell words from products of variables."""
_TEXT = re.compile(r"\\(text(?:bf|it|rm|tt|sf)?|[mh]box|math(?:rm|bf|it|sf)|operatorname\*?)\s*\{([^{}]*)\}")

_EVERYWHERE = re.compile(
    r",?\s*(?:\\text\s*\{\s*)?\bfor (?:all|any|every|each)\b"
    r"(?:[\s{}$,.]|\b(?:real|numbers?)\b|\\(?:text|in|mathbb)(?![a-z])|(?<![A-Za-z])[a-zR](?![A-Za-z]))*$"
)
"""Suffix such as `for all real x`, which `tidy` removes from a formula."""


def _repeating(found: re.Match[str]) -> str:
    whole, once, again = found.groups()
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


def _named(found: re.Match[str]) -> str:
    """Turn f(x), the left side of f(x) = 2x, into one symbol."""
    return f"{found[1]}_{{" + re.sub("[^a-zA-Z0-9']", "", found[3] + (found[2] or "")) + "}"


_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{array}"),
        (r"\\(?:displaystyle|textstyle|limits|left\s*\.|right\s*\.|(?:left|right|[bB]igg?[lrm]?|bf|rm)(?![a-z])|!)", ""),
        (r"\\(?:underline|normalsize|small|[lL]arge|LARGE|[hH]uge)(?![a-z])|\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\(?:[dtc](?=(?:frac|binom)(?![a-z]))|big(?=cup))", r"\\"),
        (r"\^\s*(?:\{\s*)?(?:\\circ(?![a-z])|\\degree )(?:\s*\})?", r"\\degree "),
        (r"\\\\\s*\[[\d.]+\s*[a-z]{2}\]", r"\\\\ "),
        (r"\\(?:vec|hat|overrightarrow|overline(?=\s*\{[A-Z]{2}))\s*\{([A-Za-z]+)\}", r"\1"),
        (r"(?<![A-Za-z\\])([A-Za-z])(\^\{?-1\}?|'+)?\((\w(?:, ?\w)*)\)(?=\s*=[^=]*$)", _named),
        (rf"\\colon(?![a-z])|(?<=\d)\s*{_MARK}?t{_MARK}?o\s*(?=\d)", ":"),
        (r"\\[lr]?vert(?![a-z])|\\mid(?![a-z])", "|"),
        (rf"(?<=\d)\s*{_MARK}?([apAP])\.?\s*{_MARK}?[mM]\b\.?", rf" {_MARK}\1{_MARK}m "),
        (r"(?<![\d.])(\d{1,9})\.(\d{0,9})\\(?:overline|bar)\s*\{(\d{1,9})\}", _repeating),
        (r"\{([,:])\}", r"\1"),
        (r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?[A-Z]\}?\s*)?[|:](.*)\\\}", r"\1"),
        (r"\\(?:pounds|euro)\s*(-?\d[\d.,]*)", r" \1 pounds "),
        (r"(?:\\\$|(?<![\d$])\$)\s*(-?\d[\d.,]*(?:\s*\\frac(?:\d\d|\{\d+\}\{\d+\}))?)(?!.*\$)", r" \1 dollars "),
        (r"\\\$|\$|(?<!\\)\\[()\[\]]", " "),
        (
            r"(?<![\d.,])(?:(?<![(\[{])|(?<=\{)(?<!\\\{))(\d{1,3})(,|\\[,;: ]|~|\s|_)\d{3}(?:\2\d{3})*(?!,?\d)",
            lambda found: re.sub(r"\D", "", found[0]),
        ),
        (r"\\(?:,|;|:|>|quad|qquad|angle(?![a-z])|hspace\{[^{}]*\})|~|(?<!\\)\\(?=\s)", " "),
        (r"(?<=[\d)])\s*[xX]\s*(?=10\s*\^)|(?<=\d)\s+x\s+(?=\d)", r"\\times "),
        (r"(?<![A-Za-z\\])(sin|cos|tan|ln|log)(?=[xyt](?![A-Za-z]))", r"\\\1 "),
        (r"^\((\d+)\)(?=_)|^\s*=(?!=)", r"\1"),
        (r"(?<=[\w)])\*\*(?=[-\w(])", "^"),
        (r"\*\*|`|__|^\*|\*$", " "),
        (r"(?<!^\w)(?<!^\w )\\(?:in|isin)\s*\\mathbb\s*\{?[A-Z]\}?", ""),
        (r"\s*\\mathbb\s*\{?R\}?\s*", r"(-\\infty, \\infty)"),
        (r"^\{?([^{}]+)\\over(?![a-z])([^{}]+)\}?$", r"\\frac{\1}{\2}"),
        (r"^\{?([^{}]+)\\choose(?![a-z])([^{}]+)\}?$", r"\\binom{\1}{\2}"),
    )
]


@lru_cache(maxsize=2048)
def tidy(text: str) -> str:
    """Normalise the spelling, and remove spacing commands, dollar signs around mathematics, and thousands separators."""
    text = re.sub(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+", lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _EVERYWHERE.sub("", text.translate(_CHARACTERS))
    for _ in range(3):
        text = _TEXT.sub(_unwrapped, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return re.sub(r"(?<!\.)[.;:,]$", "", re.sub(r"\s+", " ", text).strip()).strip()


def _unwrapped(found: re.Match[str]) -> str:
    content = found[2].strip()
    if re.fullmatch(r"\W*[A-Z]\W*|\d*", content) or (len(content) == 1 and found[1].startswith("math")):
        return f"{content} "
    if content in _FUNCTIONS:
        return rf"\{content} "
    return f" {re.sub('[A-Za-z]', lambda letter: _MARK + letter[0], found[2])} "


_FUNCTIONS = set(re.findall(
    r"\w+", "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt cbrt abs floor ceil"
))  # fmt: skip
_SYMBOLS = set(re.findall(
    r"\w+", "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega Omega Delta Gamma"
    " Sigma Phi psi eta zeta xi kappa chi ell pi infty emptyset varnothing"
))  # fmt: skip
_ENCLOSED = {"(", "[", "{"}
_FACTORS = {"\\" + name for name in (*_FUNCTIONS, *_SYMBOLS, "frac", "binom", "begin", "lfloor", "lceil")} | _ENCLOSED
"""Tokens, besides numbers and letters, before which a multiplication sign may be missing."""
_WORDS = set(re.findall(
    r"\w+", "cm mm dm km kg mg ml mL ft yd mi lb lbs oz hr hrs mph kph am pm AM PM sq rad Hz GB MB ms pts th is of an we it"
    " day my no No as by at be he if on in We It So so do us up me"
))  # fmt: skip
"""Short words that are not products of variables."""
_NO_UNITS = set(re.findall(
    r"\w+", "not no or and more less fewer than least most wrong incorrect below above under over off half halves third thirds"
    " quarter quarters fourth fourths fifth fifths sixth eighth eighths tenth tenths hundredth hundredths thousandths to minus"
    " plus times squared cubed point but dozen maybe then if is pairs score hundreds was never greater larger smaller divided"
    " factorial choose recurring repeating root radical gross double triple inverse sixths seventh sevenths ninth ninths"
    " modulo mod base approximately either k bn dozens tens thousands millions"
))  # fmt: skip
"""Words that change the meaning of the number before them, so they are not units."""
_MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RELATIONS = {
    "==": "=", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=",
    r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\in": "in",
    **{sign: sign for sign in ("=", "<", ">", "<=", ">=", "!=")},
}  # fmt: skip
_PRODUCTS = {"*": "*", r"\cdot": "*", r"\times": "*", r"\ast": "*", "/": "/", r"\div": "/"}
_SUFFIXES = {"!": ("call", "factorial"), "%": ("unit", "%"), r"\%": ("unit", "%"), r"\degree": ("unit", "degree")}
_CLOSING = {"(": ")]", "[": ")]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_TOKEN = re.compile(
    rf"\s+|(?:{_MARK}[A-Za-z])+|\d+(?:\.\d+)?(?:[eE][-+]?\d{{1,4}}(?![\dA-Za-z.]))?|\.\d+"
    r"|\\[A-Za-z]+|\\.|<=|>=|!=|==|[A-Za-z]+|.", re.DOTALL
)  # fmt: skip


def _tokens(text: str) -> list[str]:
    found = list[str]()
    for token in _TOKEN.findall(text):
        if token.startswith(_MARK):
            word = token.replace(_MARK, "")
            found.append(word.lower() if word.lower() in ("and", "or") else _MARK + word)
        elif token.isalpha() and token.isascii():
            found += _letters(token)
        elif not token.isspace():
            found.append(token)
    return found


def _letters(run: str) -> list[str]:
    if len(run) == 1 or run in ("and", "or"):
        return [run]
    if run in ("oo", "inf", "infinity"):
        return [r"\infty"]
    if run in _FUNCTIONS or run in _SYMBOLS:
        return ["\\" + run]
    if run in _WORDS or (len(run) > 2 and re.search("[aeiouyAEIOUY]", run) and not re.fullmatch("[a-dxyzA-Z]+", run)):
        return [_MARK + run]
    return [*run[:-2], r"\pi"] if run.endswith("pi") else [*run]


_DIGITS = "zero one two three four five six seven eight nine ten"
_MEANINGS = {
    **{word: number(value) for value, word in enumerate(re.findall(r"\w+", _DIGITS))},
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "empty set"), Node("list", "set")),
    **dict.fromkeys(("dne", "does not exist", "undefined"), Node("text", "undefined")),
    "infinity": Node("symbol", r"\infty"),
    "all real numbers": Node("group", "()", (Node("neg", "", (Node("symbol", r"\infty"),)), Node("symbol", r"\infty"))),
}
"""Words and phrases, with the trees that they stand for."""


class _Reader:
    """Recursive-descent parser. Methods call each other from the loosest level, a list, to the tightest, powers and names."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._in_bars = tokens, 0, False

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

    def _is_next(self, *tokens: str) -> bool:
        """Take the next token if it is one of these; return whether it was."""
        is_there = self._peek() in tokens
        self._at += is_there
        return is_there

    def _items(self) -> Node:
        items, how = [self._relation()], ""
        while (separator := self._peek()) in (",", ";", "and", "or"):
            self._take()
            if separator in (",", ";") and self._peek() in ("and", "or"):
                separator = self._take()
            how = separator if separator in ("and", "or") else how
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("list", how, tuple(items))

    def _joined(self, kind: str, operators: Mapping[str, str], inner: Callable[[], Node]) -> Node:
        parts, names = [inner()], list[str]()
        while name := operators.get(self._peek()):
            self._take()
            names.append(name)
            parts.append(inner())
        return Node(kind, " ".join(names), tuple(parts)) if names else parts[0]

    def _relation(self) -> Node:
        union = partial(self._joined, "union", {r"\cup": "cup"}, self._quantity)
        return self._joined("relation", _RELATIONS, partial(self._joined, "ratio", {":": ":"}, union))

    def _quantity(self) -> Node:
        if self._peek().startswith(_MARK):
            return self._text()
        node, words = self._sum(), list[str]()
        while self._peek().startswith(_MARK) or (words and (self._peek() in ("/", "^", "a") or words[-1] == "/")):
            token = self._take()
            if token == "^":
                is_braced = self._is_next("{")
                token += self._take("2", "3")
                _ = is_braced and self._take("}")
            words.append(token.removeprefix(_MARK).lower())
        while factors := [word for word in words[:2] if word in _MULTIPLIERS and words[0] in ("dollars", word)]:
            node = Node("*", "", (node, number(10 ** _MULTIPLIERS[factors[0]])))
            words.remove(factors[0])
        if _NO_UNITS.intersection(words):
            raise Unreadable(f"{' '.join(words)!r} after a number is not a unit")
        unit = {"percent": "%", "degrees": "degree"}.get(" ".join(words), " ".join(words))
        return Node("unit", unit, (node,)) if words else node

    def _text(self) -> Node:
        words = list[str]()
        while self._peek() and self._peek() not in (*_RELATIONS, *_CLOSING, *",;)]}", r"\}", "and", "or"):
            words.append(self._take().removeprefix(_MARK).lower())
        text = " ".join(words)
        return _MEANINGS.get(text, Node("text", text))

    def _sum(self) -> Node:
        node = self._product()
        while (sign := self._peek()) in ("+", "-", r"\pm", r"\mp"):
            self._take()
            node = Node(sign.removeprefix("\\"), "", (node, self._product()))
        return node

    def _product(self) -> Node:
        """Parse a product, whose factors may have no sign between them, as in 2x."""
        node = self._signed()
        while (kind := _PRODUCTS.get(self._peek())) or self._begins_factor(self._peek()):
            if kind:
                self._take()
            node = Node(kind or "*", "", (node, self._signed() if kind else self._mixed()))
        return node

    def _begins_factor(self, token: str) -> bool:
        if token == "|":
            return not self._in_bars
        is_number = token[:1].isdigit() and not self._tokens[self._at - 1][0].isdigit()
        return is_number or (len(token) == 1 and token.isalpha()) or token in _FACTORS

    def _signed(self) -> Node:
        sign = self._peek()
        if self._is_next("+", "-", r"\pm", r"\mp"):
            node = self._signed()
            return {"+": node, "-": Node("neg", "", (node,))}.get(sign) or Node(sign[1:], "", (number(0), node))
        return self._mixed()

    def _mixed(self) -> Node:
        node, token = self._suffixed(self._primary()), self._peek()
        if not _is_whole(node) or not (token[:1].isdigit() or token == r"\frac"):
            return node
        right = self._primary()
        if token != r"\frac":
            self._take("/")
            right = Node("/", "", (right, self._primary()))
        is_share = right.kind == "/" and all(map(_is_whole, right.parts))
        is_mixed = is_share and 0 < right.parts[0].parts[0] < right.parts[1].parts[0]
        if not is_mixed and token != r"\frac":
            raise Unreadable("two numbers side by side")
        return self._suffixed(Node("+" if is_mixed else "*", "", (node, right)))

    def _suffixed(self, node: Node) -> Node:
        while (token := self._peek()) in (*_SUFFIXES, "^"):
            self._take()
            node = Node("^", "", (node, self._exponent())) if token == "^" else Node(*_SUFFIXES[token], (node,))
        return node

    def _exponent(self) -> Node:
        if self._is_next("-"):
            return Node("neg", "", (self._exponent(),))
        node = self._primary()
        return Node("^", "", (node, self._exponent())) if self._is_next("^") else node

    def _argument(self) -> Node:
        r"""Parse a command's argument in braces, or one digit or letter, since \frac12 has two arguments."""
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._at] = token[1:]
            return number(token[0])
        return self._primary()

    def _primary(self) -> Node:
        token = self._take()
        if token[-1].isdecimal() and token[0] != "\\":
            base = self._argument() if self._is_next("_") else None
            return number(token) if base is None else Node("unit", f"base {base.name or base.parts[:1]}", (number(token),))
        if token == "|":
            before, self._in_bars = self._in_bars, True
            node = self._items()
            self._in_bars = before
            self._take("|")
            return Node("call", "abs", (node,))
        if token in _CLOSING:
            return self._group(token)
        if len(token) == 1 and token.isalpha():
            return self._symbol(token)
        return self._command(token)

    def _symbol(self, name: str) -> Node:
        if self._is_next("_"):
            start = self._at
            self._primary()
            name += "_" + "".join(self._tokens[start : self._at]).strip("{}").replace(_MARK, "")
        while self._is_next("'"):
            name += "'"
        is_call = self._peek() == "(" and (name[0] in "fgh" or (self._peek(1), self._peek(2)) == ("0", ")"))
        return Node("call", name, (self._primary(),)) if is_call else Node("symbol", name)

    def _group(self, opening: str) -> Node:
        wanted = (")", "]") if opening in ("(", "[") else (_CLOSING[opening],)
        if self._is_next(*wanted):
            return Node("list")
        before, self._in_bars = self._in_bars, False
        node = self._items()
        self._in_bars = before
        brackets = opening + self._take(*wanted)
        if opening in (r"\lfloor", r"\lceil"):
            return Node("call", opening[2:], (node,))
        brackets = brackets.replace(r"\langle\rangle", "()")
        is_list = node.kind == "list" and not node.name
        if opening == "{" or (not is_list and brackets in ("()", "[]")):
            return node
        items = node.parts if is_list else (node,)
        return Node("list", "set", items) if opening == r"\{" else Node("group", brackets, items)

    def _command(self, command: str) -> Node:
        name = command.removeprefix("\\")
        if command == name:
            raise Unreadable(f"{command!r} is out of place")
        if name in ("frac", "binom"):
            arguments = self._argument(), self._argument()
            return Node("/", "", arguments) if name == "frac" else Node("call", "binomial", arguments)
        if name == "sqrt":
            index = number(2)
            if self._is_next("["):
                index = self._sum()
                self._take("]")
            return Node("call", "root", (self._primary(), index))
        if name == "begin":
            return self._matrix()
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("emptyset", "varnothing"):
            return Node("list", "set")
        if name in _SYMBOLS:
            return self._symbol(command)
        raise Unreadable(f"{command} is not known")

    def _matrix(self) -> Node:
        def environment() -> str:
            self._take("{")
            return "".join(iter(self._take, "}")).replace(_MARK, "")

        name, rows = environment(), [[self._sum()]]
        while (token := self._take("&", "\\\\", r"\end")) != r"\end":
            if token == "&":
                rows[-1].append(self._sum())
            elif self._peek() != r"\end":
                rows.append([self._sum()])
        environment()
        return Node("matrix", "v" if name[0] in "vV" else "", tuple(Node("group", "row", tuple(row)) for row in rows))

    def _function(self, name: str) -> Node:
        base = power = None
        while self._peek() in ("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                power = self._exponent()
        if power == Node("neg", "", (number(1),)) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        is_enclosed = self._peek() in ("(", "[", "{", "|")
        argument = self._primary() if is_enclosed else self._suffixed(self._primary())
        ending = {"\\" + other for other in _FUNCTIONS - {"sqrt"}} | _ENCLOSED  # \sin 2x \cos x is a product of two calls
        while not is_enclosed and self._begins_factor(self._peek()) and self._peek() not in ending:
            argument = Node("*", "", (argument, self._suffixed(self._primary())))
        node = Node("call", name, (argument,) if base is None else (argument, base))
        return node if power is None else Node("^", "", (node, power))


def _is_whole(node: Node) -> bool:
    return node.kind == "number" and node.parts[0].denominator == 1


@lru_cache(maxsize=2048)
def read(text: str) -> Node:
    """Return the tree of text that `tidy` has normalised. Raises `Unreadable` if it is not mathematics in a known form."""
    if len(text) > MOST_CHARACTERS:
        raise Unreadable("too long for an answer")
    try:
        return _Reader(_tokens(text)).all()
    except RecursionError:
        raise Unreadable("nested too deeply") from None


def symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables of an expression."""
    if node.kind == "symbol":
        return frozenset() if node.name in ("e", "i", r"\pi") else frozenset((node.name,))
    return frozenset[str]().union(*(symbols(part) for part in node.parts if isinstance(part, Node)))


def _bounded(value: Number, *, is_sum: bool = False) -> Number:
    """Return `value`, or raise `Unreadable` if it is too large or too small. Sums may be tiny, because terms may cancel."""
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > _EXACT_BITS:
            raise Unreadable("too long a fraction")
    elif not mp.isfinite(value) or (value != 0 and abs(mp.mag(value)) >= _RANGE_BITS and not (is_sum and mp.mag(value) < 0)):
        raise Unreadable("too large or too small a number")
    return value


def inexact(value: Number) -> Number:
    """Return the value as a number of `mpmath`."""
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > _EXACT_BITS + bits:
            raise Unreadable("too large a power")
        return base ** int(exponent)
    if abs(inexact(exponent)) > 10**6:
        raise Unreadable("too large a power")
    return Fraction(0) if base == 0 and inexact(exponent).real > 0 else inexact(base) ** inexact(exponent)


def _root(value: Number, degree: Number = Fraction(2)) -> Number:
    """Return a root of `value`: if `value` is negative and `degree` is odd, the real root."""
    if isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2 and not isinstance(value, mpc) and value < 0:
        return -_power(-value, 1 / degree)
    return _power(value, 1 / degree)


def _factorial(value: Number) -> Number:
    is_whole = isinstance(value, Fraction) and value.denominator == 1
    if abs(value) > 5000 or (is_whole and value < 0):
        raise Unreadable("the factorial of a negative or a very large number")
    return Fraction(math.factorial(int(value))) if is_whole else mp.gamma(inexact(value) + 1)


def _opaque(name: str, value: Number) -> Number:
    """Return the value of a smooth function that stands for the unknown function `name`, another one for each name."""
    x, seed = inexact(value), zlib.crc32(name.encode())
    return (seed % 97 + 3) + x * (seed % 89 + 2) / 7 + x**3 / (seed % 83 + 5) + mp.sin(x)


def _logarithm(value: Number, base: Number = Fraction(1237, 211)) -> Number:
    """Return a logarithm. The default base is neither e nor 10, because `log` may mean either."""
    return mp.log(inexact(value)) / mp.log(inexact(base))


_CALLS: dict[str, Callable[..., Number]] = {
    **{name: partial(lambda call, value: getattr(mp, call)(inexact(value)), name.replace("arc", "a")) for name in _FUNCTIONS},
    "root": _root,
    "cbrt": lambda value: _root(value, Fraction(3)),
    "factorial": _factorial,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "binomial": lambda n, k: _factorial(n) / (_factorial(k) * _factorial(n - k)),
    "exp": lambda value: _power(+mp.e, value),
    "ln": lambda value: _logarithm(value, +mp.e),
    "lg": lambda value: _logarithm(value, Fraction(10)),
    "log": _logarithm,
}


def evaluate(node: Node, variables: Mapping[str, Number]) -> Number:
    """Return a tree's value for `variables`. Call this in a `precise` context. Raises `Unreadable` if no value is usable."""
    match node:
        case Node("number", _, (value,)):
            return _bounded(value)
        case Node("symbol", name):
            value = {"e": mp.e, r"\pi": mp.pi, "i": mpc(0, 1), **variables}.get(name)
            if value is None:
                raise Unreadable(f"{name} has no value")
            return +value
    values = [evaluate(part, variables) for part in node.parts]
    try:
        if node.kind == "call":
            return _bounded(_CALLS.get(node.name, partial(_opaque, node.name))(*values))
        if node.kind == "unit" and node.name in ("%", "degree"):
            return values[0] / 100 if node.name == "%" else inexact(values[0]) * mp.pi / 180
        if not all(isinstance(value, Fraction) for value in values):
            values = [_bounded(inexact(value)) if isinstance(value, Fraction) else value for value in values]
        if node.kind in _OPERATIONS:
            return _bounded(_OPERATIONS[node.kind](*values), is_sum=node.kind in "+-")
    except ZeroDivisionError as error:
        raise Unreadable("a division by zero") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise Unreadable(f"{node.kind} {node.name} has no value") from error
    raise Unreadable(f"{node.kind} has no value")


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "neg": operator.neg, "^": _power
}  # fmt: skip


precise = partial(mp.workprec, _PRECISION_BITS)
"""`with precise():` computes and compares values with `_PRECISION_BITS`."""


def agree(a: Number, b: Number) -> bool:
    """Return whether two values are equal: fractions exactly, others to 280 digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = inexact(a), inexact(b)
    return bool(abs(a - b) <= mpf(2) ** -_EQUAL_BITS * max(abs(a), abs(b), 1))
