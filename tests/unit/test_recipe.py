"""Recipes: reading, overriding, every wrong field named, the way back to YAML, and what a machine must have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError
from pipelinerl.recipe import preflight
from pipelinerl.recipe.fields import Recipe, dotted_paths
from pipelinerl.recipe.loading import (
    MissingField,
    RecipeError,
    YamlError,
    apply_overrides,
    find_recipe,
    load_recipe,
    parse_override,
    parse_yaml,
    recipe_from_data,
    recipe_yaml,
)
from pipelinerl.recipe.preflight import Lacking, check_environment, examine, has_gpu

RECIPES = Path(__file__).parents[2] / "recipes"


def minimal(**sections: Any) -> dict[str, Any]:
    return {"name": "tiny", "model": {"source": "hub", "name": "org/model"}, "task": {}, **sections}


def problems(data: dict[str, Any], *overrides: str) -> dict[str, str]:
    """Text of each problem by its field; fails when the recipe is good."""
    with pytest.raises(RecipeError) as info:
        recipe_from_data(data, "tiny.yaml", overrides)
    assert str(info.value).startswith(f"tiny.yaml: {len(info.value.problems)} problem")
    return {problem.field: str(problem) for problem in info.value.problems}


# Reading


def test_scientific_notation_is_a_number_and_text_stays_text() -> None:
    data = parse_yaml("a: 1e-6\nb: -2E+3\nc: .5e1\nd: 1e-6x\ne: 'null'\nf: null\ng: 7", "x")
    assert data == {"a": 1e-6, "b": -2000.0, "c": 5.0, "d": "1e-6x", "e": "null", "f": None, "g": 7}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "key 'a' is written twice (first on line 1)"),
        ("s:\n  x: 1\n  x: 1\n", 3, "key 'x' is written twice (first on line 2)"),
        ("a: {b: 1\n", 2, "expected ',' or '}'"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: !!python/object:os.system 1\n", 1, "could not determine a constructor"),
        ("a: \x00\n", 0, "not a text file"),
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
    for content, said in [(b"- a\n", "is a mapping"), (b"", "is a mapping"), (b"\xff\xfe\x00", "not a UTF-8")]:
        file.write_bytes(content)
        with pytest.raises(YamlError, match=said):
            load_recipe(file)


def test_names_are_looked_up_in_order_and_the_known_ones_listed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "mine.yaml").write_text("")
    (second / "other.yaml").write_text("")
    assert find_recipe("mine", [first, second]) == first / "mine.yaml"
    assert find_recipe("other", [first, second]) == second / "other.yaml"
    assert find_recipe(second / "mine.yaml", []) == second / "mine.yaml"
    with pytest.raises(FieldError, match=r"recipe = 'othr': no such file; give a path or one of: mine, other"):
        find_recipe("othr", [first, second])


@pytest.mark.parametrize("name", ["arithmetic", "smollm2", "gsm"])
def test_shipped_recipes_survive_the_way_to_yaml_and_back(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.name == name
    assert recipe.description
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(recipe_yaml(recipe))
    assert load_recipe(resolved) == recipe


def test_the_resolved_recipe_writes_out_every_field() -> None:
    written = yaml.safe_load(recipe_yaml(recipe_from_data(minimal(), "x")))
    for path in dotted_paths(Recipe):
        if path.startswith(("model.warmstart.", "trainer.lora.")):
            continue  # null here: not warm-started, no adapters
        value: Any = written
        for name in path.split("."):
            assert name in value, path
            value = value[name]


# Overrides


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("trainer.steps=5", ("trainer", "steps"), 5),
        ("trainer.learning_rate=1e-4", ("trainer", "learning_rate"), 1e-4),
        ("algorithm.max_lag=null", ("algorithm", "max_lag"), None),
        ("task.name=chain_sum", ("task", "name"), "chain_sum"),
        ("reward.binary=false", ("reward", "binary"), False),
        ("task.config={min_terms: 2}", ("task", "config"), {"min_terms": 2}),
        ("reward.answer_pattern='a=(b)'", ("reward", "answer_pattern"), "a=(b)"),
    ],
)
def test_override_values_are_yaml(text: str, path: tuple[str, ...], value: object) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize("text", ["trainer.steps", "=5", "trainer..steps=5", "trainer.steps={a"])
def test_unreadable_overrides_name_themselves(text: str) -> None:
    with pytest.raises(FieldError, match=r"^--set = "):
        parse_override(text)


@pytest.mark.parametrize("correct", [0, -1])
def test_a_right_answer_must_earn_something(correct: float) -> None:
    assert "reward.correct" in problems(minimal(reward={"correct": correct}))


def test_later_overrides_win_and_the_recipes_data_is_untouched() -> None:
    data = minimal()
    changed = apply_overrides(
        data, map(parse_override, ["trainer.steps=5", "trainer.steps=6", "actor.engine.threads=2"])
    )
    assert (changed["trainer"], changed["actor"]) == ({"steps": 6}, {"engine": {"threads": 2}})
    assert data == minimal()


def test_overrides_reach_into_null_sections_and_free_form_mappings() -> None:
    recipe = recipe_from_data(minimal(trainer=None), "x", ["trainer.steps=7", "task.config.min_terms=2"])
    assert recipe.trainer.steps == 7
    assert recipe.task.config == {"min_terms": 2}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.stepz=1", "no such field; did you mean trainer.steps?"),
        ("learning_rate=1", "no such field; did you mean trainer.learning_rate or model.warmstart.learning_rate?"),
        ("trainr.steps=1", "did you mean trainer.steps or model.warmstart.steps?"),
        ("seed.high=1", "no such field; seed holds one value"),
        ("zzz=1", "allowed here: name, description, mode"),
        ("trainer.qqqqqq=1", "allowed here: steps, batch_size"),
    ],
)
def test_unknown_override_paths_get_near_matches(override: str, said: str) -> None:
    found = problems(minimal(), override)
    path, _, value = override.partition("=")
    assert found[f"--set {path}"].startswith(f"--set {path} = {value}: ")
    assert said in found[f"--set {path}"]


def test_all_wrong_overrides_are_listed() -> None:
    assert list(problems(minimal(), "a.b=1", "c", "trainer.steps=1", "d=2")) == ["--set a.b", "--set", "--set d"]


# Wrong fields


@pytest.mark.parametrize(
    ("section", "field", "value", "said"),
    [
        ("trainer", "steps", 0, "use an integer, at least 1 and at most 10000000"),
        ("trainer", "steps", 1.5, "use an integer"),
        ("trainer", "learning_rate", "fast", "use a number, above 0 and at most 1"),
        ("trainer", "gradient_checkpointing", "maybe", "use true or false"),
        ("model", "dtype", "fp8", "use one of float32, bfloat16, float16"),
        ("algorithm", "max_lag", -1, "use an integer or null, at least 0"),
        ("trainer", "beta1", 1.0, "below 1"),
        ("algorithm", "clip_low", 1.5, "at most 1"),
        ("task", "config", [1], "use a mapping"),
        ("task", "name", 5, "use text"),
        ("weights", "deadline_s", float("inf"), "use a number, above 0"),
        ("evaluation", "temperature", float("nan"), "use a number, at least 0 and at most 4"),
        ("reward", "answer_pattern", "(", "not a regular expression"),
        ("actor", "engine", 3, "use a section with kv_cache_gib"),
        ("trainer", "lerning_rate", 1, "no such field; did you mean trainer.learning_rate or"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    section: str, field: str, value: object, said: str
) -> None:
    data = minimal()
    data[section] = {**data.get(section, {}), field: value}
    found = problems(data)
    assert list(found) == [f"{section}.{field}"]
    assert found[f"{section}.{field}"].startswith(f"{section}.{field} = {value!r}: ")
    assert said in found[f"{section}.{field}"]


@pytest.mark.parametrize(("field", "value"), [("top_p", 0.9), ("top_k", 50)])
def test_a_truncated_distribution_is_refused_with_the_reason(field: str, value: float) -> None:
    assert "importance weights" in problems({**minimal(), "sampling": {field: value}})[f"sampling.{field}"]


def test_every_wrong_field_is_listed() -> None:
    data = {"nam": "x", "model": {"source": "ftp"}, "task": {"heldout_problems": 0}, "trainer": 3}
    assert set(problems(data)) == {"nam", "name", "model.source", "task.heldout_problems", "trainer"}


def test_a_missing_field_says_what_to_give() -> None:
    with pytest.raises(RecipeError) as info:
        recipe_from_data({"name": "x", "task": {}}, "x")
    assert [type(problem) for problem in info.value.problems] == [MissingField]
    assert "model is missing: give a section with source, name" in str(info.value)


@pytest.mark.parametrize(
    ("override", "field", "said"),
    [
        ("trainer.batch_size=12", "trainer.batch_size", "12: is not a multiple of sampling.group_size = 8"),
        ("sampling.max_tokens=2048", "sampling.max_tokens", "2048: leaves no room for a prompt"),
        ("trainer.tokens_per_microbatch=100", "trainer.tokens_per_microbatch", "100: cannot hold one sequence"),
        ("sampling.group_size=1", "algorithm.advantage", "needs sampling.group_size of at least 2"),
        ("task.source=jsonl", "task.path", "is empty: task.source = 'jsonl' needs"),
        ("model={source: path}", "model.name", "is empty: model.source = 'path' needs a folder"),
        ("model={source: hub}", "model.name", "is empty: model.source = 'hub' needs a Hugging Face id"),
        ("model={source: warmstart}", "model.warmstart", "needs this section"),
        ("trainer={steps: 20, schedule: wsd}", "trainer.decay_steps", "0: trainer.schedule = 'wsd' needs 1 to 20 here"),
        (
            "trainer={steps: 20, schedule: wsd, warmup_steps: 5, decay_steps: 16}",
            "trainer.decay_steps",
            "16: trainer.schedule = 'wsd' needs 1 to 15 here, the steps after warm-up",
        ),
        (
            "trainer={steps: 20, schedule: wsd, warmup_steps: 20, decay_steps: 1}",
            "trainer.warmup_steps",
            "20: leaves trainer.schedule = 'wsd' no step of trainer.steps = 20 to decay in; lower it",
        ),
        (
            "trainer={schedule: cosine, decay_steps: 5}",
            "trainer.decay_steps",
            "5: trainer.schedule = 'cosine' has no such",
        ),
        (
            "trainer.final_learning_rate=0.1",
            "trainer.final_learning_rate",
            "0.1: trainer.schedule = 'constant' does not",
        ),
        (
            "trainer.schedule=inverse_sqrt",
            "trainer.warmup_steps",
            "0: trainer.schedule = 'inverse_sqrt' decays on the scale",
        ),
        ("reward.overlong.buffer_tokens=65", "reward.overlong.buffer_tokens", "wider than sampling.max_tokens = 64"),
    ],
)
def test_fields_that_contradict_each_other(override: str, field: str, said: str) -> None:
    found = problems(minimal(task={"prompt_style": "compact"}), override)
    assert list(found) == [field]
    assert said in found[field]


def test_all_broken_rules_are_listed_at_once() -> None:
    found = problems(
        minimal(mode="conventional"),
        "trainer.batch_size=12", "sampling.max_tokens=4096", "task.source=jsonl", "model.name=''", "model.source=path",
        "algorithm.conventional_g=4", "algorithm.max_lag=1", "trainer.tokens_per_microbatch=100",
    )  # fmt: skip
    assert set(found) == {
        "trainer.batch_size", "sampling.max_tokens", "task.path", "model.name", "algorithm.max_lag",
        "trainer.tokens_per_microbatch",
    }  # fmt: skip


def test_wrong_overrides_and_wrong_fields_are_listed_together() -> None:
    found = problems(minimal(), "a.b=1", "trainer.steps=0", "model.dtype=fp8")
    assert set(found) == {"--set a.b", "trainer.steps", "model.dtype"}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["task.name=spell_backward", "task.config={}", "task.prompt_style=plain"], "task.name"),
        (["task.name=spell_backward", "task.config={}"], "task.name"),
        (["task.source=jsonl", "task.path=p.jsonl"], "task.source"),
        (["task.prompt_style=plain"], "task.prompt_style"),
    ],
)
def test_a_warm_started_model_takes_worked_sums_only(overrides: list[str], field: str) -> None:
    with pytest.raises(RecipeError, match="1 problem") as info:
        load_recipe(RECIPES / "arithmetic.yaml", overrides)
    problem = info.value.problems[0]
    assert (problem.field, str(problem.value)) == (
        field,
        overrides[0].partition("=")[2] if field != "task.name" else "spell_backward",
    )
    assert "set model.source to another one: hub, path or smollm2" in problem.fix
    load_recipe(RECIPES / "arithmetic.yaml", [*overrides, "model.source=smollm2"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("trainer.steps", True), ("trainer.steps", "5"), ("trainer.learning_rate", True), ("algorithm.max_lag", False)],
)
def test_only_numbers_are_numbers(field: str, value: object) -> None:
    section, name = field.split(".")
    assert f"{field} = {value!r}: use a" in problems(minimal(**{section: {name: value}}))[field]


def test_a_whole_number_may_stand_where_any_number_may() -> None:
    recipe = recipe_from_data(minimal(trainer={"learning_rate": 1}, weights={"chunk_mib": 4}), "x")
    assert (recipe.trainer.learning_rate, recipe.weights.chunk_mib) == (1.0, 4.0)


def test_a_head_that_vllm_does_not_take_is_a_wrong_field() -> None:
    model = {"source": "warmstart", "warmstart": {"head_dim": 48, "careful": [0.5, 1]}}
    found = problems(minimal(model=model, task={"prompt_style": "compact"}))
    assert found == {
        "model.warmstart.head_dim": "model.warmstart.head_dim = 48: use a multiple of 32: vLLM on CPU takes no other"
    }


@given(
    st.dictionaries(
        st.sampled_from([*dotted_paths(Recipe), "no.such", "trainer.x"]),
        st.none()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers())
        | st.dictionaries(st.text(), st.none()),
        max_size=6,
    )
)
def test_whatever_is_written_gives_a_recipe_or_a_recipe_error(fields: dict[str, Any]) -> None:
    data = minimal()
    for path, value in fields.items():
        section = data
        *names, last = path.split(".")
        for name in names:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[last] = value
    try:
        recipe = recipe_from_data(data, "x")
    except RecipeError as error:
        found = error.problems
    else:
        found = None
        assert recipe_from_data(yaml.safe_load(recipe_yaml(recipe)), "again") == recipe
    assert found is None or (found and all(problem.field for problem in found))


# What the machine must have


def missing(recipe: Recipe) -> dict[str, str]:
    with pytest.raises(RecipeError) as info:
        check_environment(recipe)
    return {problem.field: str(problem) for problem in info.value.problems}


def test_model_folder(tmp_path: Path) -> None:
    recipe = recipe_from_data(minimal(model={"source": "path", "name": str(tmp_path / "m")}), "x")
    assert "no such folder" in missing(recipe)["model.name"]
    (tmp_path / "m").mkdir()
    assert "has no config.json" in missing(recipe)["model.name"]
    (tmp_path / "m" / "config.json").write_text("{}")
    check_environment(recipe)


def test_problem_file_and_reward_code(tmp_path: Path) -> None:
    task = {"source": "jsonl", "path": str(tmp_path / "p.jsonl")}
    recipe = recipe_from_data(minimal(task=task, reward={"scorer": "no_such_package_here.rewards:score"}), "x")
    assert set(missing(recipe)) == {"task.path", "reward.scorer"}
    assert "No module named 'no_such_package_here'" in missing(recipe)["reward.scorer"]
    problems = (f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(9))
    (tmp_path / "p.jsonl").write_text("".join(problems))
    task["heldout_problems"] = 4
    check_environment(recipe_from_data(minimal(task=task, reward={"scorer": "json.tool:main"}), "x"))
    task["heldout_problems"] = 9
    assert "9 distinct problems" in missing(recipe_from_data(minimal(task=task), "x"))["task.heldout_problems"]
    (tmp_path / "p.jsonl").write_text("{")
    assert "p.jsonl, line 1: not JSON" in missing(recipe_from_data(minimal(task=task), "x"))["task.path"]


def test_reward_code_is_looked_up_in_the_current_folder_as_the_verifier_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("NOT_A_FUNCTION = 1\n\ndef score(*_):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    check_environment(recipe_from_data(minimal(reward={"scorer": "my_rewards:score"}), "x"))
    (tmp_path / "broken.py").write_text("score = (\n")
    (tmp_path / "needy.py").write_text("import no_such_package_here\n")
    wrong = {
        "my_rewards:scor": "scor is not there in my_rewards; did you mean score?",
        "my_rewards:zzz": "zzz is not there in my_rewards; name a function",
        "my_rewards:NOT_A_FUNCTION": "NOT_A_FUNCTION is not a function in my_rewards",
        "json.nope:score": "there is no module json.nope in json",
        "broken:score": "SyntaxError",
    }
    for scorer, said in wrong.items():
        found = examine(recipe_from_data(minimal(reward={"scorer": scorer}), "x"))
        (mistake,) = found
        assert (mistake.field, isinstance(mistake, Lacking)) == ("reward.scorer", False)
        assert said in mistake.fix
        assert "install" not in mistake.fix
    for scorer in ("needy:score", "no_such_package_here:score"):
        found = examine(recipe_from_data(minimal(reward={"scorer": scorer}), "x"))
        (lacking,) = found
        assert isinstance(lacking, Lacking)
        assert "No module named 'no_such_package_here'" in lacking.fix
        assert "install the package" in lacking.fix


def test_what_is_a_mistake_and_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**sections: Any) -> tuple[list[str], list[str]]:
        found: tuple[list[str], list[str]] = ([], [])
        for one in examine(recipe_from_data(minimal(**sections), "x")):
            found[isinstance(one, Lacking)].append(one.field)
        return found

    (tmp_path / "p.jsonl").write_text("{")
    (tmp_path / "few.jsonl").write_text('{"prompt": "q", "answer": "a"}\n')
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    assert found(task={"source": "jsonl", "path": str(tmp_path / "none.jsonl")}) == (["task.path"], [])
    assert found(task={"source": "jsonl", "path": str(tmp_path / "p.jsonl")}) == (["task.path"], [])
    assert found(task={"source": "jsonl", "path": str(tmp_path / "few.jsonl")}) == (["task.heldout_problems"], [])
    assert found(model={"source": "path", "name": str(tmp_path)}) == (["model.name"], [])
    assert found(actor={"count": 0}) == ([], ["actor.count"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert found(task={"source": "jsonl", "path": str(tmp_path / "p.parquet")}) == ([], ["task.path"])


def test_a_recipe_for_gpus_is_not_for_a_machine_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = recipe_from_data(minimal(), "x", ["model.dtype=bfloat16", "weights.backend=nccl"])
    whole = recipe_from_data(minimal(), "x")
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    found = examine(halves)
    assert [(one.field, isinstance(one, Lacking)) for one in found] == [
        ("model.dtype", True),
        ("weights.backend", True),
    ]
    assert "no NVIDIA GPU is here" in str(found[0])
    assert "no NVIDIA GPU is here" in missing(halves)["model.dtype"]
    assert examine(whole) == []
    monkeypatch.setattr(preflight, "has_gpu", lambda: True)
    assert examine(halves) == []


def test_compiling_on_cpu_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = recipe_from_data(minimal(), "x", ["trainer.compile=true"])
    compiler = tmp_path / "some-c++"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    assert "no C++ compiler is here" in missing(compiled)["trainer.compile"]
    assert examine(recipe_from_data(minimal(), "x")) == []
    compiler.touch(mode=0o755)
    assert examine(compiled) == []
    compiler.unlink()
    monkeypatch.setattr(preflight, "has_gpu", lambda: True)
    assert examine(compiled) == []


def test_a_gpu_shows_by_its_device_file_or_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, tools = tmp_path / "dev", tmp_path / "bin"
    devices.mkdir()
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    (devices / "nvidiactl").touch()
    assert not has_gpu(devices)
    (devices / "nvidia3").touch()
    assert has_gpu(devices)
    (devices / "nvidia3").unlink()
    (tools / "nvidia-smi").touch(mode=0o755)
    assert has_gpu(devices)


def test_the_changes_that_demonstrations_make_to_the_task_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ("{min_trms: 2}", "{max_terms: 1}"):
        recipe = load_recipe(RECIPES / "arithmetic.yaml", [f"model.warmstart.task_config={change}"])
        assert [one.field for one in examine(recipe)] == ["model.warmstart.task_config"]
    assert examine(load_recipe(RECIPES / "arithmetic.yaml", ["model.warmstart.task_config={min_terms: 2}"])) == []


@pytest.mark.parametrize(
    ("task", "field", "said"),
    [
        ({"name": "chain_sm"}, "task.name", "did you mean chain_sum or "),
        ({"config": {"min_trms": 2}}, "task.config.min_trms", "did you mean min_terms?"),
        ({"config": {"min_terms": 3, "max_terms": 2}}, "task.config", "chain_sum refuses it"),
        (
            {"heldout_problems": 500, "config": {"max_digits": 1, "max_terms": 2}},
            "task.heldout_problems",
            "too few",
        ),
        ({"name": "gcd", "prompt_style": "compact"}, "task.prompt_style", "only chain_sum"),
    ],
)
def test_a_task_that_cannot_be_is_named(task: dict[str, Any], field: str, said: str) -> None:
    recipe = recipe_from_data(minimal(task=task), "x")
    assert list(missing(recipe)) == [field]
    assert said in missing(recipe)[field]


def test_a_local_run_needs_an_actor() -> None:
    assert "needs at least 1" in missing(recipe_from_data(minimal(actor={"count": 0}), "x"))["actor.count"]


@pytest.mark.parametrize(
    ("trainer", "field", "fix"),
    [
        ({"context_parallel": 2}, "trainer.context_parallel", "does not divide trainer.nproc = 1"),
        ({"nproc": 4, "shard_ranks": 3}, "trainer.shard_ranks", "does not divide trainer.nproc = 4"),
        ({"optimizer": "adamw_8bit"}, "trainer.optimizer", "run make adamw8bit, or use adamw"),
    ],
)
def test_what_a_run_here_cannot_do_is_said_before_it_starts(trainer: dict[str, Any], field: str, fix: str) -> None:
    (lacking,) = examine(recipe_from_data(minimal(trainer=trainer), "x"))
    assert lacking.field == field
    assert fix in str(lacking)


def test_a_tracker_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # what W&B leaves where it ran is no package
    (tmp_path / "mlflow.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (lacking,) = examine(recipe_from_data(minimal(trackers=["mlflow", "wandb"]), "x"))
    assert str(lacking) == (
        "trackers = ['mlflow', 'wandb']: wandb not installed: pip install 'pipelinerl[wandb]', or leave it out"
    )


@pytest.mark.parametrize(
    ("value", "field", "said"),
    [
        (["neptune"], "trackers.0", "'tensorboard', 'mlflow' or 'wandb'"),
        ("wandb", "trackers", "use a list of tensorboard, mlflow, wandb"),
        (["mlflow", "mlflow"], "trackers", "name each tracker once"),
    ],
)
def test_trackers_are_known_ones_named_once(value: Any, field: str, said: str) -> None:
    assert said in problems(minimal(trackers=value))[field]


def test_ranks_need_as_many_gpus_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_DEVICES", tmp_path)
    four = recipe_from_data(minimal(trainer={"nproc": 4}), "x")
    assert examine(four) == []
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    (lacking,) = examine(four)
    assert str(lacking).startswith("trainer.nproc = 4: each rank needs a GPU of its own, and this machine has 2")
