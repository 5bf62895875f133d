"""In a build stage: writes the bytecode that a read-only image cannot keep later, valid without a look at the source.

    bytecode.py                   of every module in the environment
    bytecode.py MODULE ...        of the modules given and what they import; and removes test suites and C sources

The second way is for an image whose size is bounded.
"""

from __future__ import annotations

import compileall
import importlib
import py_compile
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
UNREAD = (".c", ".cpp", ".pyx", ".pxd", ".pyi")
MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH


def compile_everything() -> None:
    """Some distributions carry templates that are not Python: what cannot be compiled is passed over."""
    compileall.compile_dir(SITE, quiet=2, workers=0, invalidation_mode=MODE)


def compile_loaded(modules: Sequence[str]) -> None:
    """Raises `ImportError` for a module that the image lacks something for."""
    for module in modules:
        importlib.import_module(module)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for file in (Path(file) for file in files if file):
        if file.suffix == ".py" and file.is_relative_to(SITE):
            py_compile.compile(str(file), doraise=True, invalidation_mode=MODE)


def remove_unread() -> None:
    """Folders `tests`, and sources that Python does not read."""
    for path in list(SITE.rglob("*")):
        if path.name == "tests" and path.is_dir():
            shutil.rmtree(path)
        elif path.suffix in UNREAD:
            path.unlink(missing_ok=True)


def main(modules: Sequence[str]) -> None:
    sys.dont_write_bytecode = True
    if modules:
        remove_unread()
        compile_loaded(modules)
    else:
        compile_everything()


if __name__ == "__main__":
    main(sys.argv[1:])
