"""Recipes: reading, overriding, every wrong field named, the way back to YAML, and what a machine must have."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.episodes import check_environment_class
from pipelinerl.errors import FieldError, Lacking, UserError
from pipelinerl.recipe import preflight
from pipelinerl.recipe.devices import Device, Devices, has_gpu
from pipelinerl.recipe.fields import SCORERS, Recipe, RewardConfig, dotted_paths
from pipelinerl.recipe.loading import (
    RecipeError,
    YamlError,
    find_recipe,
    load_recipe,
    parse_override,
    parse_yaml,
    recipe_from_data,
    recipe_yaml,
)
from pipelinerl.recipe.preflight import Examination, check_environment, doubts, examine
from pipelinerl.recipe.rehearsal import Call, unearned
from pipelinerl.tasks.source import Problem
from tests.unit.builders import model_folder

RECIPES = Path(__file__).parents[2] / "recipes"


def minimal(**sections: Any) -> dict[str, Any]:
    return {"name": "tiny", "model": {"source": "hub", "name": "org/model"}, "task": {}, **sections}


def problems(data: dict[str, Any], *overrides: str) -> dict[str, str]:
    """Text of each problem by its field; fails when the recipe is good."""
    with pytest.raises(RecipeError) as info:
        recipe_from_data(data, "tiny.yaml", overrides)
    assert str(info.value).startswith(f"tiny.yaml: {len(info.value.problems)} problem")
    return {problem.field: str(problem) for problem in info.value.problems}


def with_values(fields: dict[str, Any]) -> dict[str, Any]:
    data = minimal()
    for path, value in fields.items():
        section = data
        *names, last = path.split(".")
        for name in names:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[last] = value
    return data


# Reading


def test_scientific_notation_is_a_number_and_text_stays_text() -> None:
    data = parse_yaml("a: 1e-6\nb: -2E+3\nc: .5e1\nd: 1e-6x\ne: 'null'\nf: null\ng: 7", "x")
    assert data == {"a": 1e-6, "b": -2000.0, "c": 5.0, "d": "1e-6x", "e": "null", "f": None, "g": 7}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a' occurs twice (first on line 1)"),
        ("s:\n  x: 1\n  x: 1\n", 3, "key 'x' occurs twice (first on line 2)"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: !!python/object:os.system 1\n", 1, "could not determine a constructor"),
        ("a: \x00\n", 0, "contains a character that YAML does not allow"),
        ("a: 2026-13-01\n", 0, "a value is invalid: month must be in 1..12"),
    ],
)
def test_yaml_mistakes_are_named_by_line(text: str, line: int, said: str) -> None:
    with pytest.raises(YamlError) as info:
        parse_yaml(text, "mine.yaml")
    assert info.value.line == line
    assert said in str(info.value)
    assert str(info.value).startswith(f"mine.yaml:{line}: " if line else "mine.yaml: ")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    for content, said in [(b"- a\n", "must be a mapping"), (b"", "must be a mapping"), (b"\xff\xfe\x00", "not a UTF-8")]:
        file.write_bytes(content)
        with pytest.raises(YamlError, match=said):
            load_recipe(file)


def test_names_are_looked_up_in_order_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/arithmetic.yaml").touch()
    assert find_recipe("arithmetic") == Path("recipes/arithmetic.yaml")
    assert find_recipe("gsm") == RECIPES / "gsm.yaml"
    assert find_recipe(RECIPES / "arithmetic.yaml") == RECIPES / "arithmetic.yaml"
    with pytest.raises(FieldError, match=r"recipe = 'oooo.*: no such file; give a path or one of: arithmetic"):
        find_recipe("o" * 256)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_shipped_recipes_survive_the_way_to_yaml_and_back(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.name == name
    assert recipe.description
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(recipe_yaml(recipe))
    assert load_recipe(resolved) == recipe


# Overrides


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("trainer.steps=5", ("trainer", "steps"), 5),
        ("trainer.learning_rate=1e-4", ("trainer", "learning_rate"), 1e-4),
        ("algorithm.max_lag=null", ("algorithm", "max_lag"), None),
        ("task.config={min_terms: 2}", ("task", "config"), {"min_terms": 2}),
        ("reward.answer_pattern='#(a)' # of GSM8K", ("reward", "answer_pattern"), "#(a)"),
        (r"reward.answer_pattern=a #(\d+)$", ("reward", "answer_pattern"), r"a #(\d+)$"),
        (r"reward.answer_pattern=[(\d+)", ("reward", "answer_pattern"), r"[(\d+)"),
        ("reward.answer_pattern=", ("reward", "answer_pattern"), ""),
        ("sampling.stop=a #b", ("sampling", "stop"), ["a #b"]),
        ("sampling.stop='#'", ("sampling", "stop"), ["#"]),
        ("sampling.stop=['a #b', c] # two", ("sampling", "stop"), ["a #b", "c"]),
        ("sampling.stop=", ("sampling", "stop"), []),
        ("trainer.lora.target_modules=all-linear", ("trainer", "lora", "target_modules"), "all-linear"),
        ("algorithm.max_lag=", ("algorithm", "max_lag"), None),
    ],
)
def test_override_values_are_yaml(text: str, path: tuple[str, ...], value: object) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize("text", ["trainer.steps", "=5", "trainer..steps=5", "trainer.steps={a", "sampling.stop=[#]"])
def test_unreadable_overrides_name_themselves(text: str) -> None:
    with pytest.raises(FieldError, match=r"^--set = "):
        parse_override(text)


def test_later_overrides_win_and_reach_into_null_sections_and_free_form_mappings() -> None:
    data = minimal(trainer=None)
    texts = ["trainer.steps=5", "trainer.steps=6", "actor.engine.threads=2", "task.config.min_terms=2"]
    recipe = recipe_from_data(data, "x", texts)
    assert (recipe.trainer.steps, recipe.actor.engine.threads, recipe.task.config) == (6, 2, {"min_terms": 2})
    assert data == minimal(trainer=None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.stepz=1", "no such field; did you mean trainer.steps?"),
        ("learning_rate=1", "no such field; did you mean trainer.learning_rate?"),
        ("trainer.lr=1", "no such field; did you mean trainer.learning_rate or trainer.lora?"),
        ("seed.high=1", "no such field; seed is a single value"),
    ],
)
def test_unknown_override_paths_get_near_matches(override: str, said: str) -> None:
    found = problems(minimal(), override)
    path, _, value = override.partition("=")
    assert found[f"--set {path}"].startswith(f"--set {path} = {value}: ")
    assert said in found[f"--set {path}"]


# Wrong fields


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("trainer.steps", 0, "use an integer, at least 1 and at most 10000000"),
        ("trainer.steps", 1.5, "use an integer"),
        ("trainer.steps", True, "use an integer"),
        ("trainer.learning_rate", "fast", "use a number, above 0 and at most 1"),
        ("trainer.gradient_checkpointing", "maybe", "use true or false"),
        ("trainer.beta1", 1.0, "below 1"),
        ("trainer.lerning_rate", 1, "no such field; did you mean trainer.learning_rate, trainer.value_learning_rate or"),
        ("model.dtype", "float16", "too small a range: gradients underflow to zero, weights overflow; use bfloat16 or float32"),
        ("weights.wire_dtype", "float16", "too small a range: gradients underflow to zero, weights overflow; use bfloat16 or"),
        ("algorithm.max_lag", -1, "use an integer or null, at least 0"),
        ("algorithm.clip_low", 1.5, "at most 1"),
        ("task.config", [1], "use a mapping"),
        ("weights.deadline_s", float("inf"), "use a number, above 0"),
        ("evaluation.temperature", float("nan"), "use a number, at least 0 and at most 2"),
        ("reward.answer_pattern", "(", "not a regular expression"),
        ("reward.answer_pattern", r"\d+", "must have a group (...) around the answer"),
        ("reward.scorer", "maths", "did you mean math? use one of task, exact, regex"),
        ("reward.scorer", "my_pkg.rewards", "pkg.module:function"),
        ("reward.correct", 0, "use a number, above 0"),
        ("sampling.stop", ["\n", ""], "an empty text would end every completion"),
        ("actor.engine", 3, "use a section with kv_cache_gib"),
        ("trackers", "wandb", "use a list of tensorboard, mlflow, wandb"),
        ("trackers", ["mlflow", "mlflow"], "name each tracker once"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(field: str, value: object, said: str) -> None:
    ((named, text),) = problems(with_values({field: value})).items()
    assert named == field
    assert text.startswith(f"{field} = {value!r}: ")
    assert said in text


GAMES = "evaluation.sets=[{name: games, task: {source: environment, name: 'a:B'}"
JUDGE = "{url: 'http://a/v1', model: m, template: '{completion}', pattern: '(.)'}"
MISSPELT = JUDGE.replace("{comp", "{question} {{answer}} {comp")


@pytest.mark.parametrize(
    ("override", "field", "said"),
    [
        ("trainer.batch_size=12", "trainer.batch_size", "12: must be a multiple of sampling.group_size (8)"),
        ("sampling.max_tokens=2048", "sampling.max_tokens", "2048: leaves no room for a prompt"),
        ("trainer.tokens_per_microbatch=100", "trainer.tokens_per_microbatch", "100: cannot hold one sequence"),
        ("sampling.group_size=1", "algorithm.advantage", "gives a group's only sample"),
        ("task.source=jsonl", "task.path", "is empty: task.source = 'jsonl' needs"),
        ("model={source: path}", "model.name", "is empty: model.source = 'path' needs a folder"),
        ("model={source: hub}", "model.name", "is empty: model.source = 'hub' needs a Hugging Face id"),
        ("model={source: hub, name: guess}", "model.name", "is a small model of this package, not of the hub"),
        ("model={source: package, name: x}", "model.name", "is not a small model of this package; use"),
        ("trainer={steps: 20, schedule: wsd}", "trainer.decay_steps", "0: use 1 to 20: trainer.schedule = 'wsd' can decay"),
        ("trainer={steps: 9, schedule: wsd, warmup_steps: 5, decay_steps: 5}", "trainer.decay_steps", "use 1 to 4: trainer"),
        ("trainer={steps: 9, schedule: wsd, warmup_steps: 9, decay_steps: 1}", "trainer.warmup_steps", "use at most 8"),
        ("reward.json_schema={type: object}", "reward.json_schema", "applies only to reward.scorer = 'json_schema'"),
        ("reward.test_timeout_s=3", "reward.test_timeout_s", "applies only to reward.scorer = 'code'"),
        ("reward.format_weight=0.5", "reward.format_weight", "adds nothing without reward.format_pattern"),
        ("reward.format_pattern=a", "reward.format_pattern", "adds nothing, since reward.format_weight is 0"),
        ("reward.overlong.penalty=0.5", "reward.overlong.penalty", "has no effect"),
        ("reward.sandbox=true", "reward.sandbox", "applies only to programs and functions"),
        ("reward.correct=20000", "reward.correct", "is beyond ±reward.max_abs (10000)"),
        (f"{GAMES}, reward: {{scorer: math}}}}]", "evaluation.sets.0.reward.scorer", "use the scorer task (each"),
        (f"{GAMES}, reward: {{answer_pattern: '(a)'}}}}]", "evaluation.sets.0.reward.answer_pattern", "is ignored: the env"),
        ("trainer={schedule: cosine, decay_steps: 5}", "trainer.decay_steps", "5: trainer.schedule = 'cosine' does not use"),
        ("trainer.final_learning_rate=0.1", "trainer.final_learning_rate", "0.1: trainer.schedule = 'constant' does not"),
        ("trainer.schedule=inverse_sqrt", "trainer.warmup_steps", "0: trainer.schedule = 'inverse_sqrt' decays as"),
        ("reward.overlong.buffer_tokens=65", "reward.overlong.buffer_tokens", "is more than sampling.max_tokens (64)"),
        ("algorithm.advantage=value reward.truncated=mask", "reward.truncated", "needs every reward for its baseline"),
        ("reward.scorer=judge", "reward.judge", "None: reward.scorer = 'judge' needs this section"),
        (f"{GAMES}, reward: {{scorer: judge, judge: {JUDGE}}}}}]", "evaluation.sets.0.reward.scorer", "the environment gives"),
        (f"reward.judge={JUDGE}", "reward.judge", "applies only to reward.scorer = 'judge'"),
        (f"reward={{scorer: judge, judge: {MISSPELT}}}", "reward.judge.template", "{question} would not be replaced; use"),
        ("actor.colocate=true", "actor.colocate", "needs mode = 'conventional', in which actor and trainer take turns"),
        ("mode=conventional actor.colocate=true actor.count=2", "actor.count", "2: must be 1 if actor and trainer share a GPU"),
        ("mode=conventional algorithm.conventional_g=4 algorithm.max_lag=1", "algorithm.max_lag", "1: "),
        ("evaluation.samples=4", "evaluation.samples", "4: greedy answers to a problem are all the same"),
        ("trainer.value_learning_rate=1e-5", "trainer.value_learning_rate", "'leave_one_out' has no value head"),
    ],
)
def test_fields_that_contradict_each_other(override: str, field: str, said: str) -> None:
    overrides = [override] if "{" in override else override.split()
    found = problems(minimal(task={"prompt_style": "compact"}), *overrides)
    assert list(found) == [field]
    assert said in found[field]


TWO: dict[str, Any] = {
    "task": None,
    "tasks": [{"task": {}, "weight": 3}, {"name": "words", "task": {"name": "spell_backward"}}],
}


def test_tasks_have_what_the_recipe_says_unless_they_say_otherwise() -> None:
    changes = ["reward.correct=2", "sampling.max_tokens=9", "tasks.1.max_tokens=12", "tasks.1.reward={scorer: exact}"]
    recipe = recipe_from_data(minimal(**TWO), "x", [*changes, "tasks.0.task.heldout_problems=7"])
    assert [
        (name, share.weight, share.reward.correct, share.reward.scorer, share.max_tokens, share.task.heldout_problems)
        for name, share in recipe.mixture.items()
    ] == [("chain_sum", 3, 2, "task", 9, 7), ("words", 1, 1, "exact", 12, 128)]
    assert recipe.max_tokens == 12
    alone = recipe_from_data(minimal(), "x", changes[:2]).mixture
    assert [(name, share.reward.correct, share.max_tokens) for name, share in alone.items()] == [("chain_sum", 2, 9)]


@pytest.mark.parametrize(
    ("override", "field", "said"),
    [
        ("task={}", "tasks", "cannot be combined with task; give only one"),
        ("tasks=[]", "task", "a recipe needs this section, or a list of tasks in tasks"),
        ("tasks.1.name=chain_sum", "tasks.0.name", "needs a unique name"),
        ("tasks.1.max_tokens=2048", "tasks.1.max_tokens", "2048: leaves no room for a prompt"),
        ("tasks.0.reward.overlong.buffer_tokens=65", "tasks.0.reward.overlong.buffer_tokens", "than tasks.0.max_tokens (64)"),
        ("tasks.1.weight=0", "tasks.1.weight", "use a number, above 0"),
        ("tasks.weight=2", "--set tasks.weight", "give a position, from 0: tasks.0.weight"),
        ("tasks.2.weight=2", "--set tasks.2.weight", "the list has 2 items, counted from 0"),
    ],
)
def test_a_wrong_field_of_one_of_several_tasks_is_named_by_its_position(override: str, field: str, said: str) -> None:
    found = problems(minimal(**TWO), override)
    assert said in found[field]


def test_sets_that_are_evaluated_have_what_the_recipe_says_unless_they_say_otherwise() -> None:
    sets = [{"name": "hard", "task": {"heldout_problems": 9}}, {"task": {"name": "gcd"}, "max_tokens": 5}]
    changes = ["sampling.max_tokens=9", "reward.correct=2", "evaluation.sets.0.reward.correct=3"]
    recipe = recipe_from_data(minimal(evaluation={"sets": sets}), "x", changes)
    assert list(recipe.mixture) == ["chain_sum"]
    assert [(name, one.max_tokens, one.reward.correct) for name, one in recipe.problem_sets.items()] == [
        ("chain_sum", 9, 2), ("hard", 9, 3), ("gcd", 5, 2),
    ]  # fmt: skip
    assert recipe.max_tokens == 9
    again = Recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe
    found = problems(minimal(evaluation={"sets": [{"task": {}, "max_tokens": 2048}]}))
    assert list(found) == ["evaluation.sets.0.name", "evaluation.sets.0.max_tokens"]
    assert "needs a unique name" in found["evaluation.sets.0.name"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["task.name=spell_backward", "task.config={}", "task.prompt_style=plain"], "task.name"),
        (["task.source=jsonl", "task.path=p.jsonl"], "task.source"),
        (["task.prompt_style=plain"], "task.prompt_style"),
    ],
)
def test_a_small_model_of_the_package_reads_its_own_task_only(overrides: list[str], field: str) -> None:
    with pytest.raises(RecipeError, match="1 problem") as info:
        load_recipe(RECIPES / "arithmetic.yaml", overrides)
    problem = info.value.problems[0]
    assert (problem.field, str(problem.value)) == (field, overrides[0].partition("=")[2])
    assert "use another model: set model.source to hub, path, checkpoint or smollm2" in problem.fix
    load_recipe(RECIPES / "arithmetic.yaml", [*overrides, "model.source=smollm2"])


@given(
    st.dictionaries(
        st.sampled_from([*dotted_paths(Recipe), "no.such", "trainer.x"]),
        st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.dictionaries(st.text(), st.none()),
        max_size=6,
    )
)
def test_whatever_is_written_gives_a_recipe_or_a_recipe_error(fields: dict[str, Any]) -> None:
    try:
        recipe = recipe_from_data(with_values(fields), "x")
    except RecipeError as error:
        found = error.problems
    else:
        found = None
        assert recipe_from_data(yaml.safe_load(recipe_yaml(recipe)), "again") == recipe
    assert found is None or (found and all(problem.field for problem in found))


# What the machine must have


def found(*overrides: str, **sections: Any) -> dict[str, tuple[str, bool]]:
    problems = examine(recipe_from_data(minimal(**sections), "x", overrides)).problems
    return {problem.field: (str(problem), isinstance(problem, Lacking)) for problem in problems}


MISTAKES = [
    (f"model={{source: path, name: DIR/{'m' * 256}}}", "model.name", "is not a folder"),
    ("model={source: path, name: DIR}", "model.name", "has no config.json"),
    (f"task={{source: jsonl, path: DIR/{'n' * 256}}}", "task.path", "there is no such file"),
    ("task={source: jsonl, path: DIR/broken.jsonl}", "task.path", "broken.jsonl, line 1: not JSON"),
    ("task={source: jsonl, path: DIR/nine.jsonl, heldout_problems: 9}", "task.heldout_problems", "9 distinct problems"),
    ("task={name: chain_sm}", "task.name", "did you mean chain_sum or "),
    ("task={config: {min_trms: 2}}", "task.config.min_trms", "did you mean min_terms?"),
    ("task={config: {min_terms: 3, max_terms: 2}}", "task.config", "chain_sum refuses it"),
    ("task={heldout_problems: 500, config: {max_digits: 1, max_terms: 2}}", "task.heldout_problems", "too few"),
    ("task={name: gcd, prompt_style: compact}", "task.prompt_style", "have no expression"),
]
LACKING = [
    ("task={source: jsonl, path: DIR/p.parquet}", "task.path", "pip install pyarrow"),
    ("actor={count: 0}", "actor.count", "needs at least 1"),
    ("model={source: smollm2}", "PIPELINERL_CACHE", "broken.jsonl is not a folder, and initial models are kept there"),
    ("trainer={context_parallel: 2}", "trainer.context_parallel", "does not divide the 1 rank of"),
    ("trainer={nproc: 4, shard_ranks: 3}", "trainer.shard_ranks", "does not divide the 4 ranks"),
    ("trainer={optimizer: adamw_8bit}", "trainer.optimizer", "run make adamw8bit, or use adamw"),
]


@pytest.mark.parametrize(
    ("override", "field", "said", "lacking"), [*((*row, False) for row in MISTAKES), *((*row, True) for row in LACKING)]
)
def test_what_is_a_mistake_and_what_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, field: str, said: str, lacking: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else object())
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "broken.jsonl" / "cache"))
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "nine.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(9)))
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    ((named, (text, is_lacking)),) = found(override.replace("DIR", str(tmp_path))).items()
    assert (named, is_lacking) == (field, lacking)
    assert said in text


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b'{"model_type": "llama"}', "its config.json names no architecture"),
        ("tokenizer.json", None, "has no tokenizer (tokenizer.json); copy"),
        ("config.json", b'{"architectures": ["A"], "max_position_embeddings": 9}', "the model's context of 9 tokens; lower it"),
        ("model.safetensors", None, "has no weights (*.safetensors)"),
        ("model.safetensors", -3, "model.safetensors has 74 bytes, but its header says 77; copy the broken files again"),
        ("model.safetensors", 5, "model.safetensors is not a safetensors file, or its header is incomplete"),
        ("model.safetensors", b"\x1f" + bytes(7) + b'{"a": {"data_offsets": [0, 0]}}', "is not a safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "1.safetensors"}}', "lacks 1.safetensors, among the 1 weight"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "config.json"}}', "delete one, since actors may"),
        ("adapter_config.json", b"{}", "has a LoRA adapter, which actors would not apply; merge it into the model"),
    ],
)
def test_a_broken_model_folder_is_refused(tmp_path: Path, file: str, content: bytes | int | None, said: str) -> None:
    path, config = model_folder(tmp_path) / file, tmp_path / "config.json"
    before = config.read_bytes()
    scaled = {"max_position_embeddings": 9, "rope_scaling": {"type": "yarn", "factor": 64.0}, "text_config": []}
    config.write_text(json.dumps(json.loads(before) | scaled))
    assert found(model={"source": "path", "name": str(tmp_path)}) == {}
    config.write_bytes(before)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    ((field, (text, is_lacking)),) = found(model={"source": "path", "name": str(tmp_path)}).items()
    assert (field, is_lacking) == ("model.max_context" if "context" in said else "model.name", False)
    assert said in text


def test_a_task_without_a_name_is_called_by_its_file() -> None:
    file = {"source": "jsonl", "path": "data/sums of two.jsonl"}
    recipe = recipe_from_data(minimal(task=file, evaluation={"sets": [{"task": {**file, "name": "mine"}}]}), "x")
    assert list(recipe.problem_sets) == ["sums of two", "mine"]
    two = recipe_from_data(minimal(task=None, tasks=[{"task": file}, {"task": {}}]), "x")
    assert list(two.mixture) == ["sums of two", "chain_sum"]


def test_what_may_be_meant_is_a_doubt(tmp_path: Path) -> None:
    rows = ('{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": ""}', '{"prompt": "a", "answer": "2"}')
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    task = {"source": "jsonl", "path": str(tmp_path / "p.jsonl"), "heldout_problems": 1}
    recipe = recipe_from_data(minimal(task=task, trainer={"steps": 3, "warmup_steps": 4}), "x")
    warmup, repeated, empty = (str(one) for _, one in doubts(recipe, examine(recipe)))
    assert warmup.startswith("trainer.warmup_steps = 4: is above trainer.steps (3), so the rate never reaches 1e-06")
    assert "p.jsonl': has 1 repeated prompt (1 with another answer), the first in line 3 ('a'); they are left out" in repeated
    assert "p.jsonl': has 1 empty answer, the first in line 2; leave such lines out, because reward.scorer = 'task'" in empty
    fine = recipe_from_data(minimal(trainer={"steps": 4, "warmup_steps": 4}), "x")
    assert list(doubts(fine, Examination())) == []
    told = {"source": "environment", "name": "a:B", "system_prompt": "s", "instruction": "i"}
    plain = {"source": "jsonl", "path": "a.jsonl", "prompt_style": "compact", "system_prompt": "s", "config": {"a": 1}}
    used = {"loss": "ppo_clip", "clip_high": 0.3, "mask": "icepop", "mask_low": 0.1, "conventional_g": 2, "clamp": 2.0}
    weights = {"keep_versions": True, "probe_tokens": 8, "stop_on_mismatch": True}
    games, turns = {"source": "environment", "name": "a:B", "max_turns": 3}, {"max_turns": 3, "answer_timeout_s": 1.0}
    scored, longest = {"correct": 2.0}, {"max_tokens": 32}
    whole = {"task": {}, "reward": {"correct": 3.0}, "max_tokens": 16}
    algorithm = {"clip_high": 0.3, "mask_kl": 0.1, "max_lag_of": "mean", "conventional_g": 2, "value_coefficient": 1.0}
    for data, fields in (
        (minimal(task=told), ["task.system_prompt", "task.instruction"]),
        (minimal(task=plain), ["task.config", "task.system_prompt", "task.prompt_style"]),
        (minimal(algorithm=algorithm), [f"algorithm.{name}" for name in algorithm]),
        (minimal(mode="conventional", algorithm=used), ["algorithm.clamp"]),
        (minimal(weights={"probe_every": 0, **weights}), [f"weights.{name}" for name in weights]),
        (minimal(weights={"log": "nats", **weights}), []),
        (minimal(mode="conventional", weights={"recompute_kv": True}), ["weights.recompute_kv"]),
        (
            minimal(
                task=games | {"prompt_style": "compact"}, model={"source": "hub", "name": "org/model", "head_dtype": "model"}
            ),
            ["task.prompt_style", "model.head_dtype"],
        ),
        (minimal(task=None, reward=scored, sampling=longest, tasks=[whole]), ["reward.correct", "sampling.max_tokens"]),
        (minimal(task=None, reward=scored, sampling=longest, tasks=[whole, {"task": {"name": "gcd"}}]), []),
        (
            minimal(actor={"episodes_in_progress": 4}, evaluation={"sets": [{"task": games}, {"name": "s", "task": turns}]}),
            ["actor.episodes_in_progress", *(f"evaluation.sets.1.task.{name}" for name in turns)],
        ),
    ):
        assert sorted(one.field for _, one in doubts(recipe_from_data(data, "x"), Examination())) == sorted(fields)


def test_reward_code_is_looked_up_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(*_):\n    return 1.0\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    from my_rewards import score\n\n    return score\n")
    (tmp_path / "broken.py").write_text("score = (\n")
    (tmp_path / "raising.py").write_text("import os\n\nos.environ['HOUSE']\n")
    (tmp_path / "leaving.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "needy.py").write_text("import no_such_package_here\n")
    monkeypatch.chdir(tmp_path)
    assert found(reward={"scorer": "my_rewards:score"}) == found(reward={"scorer": "lazy:score"}) == {}
    for scorer, said, lacking in (
        ("my_rewards:scor", "scor does not exist in my_rewards; did you mean score?", False),
        ("json.nope:score", "cannot import json.nope: ModuleNotFoundError: No module named 'json.nope'", False),
        ("broken:score", "SyntaxError: '(' was never closed (broken.py, line 1) at broken.py:1", False),
        ("raising:score", "cannot import raising: KeyError: 'HOUSE' at raising.py:3", False),
        ("leaving:score", "importing its module ends the process with exit code 0; correct the module", False),
        ("needy:score", "No module named 'no_such_package_here' at needy.py:1; install the package", True),
        ("no_such_package_here:score", "No module named 'no_such_package_here'; install the package", True),
    ):
        ((field, (text, is_lacking)),) = found(reward={"scorer": scorer}).items()
        assert (field, is_lacking) == ("reward.scorer", lacking)
        assert said in text
        assert ("install" in text) is lacking


REWARDS = """import os, signal, time

def right(item):
    return float(item.answer == item.reference["answer"])

def keys(item):
    return item.reference["row"]["solution"]

def unanswered(item):
    return float(item.answer.strip() == "4")

def text(item):
    return "1"

def leaves(item):
    os._exit(3)

def hangs(item):
    time.sleep(600)

def kills(item):
    os.kill(os.getppid(), signal.SIGKILL)
"""


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Examination]:
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(REWARDS)
    Path("p.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "{i}", "tests": []}}\n' for i in (1, 2, 3, 4)))

    def examined(*scorers: str, **fields: Any) -> Examination:
        file, reward = {"source": "jsonl", "path": "p.jsonl"}, {"answer_pattern": r"(\d)", "timeout_s": 120.0}
        named = [name if name in SCORERS else f"my_rewards:{name}" for name in scorers]
        sets = [{"name": name, "task": file, "reward": {**reward, "scorer": name, **fields}} for name in named]
        for hanging in (one for one in sets if one["name"] == "my_rewards:hangs"):
            hanging["reward"]["timeout_s"] = 0.5
        return examine(recipe_from_data(minimal(evaluation={"sets": sets}), "x"), reward_rows=2)

    return examined


def test_rewards_are_tried_on_the_users_problems_before_a_run(rehearsed: Callable[..., Examination]) -> None:
    """Two rows each, for functions also with two wrong answers, and an empty completion for the first one. A reward that costs
    its worker is called once."""
    found = rehearsed("right", "keys", "unanswered", "text", "leaves", "hangs", "regex", "code")
    answers, empty = [call for call in found.calls if call.completion], [call for call in found.calls if not call.completion]
    assert (len(answers), len(empty), sum(call.place == "evaluation.sets.5." for call in found.calls)) == (26, 6, 1)
    assert [call.reward for call in found.calls if call.place == "evaluation.sets.0."] == [1.0, 0.0, 0.0, 1.0, 0.0]
    told = {problem.field.split(".")[2]: problem.fix for problem in found.problems}
    for position, said in {
        "1": "7 of 7 calls, .* KeyError: 'solution' at my_rewards.py:7; item.reference has answer, row, and its row prompt, ",
        "2": r"1 of 5 calls, first for an empty answer of line \d: .* at my_rewards.py:10; item.answer is None",
        "3": "7 of 7 calls, first for the reference answer of line .*: the reward is '1', not a number",
        "4": "1 of 1 calls, .*: the process of reward my_rewards:leaves died: exit code 3",
        "5": r"1 of 1 calls, .* took more than 0.5 s \(reward.timeout_s\)",
        "7": "3 of 3 calls, .*: tests: has no tests; add some",
    }.items():
        assert re.search(f"^gives no reward in {said}", told.pop(position)), position
    assert told == {}


def test_references_of_mathematics_and_their_near_misses_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [r"2\sqrt{3}", "so (3, 4)\n#### (3, 4)", "x = 5", r"\frac{1}{", r"2 \cdot 2 - 2"]  # the last one is its first number
    rows.append("Assume that x is positive. Then the inequality of the two means proves the whole claim for all values.")
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"p{row}", "answer": row}) + "\n" for row in rows))
    file, sets = {"source": "jsonl", "path": "p.jsonl"}, []
    for name, scorer, pattern in (
        ("lines", "exact", r"<answer>\s*(.*)</answer>"),
        ("either", "exact", r"(?:Answer|ANSWER)[: ]+(.*)"),
        ("plain", "math_boxed", ""),
        ("tagged", "math", r"<answer>(.*?)</answer>"),
        ("digit", "math", r"(\d)"),
    ):
        sets.append({"name": name, "task": file, "reward": {"scorer": scorer, "answer_pattern": pattern}})
    recipe, names = recipe_from_data(minimal(evaluation={"sets": sets}), "x"), [one["name"] for one in sets]
    found = examine(recipe, reward_rows=6)
    assert found.problems == []
    of_set = {name: [call for call in found.calls if call.place == f"evaluation.sets.{n}."] for n, name in enumerate(names)}
    of_lines = {call.completion: (call.answer, call.reward) for call in of_set["lines"] if call.completion}
    assert of_lines == {f"<answer> {row}</answer>": (row, 1.0) for row in rows}, "one row has two lines"
    assert {call.completion for call in of_set["either"] if call.reward} == {f"Answer {row}" for row in rows if "\n" not in row}
    plain = {call.completion: call.reward for call in of_set["plain"]}
    right = [r"2\sqrt{3}", "(3, 4)", "x = 5", r"2 \cdot 2 - 2", "2", rows[-1]]
    assert {completion for completion, reward in plain.items() if reward} == {f"\\boxed{{{one}}}" for one in right}
    assert {r"\boxed{-2\sqrt{3}}", r"\boxed{3}", r"\boxed{(4, 3)}", ""} < plain.keys()
    assert r"<answer>\boxed{x = 5}</answer>" in {call.completion for call in of_set["tagged"]}
    doubted = [str(one) for _, one in doubts(recipe, found)]
    doubts_by_set = [[line for line in doubted if f"task {name}: " in line] for name in ("plain", "tagged", "digit")]
    for told in doubts_by_set[:2]:
        said = r"the \w+ answer.* of line \d (?:cannot be scored|earns \d|is prose)"
        assert sorted(re.search(said, line)[0] for line in told) == [
            "the reference answer of line 4 cannot be scored", "the reference answer of line 6 is prose",
            "the wrong answer '2' to the problem of line 5 earns 1",
        ]  # fmt: skip
    assert "the reference answer of line 1 earns 0 as '2\\\\sqrt{3}'; make the reference the bare" in "".join(doubts_by_set[2])


@pytest.mark.parametrize(
    ("scorer", "pattern", "answers", "empty", "said"),
    [
        ("my:right", "", (1.0, 1.0), 0.0, ""),
        ("my:constant", "", (0.5, 0.5), 0.5, "the completion '4' (the reference answer of line 7) earns 0.5, as an empty text"),
        ("my:strict", "", (0.0, 0.0), None, "(the reference answer of line 7) earns 0, and none of 2 answers tried earns more"),
        ("exact", r"#+ (\d)", (0.0, 0.0), 0.0, ", in which reward.answer_pattern finds nothing, earns 0, as an empty text"),
        ("regex", "", (0.0, 0.0), 0.0, ""),  # the reference is a pattern, and none that it matches is known
        ("regex", "", (1.0, 1.0), 1.0, "earns 1, as an empty text does"),
    ],
)
def test_a_reward_that_gives_an_empty_text_the_same_is_doubted(
    scorer: str, pattern: str, answers: tuple[float, float], empty: float | None, said: str
) -> None:
    share = recipe_from_data(minimal(reward={"scorer": scorer, "answer_pattern": pattern}), "x").sets_by_place[""]
    problem = Problem("2+2=", {"answer": "4"}, place="line 7")
    calls = [Call("", problem, "4", status="ok", reward=reward) for reward in answers]
    calls += [] if empty is None else [Call("", problem, status="ok", reward=empty)]
    doubted = "".join(map(str, unearned("", share, calls)))
    assert said in doubted
    assert bool(said) is bool(doubted)


def test_a_reward_that_nobody_can_call_is_named(rehearsed: Callable[..., Examination], monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = rehearsed("right", "kills").problems
    assert str(problem).startswith("evaluation.sets.1.reward.scorer = 'my_rewards:kills': kills its parent process (SIGKILL)")
    (problem,) = rehearsed("json_schema", json_schema={"type": "strin"}).problems
    assert str(problem).startswith("evaluation.sets.0.reward.json_schema = {'type': 'strin'}: not a JSON Schema: 'strin'")
    monkeypatch.setitem(sys.modules, "services.verifier", None)
    (lacking,) = rehearsed("right").problems
    assert isinstance(lacking, Lacking)
    assert "cannot be tried: services.verifier is not installed here" in str(lacking)


class Guessing:
    def __init__(self, limit: int = 2) -> None: ...

    @staticmethod
    def start(row: object, seed: int) -> str:
        return ""

    async def reply(self, turn: object) -> str:
        return ""


class Hasty(Guessing):
    def reply(self) -> str:  # type: ignore[override]
        return ""


class Offering(Guessing):
    def look(self, place: str) -> str:
        return place

    tools = [look]  # noqa: RUF012


class Choosing(Guessing):
    @property
    def tools(self) -> list[str]:
        raise AssertionError("without an object")


def test_environments_and_tools_are_looked_at_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment_class(Guessing, {"limit": 3})
    check_environment_class(Choosing, {})
    check_environment_class(lambda **config: Guessing(**config), {"limit": 3})
    for kind, config, said in (
        (Guessing, {"limti": 3}, "is called with task.config = {'limti': 3}: got an unexpected keyword argument 'limti'"),
        (Hasty, {}, "Hasty.reply(self) -> 'str' is called with self, turn: too many positional arguments"),
        (Offering, {}, "tool look: parameter self has no type hint; bind the method in start: self.tools = [self.look]"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            check_environment_class(kind, config)
    (tmp_path / "mine.py").write_text("class Mute:\n    def start(self, row, seed): ...\ndef add(a, b: int): ...\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    monkeypatch.chdir(tmp_path)
    (said, _) = found(task={"source": "environment", "name": "mine:Mute"})["task.name"]
    assert "Mute has no method reply; an environment is a class with start(self, row, seed) and reply(self, turn)" in said
    tools = {"source": "tools", "name": "sums", "path": "p.jsonl", "tools": ["mine:add"], "heldout_problems": 1}
    assert "tool add: parameter a has no type hint; write one, such as a: str" in found(task=tools)["task.tools"][0]


GPUS = Devices(devices=tuple(Device(uuid=f"GPU-{n}", name="L4", total_bytes=24 << 30, free_bytes=23 << 30) for n in range(2)))


def test_a_recipe_for_gpus_is_not_for_a_machine_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = ("model.dtype=bfloat16", "weights.backend=nccl")
    lacking = found(*halves)
    assert list(lacking) == ["model.dtype"]
    text, is_lacking = lacking["model.dtype"]
    assert is_lacking
    assert "needs a GPU, and this machine has no NVIDIA GPU" in text
    recipe = recipe_from_data(minimal(), "x", halves)
    with pytest.raises(RecipeError) as refused:
        check_environment(recipe)
    assert list(map(str, refused.value.problems)) == [text]
    assert "use auto or gloo" in found("weights.backend=nccl")["weights.backend"][0]
    monkeypatch.setenv("CXX", str(tmp_path / "no-c++"))
    assert "this machine has no C++ compiler" in found("trainer.compile=true")["trainer.compile"][0]
    several = ("trainer.nproc=auto", "trainer.context_parallel=2")
    assert "does not divide the 1 rank of the trainer" in found(*several)["trainer.context_parallel"][0]  # on a CPU
    assert found() == {}
    monkeypatch.setattr(preflight, "find_devices", lambda: GPUS)
    assert found(*halves) == found(*several) == found("trainer.compile=true") == {}
    check_environment(recipe)


def test_a_gpu_shows_by_its_device_file_or_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, tools = tmp_path / "dev", tmp_path / "bin"
    devices.mkdir()
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("pipelinerl.recipe.devices._DEVICES", devices)
    (devices / "nvidiactl").touch()
    assert not has_gpu()
    (devices / "nvidia3").touch()
    assert has_gpu()
    (devices / "nvidia3").unlink()
    (tools / "nvidia-smi").touch(mode=0o755)
    assert has_gpu()


def test_code_of_episodes_is_looked_up_like_that_of_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "VERIFIERS", tmp_path / "no-verifiers")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    file = {"path": str(tmp_path / "p.jsonl"), "heldout_problems": 1}
    environment = "pipelinerl.tasks.environments"
    for task, expected in (
        ({"source": "environment", "name": f"{environment}:Calculator"}, {}),
        ({"source": "environment", "name": f"{environment}:Calculater"}, {"task.name": "did you mean Calculator?"}),
        ({"source": "tools", "tools": ["json:dumps", "json:dunps"], **file}, {"task.tools": "did you mean dumps?"}),
        ({"source": "agent", "command": "python -m agent", **file}, {}),
        ({"source": "agent", "command": "no-such-program x", **file}, {"task.command": "no such program"}),
        ({"source": "agent", "command": "python my_agent.py", **file}, {"task.command": "my_agent.py is not a file here"}),
        ({"source": "verifiers", "name": "wordle"}, {"task.source": "run make verifiers"}),
    ):
        said = {field: text for field, (text, _) in found(task=task).items()}
        assert said.keys() == expected.keys()
        assert all(words in said[field] for field, words in expected.items())
    judge = {"url": "http://a/v1", "model": "m", "template": "{completion}", "pattern": "(.)", "api_key_env": "NO_SUCH_KEY"}
    judged = found(task={"source": "agent", "command": "python -m agent", **file}, reward={"scorer": "judge", "judge": judge})
    assert judged.keys() == {"reward.judge.api_key_env"}


@pytest.mark.parametrize(
    ("task", "field", "said"),
    [
        ({"source": "environment", "name": "guess"}, "task.name", "must name a class, such as pkg.module:Class"),
        ({"source": "tools", "path": "p.jsonl"}, "task.tools", "needs functions"),
        ({"source": "verifiers", "name": "any", "path": "p.jsonl"}, "task.path", "the environment brings the problems"),
        ({"source": "verifiers", "name": "any"}, "reward.sandbox", "would block the servers"),
        ({"source": "tools", "path": "p.jsonl", "tools": ["a:f", "b:f"]}, "task.tools", "several functions of the same name"),
        ({"source": "agent", "command": "a", "path": "p"}, "reward.overlong.buffer_tokens", "answer has no length in tokens"),
        ({"source": "agent", "command": "a", "path": "p"}, "reward.truncated", "cannot be zero with task.source = 'agent'"),
        ({"source": "agent", "command": "python agent.py"}, "task.path", "needs a file of problems here"),
    ],
)
def test_what_the_sources_of_episodes_need(task: dict[str, Any], field: str, said: str) -> None:
    wrong = {
        "reward.overlong.buffer_tokens": {"overlong": {"buffer_tokens": 4}},
        "reward.truncated": {"truncated": "zero"},
        "reward.sandbox": {"sandbox": True},
    }
    reward = wrong.get(field, {})
    with pytest.raises(RecipeError) as raised:
        recipe_from_data(minimal(task=task, reward=reward), "x")
    assert f"{field} = " in str(raised.value)
    assert said in str(raised.value)


def test_a_tracker_that_is_unknown_or_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'tensorboard', 'mlflow' or 'wandb'" in problems(minimal(trackers=["neptune"]))["trackers.0"]
    (tmp_path / "wandb").mkdir()  # what W&B leaves where it ran is no package
    (tmp_path / "mlflow.py").touch()
    assert found() == {}  # what else is needed is imported now
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (lacking,) = examine(recipe_from_data(minimal(trackers=["mlflow", "wandb"]), "x")).problems
    assert str(lacking).startswith("trackers = ['mlflow', 'wandb']: wandb not installed: pip install 'pipelinerl[wandb]'")


def test_the_cuda_build_of_vllm_does_not_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [name] * (name == "vllm"))
    text, is_lacking = found()["actor.engine"]
    assert is_lacking
    assert "'vllm': is built for CUDA here and needs a GPU, and this machine has no NVIDIA GPU" in text
    monkeypatch.setattr(preflight, "find_devices", lambda: GPUS)
    assert found() == {}


def test_a_task_whose_environment_gives_the_reward_shares_only_what_it_heeds() -> None:
    tasks = [{"task": {"name": "chain_sum"}}, {"task": {"source": "environment", "name": "my.envs:Guess"}}]
    reward = {"scorer": "exact", "answer_pattern": "(x)", "timeout_s": 9.0, "max_abs": 50.0, "truncated": "mask"}
    recipe = recipe_from_data(minimal(task=None, tasks=tasks, reward=reward), "x")
    sums, guess = (share.reward for share in recipe.mixture.values())
    assert (sums.scorer, sums.answer_pattern, sums.timeout_s) == ("exact", "(x)", 9.0)
    assert guess == RewardConfig(max_abs=50.0, truncated="mask")
    with pytest.raises(RecipeError, match=r"tasks\.1\.reward\.answer_pattern = '\(x\)': is ignored"):
        recipe_from_data(minimal(task=None, tasks=[tasks[0], {**tasks[1], "reward": {"answer_pattern": "(x)"}}]), "x")
