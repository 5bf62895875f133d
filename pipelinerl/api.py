"""Train from Python: `pipelinerl.train(...)` and `pipelinerl.start(...)`, for programs and notebooks.

A run is a child process, `pipelinerl run`. It does not touch the caller's event loop, signal handlers, logs or environment
variables. Ctrl-C reaches only the caller. `train` then stops the run cleanly.
`Run` reads the run's folder, so `Run("runs/NAME")` also works for a run that another program started.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import copy
import html
import importlib.util
import inspect
import math
import os
import re
import shutil
import signal
import subprocess
import symtable
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pipelinerl.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, FieldError, MissingPackage, ServiceError, UserError
from pipelinerl.local.processes import living_names
from pipelinerl.recipe import loading
from pipelinerl.run_dir import RunDir, checkpoint_of, copy_modules, new_place, read_json, run_name
from pipelinerl.run_summary import read_jsonl
from pipelinerl.service.settings import read_address

Reward = Callable[..., Any] | str
Given = str | Path | Mapping[str, Any]
Folder = str | Path
_LOOK_S = 0.2
_PAGE_WITHIN_S = 60.0
_SHIPPED = "notebook_reward"
"""Name of the module that is written for a reward function that cannot be imported, such as one of a notebook."""


def train(
    recipe: Given, reward: Reward | None = None, *, name: str | None = None, run_dir: Folder | None = None, **overrides: Any
) -> Run:
    """Start a run as `start` does, print its progress, and return it at its end. Ctrl-C, or the stop button of a notebook,
    ends the run cleanly, with a checkpoint. Raises `UserError` for a mistake, and `ServiceError` if the run fails otherwise."""
    run = start(recipe, reward, name=name, run_dir=run_dir, **overrides)
    try:
        for line in run.follow():
            print(line, flush=True)
    except KeyboardInterrupt:
        run.stop()
    return run.wait()


def start(
    recipe: Given, reward: Reward | None = None, *, name: str | None = None, run_dir: Folder | None = None, **overrides: Any
) -> Run:
    """Start a run on this machine and return at once. The run is stopped cleanly when this program exits.

    `recipe`: the name of a shipped recipe, a recipe file, or a mapping of its fields. `reward`: a function, even one of a
    notebook; `package.module:function` or `file.py:function`; or the name of a scorer. A function in a file can import the
    other modules of that folder or package. `overrides`: fields by their paths, as in `**{"trainer.steps": 40}`. `name`,
    `run_dir`: as for `pipelinerl run`. Raises `UserError` for a mistake.
    """
    given: Path | None = None
    if isinstance(recipe, Mapping):
        data = copy.deepcopy(dict(recipe))
    elif not isinstance(recipe, str | Path):
        raise FieldError("recipe", f"{recipe!r:.100}", "give a recipe's name, its file, or a mapping of its fields")
    else:
        given = loading.find_recipe(recipe)
        data = loading.found_beside(loading.read_recipe(given), given.parent)
    prepared = tempfile.TemporaryDirectory(prefix="pipelinerl-")
    task, shipped, scorer = Path(prepared.name, "task"), Path(prepared.name, "reward"), ""
    for folder in (task, shipped):
        folder.mkdir()
    if reward is not None:
        scorer = _scorer(reward, shipped)
        loading.set_value(data, ("reward", "scorer"), scorer)
    for path, value in overrides.items():
        loading.set_value(data, path.split("."), value)
    checked = loading.recipe_from_data(data, "recipe" if given is None else str(given))
    if scorer and all(one.reward.scorer != scorer for one in checked.mixture.values()):
        raise FieldError(
            "reward",
            scorer,
            "no task uses it: each has its own reward.scorer or environment; drop reward, or remove a task's reward.scorer",
        )
    for modules in (loading.modules_beside(checked, given) if given is not None else None, shipped):
        if modules is not None:
            copy_modules(modules, task)  # the given reward comes last, so its modules overwrite those of the recipe
    (task / "recipe.yaml").write_text(loading.recipe_yaml(checked), encoding="utf-8")
    place = new_place(checked.name, datetime.now(), name, None if run_dir is None else _folder("run_dir", run_dir), "name")
    options = ["--run-dir", str(place.path), "--name", place.name]
    output = Path(prepared.name) / "output.txt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with output.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.cli", "run", str(task / "recipe.yaml"), *options],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True,
        )  # fmt: skip
    run = Run(place.path, _process=process, _output=output)
    run._prepared = prepared  # keeps the temporary folder as long as this object exists
    atexit.register(run.stop)
    return run


def _folder(field: str, given: Folder) -> Path:
    if not isinstance(given, str | Path):
        raise FieldError(field, f"{given!r:.100}", "give the folder of a run, as a string or a Path")
    return Path(given)


def _scorer(reward: Reward, shipped: Path) -> str:
    """Return the value of `reward.scorer`, and copy the user's modules that the verifier may lack to the folder `shipped`."""
    if isinstance(reward, str):
        file, _, name = reward.rpartition(":")
        if not file.endswith(".py"):
            return reward
        if not (path := Path(file).resolve()).is_file():
            raise FieldError("reward", reward, f"there is no such file in {path.parent}")
        root = next(one for one in path.parents if not (one / "__init__.py").is_file())  # nearest folder that is not a package
        if root != Path.cwd():
            copy_modules(root, shipped)
        elif path.parent == root:  # the verifier finds the other modules of the current folder
            shutil.copy(path, shipped)
        return f"{'.'.join(path.relative_to(root).with_suffix('').parts)}:{name}"
    if _is_function(reward) and (found := _imported_from(reward)):
        return found
    (shipped / f"{_SHIPPED}.py").write_text(source_of(reward), encoding="utf-8")
    return f"{_SHIPPED}:{reward.__name__}"


class Run:
    """A run in a folder, such as runs/NAME. `wait`, `stop` and `follow` need the object that `start` returned."""

    _prepared: tempfile.TemporaryDirectory[str] | None = None
    _stopped = False

    def __init__(
        self, path: str | Path, *, _process: subprocess.Popen[bytes] | None = None, _output: Path | None = None
    ) -> None:
        """Raises `FieldError` if there is no such folder."""
        self.path, self._process, self._output = _folder("path", path), _process, _output
        if _process is None:
            run_name(self.path)
        self._dir = RunDir(self.path.absolute(), self.path.name)  # absolute, as the program may change its current folder

    def wait(self) -> Run:
        """Wait for the end, and return this run. Raises `ServiceError` with the last lines of the output if the run failed, or
        `UserError` if the cause is a mistake that only the run found, such as one in the data or in the reward."""
        code = self._own().wait()
        stopped_early = self._stopped and not self._dir.identity.exists()  # interrupted while it was starting
        if code not in (EXIT_OK, EXIT_INTERRUPTED) and not stopped_early:
            kind = UserError if code == EXIT_USER_ERROR else ServiceError
            raise kind(f"the run {self.path} ended with exit code {code}:\n{self.output[-2000:]}")
        return self

    def stop(self) -> Run:
        """Stop the run cleanly, as Ctrl-C does: wait until a checkpoint and the report are written."""
        process = self._own()
        if process.poll() is None:
            self._stopped = True
            process.send_signal(signal.SIGINT)
            process.wait()
        return self

    def follow(self) -> Iterator[str]:
        """Yield the lines of the output until the run has ended."""
        process, told = self._own(), 0
        while True:
            ended = process.poll() is not None
            lines = self.output.splitlines(keepends=True)
            for line in lines[told:]:
                if line.endswith("\n") or ended:
                    told += 1
                    yield line.rstrip("\n")
            if ended:
                return
            time.sleep(_LOOK_S)  # a file gives no signal when it grows

    @property
    def output(self) -> str:
        """Output of the run so far; empty unless `start` or `train` returned this object."""
        return self._output.read_text(encoding="utf-8", errors="replace") if self._output is not None else ""

    def _own(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise FieldError("run", str(self.path), "was not started by this object; use the object or program that started it")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while a process of the run is alive."""
        return (self._process is not None and self._process.poll() is None) or bool(living_names(self._dir))

    def scale(self, actors: int) -> None:
        """Change the number of actors, and wait until all serve. Raises `ServiceError` if that fails."""
        command = [sys.executable, "-m", "pipelinerl.cli", "scale", "actors", str(actors), "--run-dir", str(self._dir.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ServiceError(done.stderr.strip().rpartition("\n")[2])

    @property
    def metrics(self) -> Any:
        """One row for each optimizer step (docs/run-directory.md): a DataFrame if pandas is installed, else a list of mappings.
        In the DataFrame, the key `b` of a mapping `a` is the column `a.b`."""
        rows = read_jsonl(self._dir.metrics)
        if importlib.util.find_spec("pandas") is None:
            return rows
        import pandas

        return pandas.json_normalize(rows, max_level=1)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole run; empty before its end."""
        return read_json(self._dir.summary)

    @property
    def page(self) -> str | None:
        """Address of the live page; None while there is none."""
        try:
            key = self._dir.credentials.page_key.read_text()
            return f"http://{read_address(self._dir.address('trainer')).http}/{key}/" if self.is_running else None
        except (OSError, ServiceError):
            return None

    def plot(self) -> Any:
        """Return a figure of the reward and the held-out accuracy by step. Raises `MissingPackage` without matplotlib."""
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingPackage("Run.plot needs matplotlib: pip install matplotlib; Run.metrics has the numbers")
        from matplotlib import pyplot, ticker

        rows, (figure, axes) = read_jsonl(self._dir.metrics), pyplot.subplots(figsize=(7, 3), layout="constrained")
        axes.set(xlabel="optimizer step", ylabel="reward, accuracy")
        pyplot.close(figure)  # otherwise a notebook shows the figure twice: as open and as returned
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        shown = ("step", "reward_mean", "reward", ""), ("heldout_version", "heldout_accuracy", "held-out accuracy", "o")
        for at, key, label, marker in shown:
            points = [(row[at], row[key]) for row in rows if row.get(key) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker=marker)
                axes.legend()
        return figure

    def policy(self, version: int | None = None) -> Any:
        """Load the policy of `version`, or the newest one, as a `pipelinerl.policy.Policy`. Raises `FieldError` if there is no
        such checkpoint, or if it does not load."""
        return importlib.import_module("pipelinerl.policy").Policy(checkpoint_of(self._dir.path, version))

    def __repr__(self) -> str:
        steps = read_jsonl(self._dir.metrics)
        state = "running" if self.is_running else "ended"
        return f"Run({str(self.path)!r}): {state}, {steps[-1]['step'] if steps else 0} optimizer steps"

    def _repr_html_(self) -> str:
        """Return a frame with the live page, or one line about the run if no page is served within a minute."""
        until = time.monotonic() + _PAGE_WITHIN_S
        while (page := self.page) is None and self.is_running and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if page is None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return f'<iframe src="{html.escape(page)}" width="100%" height="640"></iframe>'


# Write a function of a notebook or script as the source of a module that the verifier can import. Nothing is pickled.

_MOST_CHARACTERS = 100_000
"""Maximum length of a constant in a module's source, in characters."""


def source_of(function: Any) -> str:
    """Return the source of a module with this function, the imports and constants that it uses, and the functions of the same
    notebook that it calls. Raises `FieldError` if a part cannot be written as source, such as a closure or an object."""
    parts: dict[str, str] = {}
    _ship_function(getattr(function, "__name__", repr(function)), function, parts)
    return "\n".join(["from __future__ import annotations\n", *parts.values()])


def _ship_function(name: str, function: Any, parts: dict[str, str]) -> None:
    """Add to `parts` the source of everything that the function uses, and then the function's own source."""
    inner = inspect.unwrap(function)  # decorators are part of the source
    if not isinstance(inner, FunctionType) or inner.__name__ == "<lambda>":
        kind = "a lambda" if isinstance(inner, FunctionType) else f"of type {type(function).__name__}"
        raise _refused(name, f"is {kind}; define a function with def")
    if free := inner.__code__.co_freevars:
        raise _refused(
            name,
            f"uses {', '.join(free)}, defined in an enclosing function; make it a global variable, or a parameter with a "
            "default value",
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise _refused(name, f"has no source ({error}); define it in a file or in a notebook") from error
    if inner is not function and not getattr(definition, "decorator_list", []):
        raise _refused(name, "was wrapped after its definition; apply the wrapper as a decorator, above its def")
    parts[name] = ""  # marks the function as visited, because functions may call each other
    for used in _globals_of(function.__name__, source):
        if used not in parts:
            _ship_value(name, used, inner, parts)
    for node in ast.walk(definition):  # submodules, such as `xml.etree.ElementTree` used after `import xml`
        first, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        module = inner.__globals__.get(first)
        if isinstance(module, ModuleType) and (dotted := f"{module.__name__}.{rest}") in sys.modules:
            parts[dotted] = f"import {dotted}\n"
    del parts[name]
    parts[name] = f"\n{source}"
    if function.__name__ != name:
        parts[name] += f"\n\n{name} = {function.__name__}\n"


def _globals_of(name: str, source: str) -> list[str]:
    """Return the global names that a function, its defaults and its decorators use."""
    tables = [top := symtable.symtable(f"from __future__ import annotations\n{source}", name, "exec")]
    for table in tables:
        tables += table.get_children()
    found = [(symbol, table is top) for table in tables for symbol in table.get_symbols()]
    for symbol, _ in found:
        if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
            raise _refused(name, f"changes the global {symbol.get_name()}, which verifier processes do not share; use a file")
    return [symbol.get_name() for symbol, is_top in found if (symbol.is_referenced() if is_top else symbol.is_global())]


def _ship_value(user: str, name: str, function: FunctionType, parts: dict[str, str]) -> None:
    """Add the global `name`, which `function` uses, to `parts`: an import, a function of the same module, or a constant."""
    if name not in function.__globals__:
        if not hasattr(builtins, name) and name != "__name__":
            raise _refused(user, f"uses {name}, which is not defined; define or import it")
        return
    value = function.__globals__[name]
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}\n"
    elif _is_function(value) and value.__module__ == function.__module__:
        _ship_function(name, value, parts)
    elif found := _imported_from(value):
        parts[name] = "from {} import {} as {}\n".format(*found.split(":"), name)
    elif isinstance(value, re.Pattern):
        parts["re "] = "import re\n"
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})\n"
    else:
        try:
            text = _as_source(value)
        except (TypeError, RecursionError) as error:
            kind = "a class of this program" if isinstance(value, type) else f"an object of type {type(value).__name__}"
            fix = "import it from a file, create it in the function, or use numbers, strings, and lists or mappings of these"
            raise _refused(user, f"uses {name}, {kind}, which cannot be written as source; {fix}") from error
        if len(text) > _MOST_CHARACTERS:
            fix = f"more than {_MOST_CHARACTERS:,}; write it to a file that the function reads"
            raise _refused(user, f"uses {name}; written as source, its value has {len(text):,} characters, {fix}")
        parts[name] = f"{name} = {text}\n"


def _is_function(value: Any) -> bool:
    """Return whether a value is a Python function, perhaps a decorated one."""
    return callable(value) and inspect.isfunction(inspect.unwrap(value))


def _imported_from(value: Any) -> str:
    """Return `module:name` if importing it gives this very object, else "". The main program cannot be imported elsewhere."""
    module, name = str(getattr(value, "__module__", None)), getattr(value, "__qualname__", "")
    is_held = module != "__main__" and name.isidentifier() and getattr(sys.modules.get(module), name, None) is value
    return f"{module}:{name}" if is_held else ""


def _as_source(value: Any) -> str:
    """Return an expression for None, a number, str, bytes, or a list, tuple, set or dict of these; else raise `TypeError`."""
    kind = type(value)
    if kind is dict:
        return f"{{{', '.join(f'{_as_source(key)}: {_as_source(item)}' for key, item in value.items())}}}"
    if kind in (list, tuple, set, frozenset):
        items = f"[{', '.join(map(_as_source, value))}]"
        return items if kind is list else f"{kind.__name__}({items})"
    if kind in (float, complex) and not math.isfinite(abs(value)):
        return f"{kind.__name__}('{value!r}')"
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    raise TypeError(kind)


def _refused(name: str, why: str) -> FieldError:
    return FieldError("reward", name, why)
