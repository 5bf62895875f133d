"""What a resumed run may change of its recipe, and how a refusal reads."""

from typing import Any

import pytest

from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import MAY_CHANGE, Recipe, dotted_paths, field_at
from pipelinerl.recipe.loading import Change, check_resumable, parse_yaml, recipe_changes, recipe_from_data, recipe_yaml


def recipe(**sections: Any) -> Recipe:
    data = {"name": "tiny", "model": {"source": "path", "name": "/m"}, "task": {}, **sections}
    return recipe_from_data(data, "tiny")


def dumped(**sections: Any) -> dict[str, Any]:
    return recipe(**sections).model_dump(mode="json")


def test_only_how_long_how_often_and_with_what_means_may_change() -> None:
    paths = [path for path in dotted_paths(Recipe) if MAY_CHANGE in field_at(Recipe, tuple(path.split("."))).metadata]  # type: ignore[union-attr]
    assert {path.rpartition(".")[0] for path in paths} == {
        "", "actor", "actor.engine", "algorithm", "trainer", "weights", "evaluation", "checkpoint",
    }  # fmt: skip
    assert len(paths) == 49
    ends_that_look_like_means = {
        "actor.engine.quantization", "weights.wire_dtype", "evaluation.temperature", "seed", "name", "mode",
    }  # fmt: skip
    assert not ends_that_look_like_means & set(paths)


def test_the_same_recipe_has_no_changes_also_after_yaml() -> None:
    warm = recipe(model={"source": "package", "name": "arithmetic"}, task={"prompt_style": "compact"}, trainer={"lora": {}})
    assert recipe_changes(warm.model_dump(mode="json"), warm) == []
    read = parse_yaml(recipe_yaml(warm), "recipe.yaml")
    assert isinstance(read, dict)
    assert recipe_changes(read, warm) == []


def test_what_may_change_is_let_pass_and_what_must_stay_is_refused_all_at_once() -> None:
    new = recipe(trainer={"steps": 200, "batch_size": 128}, checkpoint={"keep": 5}, actor={"count": 3})
    told = [("actor.count", 1, 3), ("trainer.steps", 100, 200), ("checkpoint.keep", 2, 5)]
    assert check_resumable(dumped(), new) == [Change(*one, True) for one in told]
    new = recipe(trainer={"steps": 200, "batch_size": 64, "lora": {"rank": 8}}, task={"config": {"max_terms": 3}})
    with pytest.raises(UserError) as raised:
        check_resumable(dumped(), new)
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("put them back, or start a new run:")
    assert lines[1:3] == ['  - task.config: {} → {"max_terms": 3}', "  - trainer.batch_size: 128 → 64"]
    assert lines[3].startswith('  - trainer.lora: null → {"rank": 8, "alpha": 32.0')
    assert len(lines) == 4


def test_several_tasks_are_compared_one_by_one() -> None:
    old = [{"task": {}}, {"name": "long", "task": {"config": {"max_terms": 9}}}]
    new = [{"task": {}}, {"name": "long", "task": {"config": {"max_terms": 9}}, "weight": 2}]
    changes = recipe_changes(dumped(task=None, tasks=old), recipe(task=None, tasks=new))
    assert changes == [Change("tasks.1.weight", 1.0, 2.0, False)]
    assert {change.field for change in recipe_changes(dumped(), recipe(task=None, tasks=new))} == {"task", "tasks"}


def test_a_field_that_an_older_version_lacked_had_the_default() -> None:
    old = dumped(trainer={"max_grad_norm": 1.0})
    del old["trainer"]["max_grad_norm"], old["trainer"]["lora"], old["checkpoint"]
    assert recipe_changes(old, recipe()) == []
    assert recipe_changes(old, recipe(trainer={"max_grad_norm": 2.0})) == [Change("trainer.max_grad_norm", None, 2.0, False)]
    short = {"name": "tiny", "model": {"source": "path", "name": "/m"}, "task": {}, "algorithm": {"loss": "gspo"}}
    assert recipe_changes(short, recipe(algorithm={"loss": "gspo"})) == [], "the loss brings its defaults along"
    del short["name"]
    assert recipe_changes(short, recipe(algorithm={"loss": "gspo"})) == [Change("name", None, "tiny", False)]
    (change,) = recipe_changes(dumped(trainer={"lora": {"rank": 4}}), recipe())
    assert (change.field, change.old["rank"], change.new) == ("trainer.lora", 4, None)


def test_a_field_that_this_version_lacks_is_refused_and_said_so() -> None:
    old = dumped()
    old["trainer"]["momentum"] = 0.9
    with pytest.raises(UserError) as raised:
        check_resumable(old, recipe())
    assert "trainer.momentum: 0.9 → (no such field in this version)" in str(raised.value)
    assert "resume with the version that began the run" in str(raised.value)
