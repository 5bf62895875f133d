"""Tries whether a user's reward function can be imported, in a process of its own: a user's module may do anything.

On the verifier's path, with the current folder on it. Calls nothing: what the function returns is the verifier's business.
"""

from __future__ import annotations

import subprocess
import sys

from pipelinerl.errors import MissingPackage, UserError

_IMPORT_S = 60.0
_NOT_INSTALLED = 71
_IMPORT_FUNCTION = f"""
import difflib, importlib, sys
module, _, name = sys.argv[1].partition(":")
try:
    found = vars(importlib.import_module(module))
except ModuleNotFoundError as error:
    if "." in error.name:
        sys.exit(f"there is no module {{error.name}} in {{error.name.rpartition('.')[0]}}; name another")
    print(f"cannot import {{module}} ({{error}})", file=sys.stderr)
    sys.exit({_NOT_INSTALLED})
if not callable(found.get(name)):
    near = difflib.get_close_matches(name, [key for key, value in found.items() if callable(value)], n=1)
    what = "is not a function" if name in found else "is not there"
    fix = f"did you mean {{near[0]}}?" if near else "name a function of that module"
    sys.exit(f"{{name}} {{what}} in {{module}}; {{fix}}")
"""


def try_reward_function(path: str) -> None:
    """`path`: `pkg.module:function`. Raises `MissingPackage` where a module is not installed here, else `UserError`."""
    command = [sys.executable, "-c", _IMPORT_FUNCTION, path]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"importing its module takes more than {_IMPORT_S:g} s; do the work when it is called"
        ) from None
    if tried.returncode == 0:
        return
    why = (tried.stderr.strip().splitlines() or ["its module cannot be imported, and says nothing"])[-1]
    if tried.returncode == _NOT_INSTALLED:
        raise MissingPackage(f"{why}; install the package, or work in the folder that holds it")
    raise UserError(why)
