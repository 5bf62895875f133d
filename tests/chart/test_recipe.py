"""The recipe that the services get is the one that was asked for, and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from tests.chart.conftest import rendered_case
from tests.chart.rendering import CHART, CPU_VALUES, ROOT, HelmError, Rendered, environment, render

NAMES = tuple(path.stem for path in sorted((ROOT / "recipes").glob("*.yaml")))
COPY = "cp recipes/*.yaml deploy/helm/recipes/"


def recipe_of(rendered: Rendered, folder: Path, suffix: str = "recipe") -> Recipe:
    """As a service loads it."""
    (text,) = [
        item["data"]["recipe.yaml"]
        for item in rendered.of_kind("ConfigMap")
        if item["metadata"]["name"].endswith(f"-{suffix}")
    ]
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file)


@pytest.mark.parametrize("name", NAMES)
def test_the_charts_recipes_are_the_projects(name: str) -> None:
    copies = {path.stem for path in (CHART / "recipes").glob("*.yaml")}
    assert copies == set(NAMES), COPY
    same = (CHART / "recipes" / f"{name}.yaml").read_bytes() == (ROOT / "recipes" / f"{name}.yaml").read_bytes()
    assert same, COPY


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_by_name_is_that_recipe(name: str, tmp_path: Path) -> None:
    assert recipe_of(render({"recipe": {"name": name}}), tmp_path) == load_recipe(ROOT / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_inline_is_that_recipe(name: str, tmp_path: Path) -> None:
    data = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text().replace(" 1e-6", " 1.0e-6"))
    assert recipe_of(render({"recipe": {"inline": data}}), tmp_path) == load_recipe(ROOT / "recipes" / f"{name}.yaml")


def test_every_case_has_a_recipe_that_loads(rendered: Rendered, tmp_path: Path) -> None:
    assert recipe_of(rendered, tmp_path)


NUMBERS: dict[str, Any] = {
    "seed": 2**31 - 1,
    "sampling": {"temperature": 1},
    "trainer": {"steps": 10_000_000, "learning_rate": 3.0e-7, "epsilon": 1.0e-12, "batch_size": 1_000_000},
    "algorithm": {"clamp": 5, "max_lag": None, "clip_low": 0.0003},
    "reward": {"timeout_s": 0.1},
}


def test_numbers_arrive_as_they_are(tmp_path: Path) -> None:
    """Helm's numbers have been through JSON and Go: a million must not become 1e+06, which is no integer."""
    recipe = recipe_of(render({"recipe": {"name": "gsm", "set": NUMBERS}}), tmp_path)
    assert recipe.trainer.steps == 10_000_000
    assert recipe.trainer.batch_size == 1_000_000
    assert recipe.seed == 2**31 - 1
    assert recipe.trainer.learning_rate == 3e-7
    assert recipe.trainer.epsilon == 1e-12
    assert (recipe.algorithm.clamp, recipe.sampling.temperature) == (5.0, 1.0)
    assert recipe.algorithm.clip_low == 0.0003


def test_null_is_a_value_of_its_own(tmp_path: Path) -> None:
    values = {"recipe": {"name": "arithmetic", "set": {"algorithm": {"max_lag": None}}}}
    assert load_recipe(ROOT / "recipes" / "arithmetic.yaml").algorithm.max_lag == 4
    assert recipe_of(render(values), tmp_path).algorithm.max_lag is None


def test_what_is_set_lies_over_the_recipe_and_leaves_the_rest(tmp_path: Path) -> None:
    recipe = recipe_of(render({"recipe": {"name": "gsm", "set": {"trainer": {"steps": 7}}}}), tmp_path)
    original = load_recipe(ROOT / "recipes" / "gsm.yaml")
    assert recipe == original.model_copy(update={"trainer": original.trainer.model_copy(update={"steps": 7})})


def test_text_survives(tmp_path: Path) -> None:
    prompt = 'Put it in \\boxed{}: "yes"\n  and: no # really\n{{ .Values }}'
    recipe = recipe_of(render({"recipe": {"set": {"task": {"system_prompt": prompt}}}}), tmp_path)
    assert recipe.task.system_prompt == prompt


def test_the_models_name_is_enough(tmp_path: Path) -> None:
    recipe = recipe_of(rendered_case("model"), tmp_path)
    assert (recipe.model.source, recipe.model.name) == ("hub", "Qwen/Qwen3-8B")
    recipe = recipe_of(render({"model": {"name": "a/b"}, "recipe": {"name": "smollm2"}}), tmp_path)
    assert (recipe.model.source, recipe.model.name) == ("hub", "a/b")


def test_the_runs_name_is_the_recipes_unless_given() -> None:
    def run_and_folder(case: str) -> tuple[str, str]:
        entries = environment(rendered_case(case).pod("trainer").main)
        return entries["PIPELINERL_RUN"]["value"], entries["PIPELINERL_RUN_DIR"]["value"]

    assert run_and_folder("default") == ("gsm", "/var/lib/pipelinerl/runs/gsm")
    assert run_and_folder("everything") == ("all-of-it", "/var/lib/pipelinerl/runs/all-of-it")


def test_the_model_that_a_run_builds_is_made_before_the_services_start() -> None:
    def init(case: str, component: str) -> list[list[str]]:
        spec = rendered_case(case).pod(component).spec
        return [container["args"] for container in spec.get("initContainers", [])]

    assert init("cpu", "trainer") == [["python", "-m", "services.trainer.warmstart", "--recipe-model"]]
    assert init("cpu", "actor") == [["python", "-m", "services.actor.initial_model"]]
    assert init("default", "trainer") == init("default", "actor") == []  # from the hub


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such recipe": (
        {"recipe": {"name": "gsn"}},
        'recipe.name: the chart has no recipe "gsn"; use one of arithmetic, gsm, smollm2, or',
    ),
    "no model": (
        {"recipe": {"inline": {"name": "mine", "task": {"source": "reasoning_gym"}}}},
        "recipe.inline: the recipe has no model; give it there or in recipe.set.model, or set model.name",
    ),
    "no task": ({"recipe": {"inline": {"name": "mine", "model": {"name": "a/b"}}}}, "the recipe has no task"),
    "no name": (
        {"recipe": {"inline": {"model": {"name": "a/b"}, "task": {"name": "chain_sum"}}}},
        "the recipe has no name",
    ),
    "no name of a model": (
        {"recipe": {"name": "smollm2", "set": {"model": {"source": "hub"}}}},
        "model.name: the recipe names no model; set model.name to a Hugging Face id",
    ),
    "name of no run": (
        {"recipe": {"set": {"name": "My run"}}},
        'run: "My run" cannot name a run; use 1-40 lowercase letters, digits and inner dashes',
    ),
    "GPUs and ranks differ": (
        {"actor": {"gpus": 4}},
        "actor.gpus: 4 is not the recipe's actor.engine.tensor_parallel_size = 1; set recipe.set.actor.engine",
    ),
    "one volume for two nodes": (
        {"trainer": {"nodes": 2}},
        "trainer.persistence.accessMode: ReadWriteOnce cannot be shared by trainer.nodes = 2 pods; use ReadWriteMany",
    ),
    "no time to stop": (
        {"trainer": {"terminationGracePeriodSeconds": 100}},
        "trainer.terminationGracePeriodSeconds: 100 leaves no time after trainer.stopCheckpointSeconds = 240",
    ),
    "no address of NATS": ({"nats": {"enabled": False}}, "nats.url: is empty while nats.enabled is false"),
    "a stream larger than its volume": (
        {"nats": {"sequencesMaxGib": 25}},
        "nats.sequencesMaxGib: 25 is more than three quarters of nats.persistence.size = 32Gi",
    ),
    "no certificates": (
        {"tls": {"grpc": {"enabled": True}}},
        ": is empty; name a Secret with tls.crt, tls.key and ca.crt",
    ),
    "no issuer": (
        {"tls": {"nats": {"enabled": True}, "certManager": {"enabled": True}}},
        "tls.certManager.issuerRef: has no name",
    ),
    "no Prometheus": (
        {"actor": {"autoscaling": {"enabled": True}}},
        "actor.autoscaling.keda.prometheusAddress: is empty",
    ),
    "GPUs without an image for them": (
        {"images": {"variant": "cpu"}},
        "images.variant: cpu has no use for actor.gpus = 1; set actor.gpus and trainer.gpus to 0",
    ),
    "two servers of NATS": (
        {"nats": {"url": "nats://nats.messaging:4222"}},
        "nats.url: nats://nats.messaging:4222 is not used while nats.enabled is true",
    ),
    "certificates for nothing": (
        {"tls": {"secrets": {"actor": "actor-tls"}}},
        "tls: certificates are given, and nothing is encrypted; set tls.grpc.enabled",
    ),
    "two tokens": (
        {"huggingface": {"token": "hf_a", "existingSecret": "hf"}},
        "huggingface.token: huggingface.existingSecret is set too; keep one of them",
    ),
    "most below fewest": (
        {"verifier": {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}},
        "verifier.autoscaling.maxReplicas: 2 is less than minReplicas = 3",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_values_that_contradict_each_other_are_refused_by_name(why: str) -> None:
    values, message = REFUSED[why]
    with pytest.raises(HelmError) as refused:
        render(values)
    assert "\n\npipelinerl: " in str(refused.value)
    assert message in str(refused.value)


def test_a_hub_model_takes_nothing_of_the_recipes_own() -> None:
    rendered = render({"recipe": {"name": "arithmetic"}, "model": {"name": "a/b"}})
    config = rendered.one("ConfigMap", "pipelinerl-recipe")
    model = yaml.safe_load(config["data"]["recipe.yaml"])["model"]
    assert (model["source"], model["name"], "warmstart" in model) == ("hub", "a/b", False)


def test_recreating_pods_needs_no_rolling_update() -> None:
    deployment = render({"actor": {"strategy": {"type": "Recreate"}}}).one("Deployment", "pipelinerl-actor")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_a_release_that_cannot_name_a_service_is_refused() -> None:
    with pytest.raises(HelmError, match="set fullnameOverride"):
        render(release="7b")
    assert render({"fullnameOverride": "seven"}, release="7b").one("Deployment", "seven-actor")


def test_names_of_objects_stay_short_enough() -> None:
    rendered = render({"nats": {"replicas": 3}}, release="a" * 53)
    longest = max(len(item["metadata"]["name"]) for item in rendered.of_kind("Service", "StatefulSet"))
    assert longest <= 63 - len("-0")
    for item in rendered.of_kind("StatefulSet"):
        assert len(item["metadata"]["name"]) <= 52  # its pods' label controller-revision-hash adds 11


def test_the_test_trains_a_few_steps_of_the_arithmetic_recipe(tmp_path: Path) -> None:
    rendered = render(files=[CPU_VALUES])
    recipe = recipe_of(rendered, tmp_path, "test")
    assert (recipe.name, recipe.trainer.steps, recipe.model.source) == ("helm-test", 3, "warmstart")
    assert recipe_of(render({"test": {"steps": 5}}), tmp_path, "test").trainer.steps == 5
