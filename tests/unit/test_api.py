"""`pipelinerl.start` and `Run`: what is shipped to the verifier, what is refused, and how the process of a run is driven."""

import importlib.util
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipelinerl
from pipelinerl import api
from pipelinerl.api import source_of
from pipelinerl.errors import FieldError, ServiceError, UserError
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_dir import checkpoint_of
from services.verifier.rewards.compose import user_scorer
from services.verifier.rewards.item import RewardInput

NOTEBOOK = '''
    import functools
    import math
    import math as m
    import re
    import xml.etree.ElementTree
    from collections import Counter

    WORDS = set(range(100))
    WORDS -= set(range(95))
    LIMITS = {"a": [1, 2.5], "b": None, "c": (float("-inf"), frozenset({b"x"}), 2j)}
    BOUND, UNKNOWN = float("inf"), float("nan")
    NUMBER = re.compile("[0-9]+", re.M)
    connection = open(__file__)

    class Mine:
        pass

    def inner(text):
        assert LIMITS["c"] == (-BOUND, frozenset({b"x"}), 2j) and UNKNOWN != UNKNOWN
        return len(NUMBER.findall(text)) + m.floor(LIMITS["a"][1]) + Counter(text)["x"]

    aliased = inner

    def again(text, depth=LIMITS["a"][0]):
        return aliased(text) if depth == 0 else again(text, depth - 1)

    def reward(item):
        return float(again(item.completion))

    def nested(item):
        return [inner(text) for text in (item.completion,)][0] + (0 in WORDS) + len(xml.etree.ElementTree.fromstring("<a/>"))

    if True:
        def with_text(item): return """
    LESS"""

    def twice(function):
        @functools.wraps(function)
        def wrapper(item):
            return 2 * function(item)
        return wrapper

    @twice
    def decorated(item): return 1 + cached()

    @functools.cache
    def cached(): return 2

    def plain(item): return 3
    wrapped_later = twice(plain)

    def outer():
        secret = 3
        def closure(item):
            return secret
        return closure

    def reads_object(item): return connection.read()
    def uses_class(item): return Mine()
    def unknown(item): return no_such_name
    def counts(item):
        global LIMITS
        LIMITS = {}
    by_lambda = lambda item: 1.0
'''


@pytest.fixture
def notebook(tmp_path: Path) -> ModuleType:
    """A module that, like a notebook, is the main program, which nothing else can import."""
    file = tmp_path / "notebook.py"
    file.write_text(textwrap.dedent(NOTEBOOK).replace("    LESS", "LESS"))
    spec = importlib.util.spec_from_file_location("__main__", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["reward", "nested", "decorated"])
def test_a_function_is_shipped_with_its_globals(
    notebook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = source_of(getattr(notebook, name))
    assert "connection" not in source
    (tmp_path / f"shipped_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    score = user_scorer(f"shipped_{name}:{name}")
    assert score(RewardInput(prompt="", completion="12 x 7 x", answer=None, reference={})).value == 2 + 2 + 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda of: of.outer(), "uses secret, defined in an enclosing function; make it a global variable, or a parameter"),
        (lambda of: of.reads_object, "uses connection, an object of type TextIOWrapper, which cannot be written as source"),
        (lambda of: of.uses_class, "uses Mine, a class of this program"),
        (lambda of: of.unknown, "uses no_such_name, which is not defined"),
        (lambda of: of.counts, "changes the global LIMITS"),
        (lambda of: of.with_text, "has no source (unexpected indent"),
        (lambda of: of.wrapped_later, "was wrapped after its definition; apply the wrapper as a decorator, above its def"),
        (lambda of: of.by_lambda, "is a lambda; define a function with def"),
    ],
)
def test_what_cannot_be_shipped_is_refused_by_name(notebook: ModuleType, function: Callable[..., Any], said: str) -> None:
    with pytest.raises(FieldError, match=re.escape(said)) as info:
        pipelinerl.start("arithmetic", function(notebook))
    assert info.value.field == "reward"


def importable(item: RewardInput) -> float:
    return float(Counter(item.completion)["x"])


FAKE = """#!{python}
import os, pathlib, signal, sys
pathlib.Path(sys.argv[6]).mkdir(parents=True, exist_ok=True)
pathlib.Path(sys.argv[6], "path").write_text(os.environ["PYTHONPATH"])
{made} and pathlib.Path(sys.argv[6], "run.json").write_text('{{"run": "a"}}')
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # one that comes before sigwait is not lost
print(*sys.argv[1:5], flush=True)
signal.sigwait([signal.SIGINT])
print("stopping")
sys.exit({code})
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, made: bool = True) -> None:
    """Replace the interpreter by a program that makes the run's folder, waits for SIGINT and ends with `code`."""
    (folder / "fake").write_text(FAKE.format(python=sys.executable, code=code, made=made))
    (folder / "fake").chmod(0o755)
    monkeypatch.setattr(api.sys, "executable", str(folder / "fake"))


def test_a_run_is_a_child_that_can_be_stopped(workplace: Path, notebook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, workplace, 130)
    (workplace / "mine.py").write_text("def score(item): return 1.0\n")
    with pipelinerl_run("arithmetic", notebook.reward) as run:
        assert re.fullmatch(r"runs/arithmetic-\d{8}-\d{6}", str(run.path))
        lines = run.follow()
        said = next(lines)
        file = Path(re.fullmatch(r"-m pipelinerl\.cli run (.*/recipe\.yaml)", said)[1])  # type: ignore[index]
        recipe = load_recipe(file)
        assert (recipe.trainer.steps, recipe.reward.scorer) == (3, "notebook_reward:reward")
        assert source_of(notebook.reward) == (file.parent / "notebook_reward.py").read_text()
        assert run.is_running
        assert run.stop().wait() is run
        assert [*lines] == ["stopping"]
        assert not run.is_running
    for reward, scorer in ((importable, "tests.unit.test_api:importable"), ("a.b:c", "a.b:c"), ("mine.py:score", "mine:score")):
        with pipelinerl_run({**RECIPE, "reward": {"timeout_s": 2}}, reward) as run:
            file = Path(next(run.follow()).split()[-1])
            assert load_recipe(file).reward.scorer == scorer
            assert (file.parent / "mine.py").is_file() == (scorer == "mine:score")
            assert run.stop().wait().output.endswith("stopping\n")


RECIPE = {"name": "a", "model": {"source": "package", "name": "arithmetic"}, "task": {"prompt_style": "compact"}}


@contextmanager
def pipelinerl_run(recipe: Any, reward: Any) -> Iterator[Any]:
    """A run of `start` with three steps, of which no process stays."""
    fields = {"trainer.steps": 3, "reward.answer_pattern": "", "model.max_context": 128}
    run = pipelinerl.start(recipe, reward, **fields)
    try:
        yield run
    finally:
        run._own().kill()
        run._own().wait()


def test_mistakes_prevent_a_start_and_failures_show_the_output(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, workplace, 1)
    with pytest.raises(UserError, match=r"trainer\.step = 3: no such field; did you mean trainer\.steps"):
        pipelinerl.start("arithmetic", **{"trainer.step": 3})
    again: dict[str, Any] = {"task": None, "tasks": [{"task": RECIPE["task"], "reward": {"scorer": "exact"}}]}
    unused = r"reward = 'math': no task uses it: each has its own reward\.scorer or environment"
    for given, options, problem in (
        (["arithmetic", "none.py:score"], {}, r"reward = 'none\.py:score': there is no such file in"),
        (["arithmetic", "math"], {"reward.scorer": "exact"}, unused),
        (["arithmetic", "math"], again, unused),
        (["arithmetic"], {"name": "a/b"}, r"name = 'a/b': use 1-40 lowercase letters"),
    ):
        with pytest.raises(FieldError, match=problem):
            pipelinerl.start(*given, **options)
    assert not (workplace / "runs").exists()
    with pipelinerl_run(RECIPE, None) as run:
        next(run.follow())
        with pytest.raises(ServiceError, match=r"ended with exit code 1:\n.*\nstopping"):
            run.stop().wait()
        (workplace / "fake").write_text((workplace / "fake").read_text().replace("sys.exit(1)", "sys.exit(2)"))
        with pipelinerl_run(RECIPE, None) as mistaken:
            next(mistaken.follow())
            with pytest.raises(UserError, match="ended with exit code 2"):
                mistaken.stop().wait()
        with pytest.raises(FieldError, match="was not started by this object"):
            pipelinerl.Run(run.path).stop()
    with pytest.raises(FieldError, match="there is no such folder"):
        pipelinerl.Run("runs/none")


def test_what_is_given_comes_before_what_the_recipe_has(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward and the modules beside it, or its package, replace modules of the same names. Each run has its own folder, and
    the program's modules are found."""
    pretend(monkeypatch, workplace, 1, made=False)
    monkeypatch.syspath_prepend(workplace / "lib")
    for folder, text in (("task", "of the recipe"), ("other", "given")):
        (workplace / folder).mkdir()
        (workplace / folder / "reward.py").write_text(f"# {text}")
        (workplace / folder / "words.py").write_text(f"# {text}")
    (workplace / "other" / "package" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/reward.py"):
        (workplace / "other" / "package" / name).touch()
    (workplace / "task" / "recipe.yaml").write_text(json.dumps({**RECIPE, "reward": {"scorer": "reward:score"}}))
    with pipelinerl_run("task", "other/package/inner/reward.py:score") as third:
        file = Path(next(third.follow()).split()[-1])
        assert load_recipe(file).reward.scorer == "package.inner.reward:score"
        assert (file.parent / "package" / "inner" / "reward.py").is_file()
    with pipelinerl_run("task/recipe.yaml", "other/reward.py:score") as first, pipelinerl_run(RECIPE, None) as second:
        assert first.path != second.path
        file = Path(next(first.follow()).split()[-1])
        assert {(file.parent / name).read_text() for name in ("reward.py", "words.py")} == {"# given"}
        assert str(workplace / "lib") in (first.path / "path").read_text().split(":")
        monkeypatch.chdir("/")
        assert first.stop().wait() is first, "stopped before it has begun, which is no failure"
        assert list(first.metrics) == []


def test_the_checkpoint_of_a_version_is_found(tmp_path: Path) -> None:
    (state := tmp_path / "checkpoints" / "step-10" / "resume" / "run.json").parent.mkdir(parents=True)
    state.write_text("{}")
    (final := tmp_path / "checkpoint").mkdir()
    (final / "config.json").touch()
    (final / "pipelinerl.json").write_text('{"policy_version": 25}')
    assert {one.path for one in (checkpoint_of(tmp_path), checkpoint_of(tmp_path, 25), checkpoint_of(final))} == {final}
    assert checkpoint_of(tmp_path, 10).path.name == "step-10"
    with pytest.raises(FieldError, match=r"version = 5: has no checkpoint \(checkpoint\.keep .*\); use one of 10, 25"):
        checkpoint_of(tmp_path, 5)
