"""Which answers may reach a scorer that evaluates them: the scorers of some reasoning-gym families call `eval`, or SymPy's
parser, which is built on it, on the text that a model wrote.

A guard is a function `answer -> bool` that reads the text with Python's parser and runs nothing of it. What it lets through
calls nothing but known functions of mathematics and reaches no attribute. How long an expression takes to evaluate is the
worker's deadline's business.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

Guard = Callable[[str], bool]

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
_TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"}
_HYPERBOLIC = {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh"}
_FUNCTIONS = frozenset(_TRIGONOMETRY | _HYPERBOLIC | {"exp", "log", "ln", "sqrt", "Abs"})
_CONSTANTS = frozenset({"pi"})
_WORDS = re.compile(r"[A-Za-z0-9_\s]*")
_EXPRESSION = re.compile(r"[A-Za-z0-9_+\-*/.() \t]*")
"""No quote, bracket, comma, comment or line end: Python's parser and SymPy's tokenizer see the same in what is left."""


def is_board(answer: str) -> bool:
    """Words and numbers between white space (they are compared, and evaluate to nothing), or a Python literal."""
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(answer: str) -> bool:
    """Numbers, + - * / **, brackets."""
    return _every_node(answer, _is_number_or_operator)


def is_formula(answer: str) -> bool:
    """Arithmetic with variables of one letter, pi, and the usual functions.

    `Integral(...)`, an integral left as it is, is not among them: it would be a right answer to every integration problem.
    """
    return _every_node(answer, _is_of_a_formula)


GUARDS: dict[str, Guard] = {
    "binary_matrix": is_board,
    "countdown": is_arithmetic,
    "intermediate_integration": is_formula,
    "n_queens": is_board,
    "polynomial_multiplication": is_formula,
    "puzzle24": is_arithmetic,
    "simple_integration": is_formula,
    "spiral_matrix": is_board,
    "string_insertion": is_board,
}
"""By family: every one whose scorer evaluates the answer. A test reads the installed package's scorers and compares."""


def _every_node(answer: str, allowed: Callable[[ast.AST], bool]) -> bool:
    if not _EXPRESSION.fullmatch(answer.strip()):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        return all(allowed(node) for node in ast.walk(tree.body))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_number_or_operator(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.BinOp() | ast.UnaryOp():
            return True
    return isinstance(node, _OPERATORS)


def _is_of_a_formula(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
            return name in _FUNCTIONS
        case ast.Name(id=name):
            return (len(name) == 1 and name.isascii()) or name in _FUNCTIONS or name in _CONSTANTS
        case ast.Load():
            return True
    return _is_number_or_operator(node)
