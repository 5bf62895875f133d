"""The recipe that the services get is the one that was asked for, and loads."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from pipelinerl.commands.validate import chart_problems
from pipelinerl.recipe.fields import Recipe, TaskConfig
from pipelinerl.recipe.loading import load_recipe
from tests.chart.rendering import CHART, ROOT, SERVICES, HelmError, Rendered, render

NAMES = tuple(path.stem for path in sorted((ROOT / "recipes").glob("*.yaml")))
COPY = "cp recipes/*.yaml deploy/helm/recipes/"


def recipe_of(rendered: Rendered, folder: Path, suffix: str = "recipe") -> Recipe:
    (found,) = [item for item in rendered.of_kind("ConfigMap") if item["metadata"]["name"].endswith(f"-{suffix}")]
    file = folder / "recipe.yaml"
    file.write_text(found["data"]["recipe.yaml"], encoding="utf-8")
    return load_recipe(file)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_of_the_project_loads_in_the_chart_by_name_inline_and_for_another_model(name: str, tmp_path: Path) -> None:
    original = ROOT / "recipes" / f"{name}.yaml"
    assert {path.stem for path in (CHART / "recipes").glob("*.yaml")} == set(NAMES), COPY
    assert (CHART / "recipes" / f"{name}.yaml").read_bytes() == original.read_bytes(), COPY
    data = yaml.safe_load(original.read_text().replace(" 1e-6", " 1.0e-6"))
    for values in ({"name": name}, {"inline": data}):
        assert recipe_of(render({"recipe": values}), tmp_path) == load_recipe(original)
    model = recipe_of(render({"model": {"name": "a/b"}, "recipe": {"name": name}}), tmp_path).model
    assert (model.source, model.name) == ("hub", "a/b")


def test_a_trainer_whose_ranks_are_for_the_machine_to_say_has_one_gpu() -> None:
    rendered = render({"recipe": {"name": "gsm8k"}})
    assert any("nproc: auto" in item["data"].get("recipe.yaml", "") for item in rendered.of_kind("ConfigMap"))
    assert rendered.pod("trainer").main["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_every_case_has_a_recipe_that_loads(rendered: Rendered, tmp_path: Path) -> None:
    recipe = recipe_of(rendered, tmp_path)
    checked = [item for item in rendered.objects if item["metadata"]["name"].endswith("-validation")]
    assert {item["metadata"]["annotations"]["helm.sh/hook"] for item in checked} == {"pre-install,pre-upgrade"}
    assert recipe_of(rendered, tmp_path, "validation") == recipe
    assert ("episodes" in rendered.pod("actor").ports) == bool(recipe.episodic_tasks)


def test_the_chart_knows_the_tasks_that_have_episodes() -> None:
    """Whichever of several it is, and where one is only evaluated."""
    one = {"name": "two", "model": {"name": "a/b"}, "task": {"name": "chain_sum"}}
    for source in get_args(TaskConfig.model_fields["source"].annotation):
        second = {"name": "second", "task": {"source": source}}
        evaluated = {"evaluation": {"sets": [{"name": "of the run's own task"}, second]}}
        for more in ({"task": None, "tasks": [{"task": one["task"]}, second]}, evaluated):
            rendered = render({"recipe": {"inline": {**one, **more}}})
            assert ("episodes" in rendered.pod("actor").ports) == TaskConfig(source=source).is_episodic, (source, more)


PROMPT = 'Put it in \\boxed{}: "yes"\n  and: no # really\n{{ .Values }}'
SET: dict[str, Any] = {
    "seed": 2**31 - 1,
    "task": {"system_prompt": PROMPT},
    "sampling": {"temperature": 1},
    "trainer": {"steps": 10_000_000, "learning_rate": 3.0e-7, "epsilon": 1.0e-12, "batch_size": 1_000_000},
    "algorithm": {"clamp": 5, "max_lag": None, "clip_low": 0.0003},
    "reward": {"timeout_s": 0.1},
}


def test_what_is_set_lies_over_the_recipe_as_it_is_and_leaves_the_rest(tmp_path: Path) -> None:
    """Helm's numbers have been through JSON and Go: a million must not become 1e+06, which is no integer. Null is a value."""
    original = load_recipe(ROOT / "recipes" / "arithmetic.yaml").model_dump()
    assert original["algorithm"]["max_lag"] is not None
    changed = {name: original[name] | value if isinstance(value, dict) else value for name, value in SET.items()}
    wanted = original | changed
    assert recipe_of(render({"recipe": {"name": "arithmetic", "set": SET}}), tmp_path).model_dump() == wanted


def test_a_chat_template_reaches_the_services_as_its_text(tmp_path: Path) -> None:
    """By --set-file: no pod has the file."""
    (tmp_path / "chat.jinja").write_text("{#- it's #}\n{%- for m in messages %}\n{{- m.content + '\\n' }}\n{%- endfor %}\n\n")
    rendered = render(extra=("--set-file", f"recipe.set.model.chat_template={tmp_path / 'chat.jinja'}"))
    assert recipe_of(rendered, tmp_path).model.chat_template == (tmp_path / "chat.jinja").read_text()


def test_one_value_starts_a_run_from_a_checkpoint_and_only_the_trainer_has_the_stores_secret(tmp_path: Path) -> None:
    url = "s3://models/team/first/checkpoints/latest"
    rendered = render({"model": {"source": url}, "recipe": {"name": "gsm"}, "storage": {"existingSecret": "s3"}})
    recipe = recipe_of(rendered, tmp_path)
    assert (recipe.model.source, recipe.model.name) == ("checkpoint", url)
    assert recipe_of(render({"recipe": {"set": {"model": {"source": url}}}}), tmp_path).model.name == url
    for pod in map(rendered.pod, SERVICES):
        given = [[{"secretRef": {"name": "s3"}}]] if pod.component == "trainer" else [None]
        assert [container.get("envFrom") for container in pod.containers] == given * len(pod.containers)
    assert rendered.pod("actor").spec["initContainers"][0]["args"][-1] == "services.actor.initial_model"


TABLES: dict[str, Any] = yaml.safe_load(r"""
recipes:
  judge: &judge
    scorer: judge
    judge: {url: 'https://judge.example.com/v1', model: m, template: '{completion}', pattern: (\d+)}
  episodes: &episodes
    task: {source: environment, name: 'a.b:C'}
    reward: {scorer: task, overlong: {buffer_tokens: 0}, timeout_s: 5}
    actor: {sequences_in_progress: 64}
  upload: &upload {set: {checkpoint: {upload: 's3://a/b'}}}
closed: &closed {hub: {enabled: false}}
many: &many {accessMode: ReadWriteMany}
hpa: &hpa {autoscaling: {enabled: true, kind: hpa}}
refused:  # by the templates
  "recipe.set.actor.colocate: true is for": {recipe: {set: {mode: conventional, actor: {colocate: true}}}}
  "trainer.onCompletion: release needs kubernetesApi": {trainer: {onCompletion: release}, kubernetesApi: {enabled: false}}
  "trainer.page.ingress.enabled: needs": {trainer: {page: {ingress: {enabled: true, host: a.b}}}}
  "trainer.page.ingress.annotations: are empty": {trainer: {page: {enabled: true, ingress: {enabled: true, host: a.b}}}}
  "trainer.onCompletion: exit does not go with": {trainer: {onCompletion: exit}, actor: {autoscaling: {enabled: true}}}
  "model.source: first/checkpoints/latest and model.name:": {model: {name: a/b, source: first/checkpoints/latest}}
  "recipe.name: the chart has no recipe \"gsn\"; use one of arithmetic, calculator, code, gsm": {recipe: {name: gsn}}
  "recipe.inline: the recipe has no model": {recipe: {inline: {name: mine, task: {source: reasoning_gym}}}}
  "recipe.set.model.chat_template: chat.jinja is a file": {recipe: {set: {model: {chat_template: chat.jinja}}}}
  "model.name: the recipe names no model; set": {recipe: {name: smollm2, set: {model: {source: hub}}}}
  "run: \"My run\" cannot name a run; use 1-40 lowercase letters, digits and inner": {recipe: {set: {name: My run}}}
  "actor.gpus: 4 differs from the recipe's actor.engine.tensor_parallel_size = 1; set": {actor: {gpus: 4}}
  "trainer.hostNetwork: NetworkPolicies do not recognize pods": {trainer: {hostNetwork: true}}
  "trainer.labels, commonLabels: with kueue": {kueue: {queue: rl}, trainer: {labels: {kueue.x-k8s.io/queue-name: rl}}}
  "actor.autoscaling.enabled: Kueue deletes": {kueue: {queue: rl}, actor: *hpa}
  "trainer.expectedActors: is 0, so that the pod group": {kueue: {queue: rl}, trainer: {expectedActors: 0}}
  "replicas: 8 is not trainer.expectedActors = 4": {kueue: {queue: rl}, actor: {replicas: 8}, trainer: {expectedActors: 4}}
  "test.transferPair.enabled: its": {trainer: {resourceClaims: [{name: gpus}]}, test: &pair {transferPair: {enabled: true}}}
  "with resourceClaims or hostNetwork": {trainer: {hostNetwork: true}, test: *pair, networkPolicy: {enabled: false}}
  "extraObjects[1]: is not one object": {extraObjects: [{apiVersion: v1, kind: Secret, metadata: {name: a}}, 'kind: Secret']}
  "accessMode: ReadWriteOnce does not let trainer.nodes = 2 pods": {trainer: {nodes: 2, persistence: {existingClaim: mine}}}
  "trainer.terminationGracePeriodSeconds: 100 leaves no time after": {trainer: {terminationGracePeriodSeconds: 100}}
  "nothing would collect the metric that actor.autoscaling follows": {actor: *hpa}
  "nothing would collect the metric that verifier.autoscaling": {recipe: {set: *episodes}, verifier: {autoscaling: {kind: hpa}}}
  "actor.affinity: a required podAffinity cannot be combined":
    {actor: {affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}}}
  "trainer.capabilities: [IPC_LOCK] have no effect for a process that is not": {trainer: {capabilities: [IPC_LOCK]}}
  "both are x, which the chart creates": {actor: {serviceAccount: {name: x}}, trainer: {serviceAccount: {name: x}}}
  "both are pipelinerl-trainer, which the chart creates": {actor: {serviceAccount: {create: false, name: pipelinerl-trainer}}}
  "tls.nats.enabled: encrypts only": {tls: {nats: {enabled: true}}, nats: {enabled: false, url: 'nats://nats.messaging:4222'}}
  "images.variant: cuda does not fit actor.gpus = 0; set actor.gpus and": {actor: {gpus: 0}, trainer: {gpus: 0}}
  "images.variant: cpu does not fit actor.gpus = 1; set actor.gpus and trainer.gpus to 0": {images: {variant: cpu}}
  "monitoring.from: is": {actor: *hpa, networkPolicy: {monitoring: {from: []}}, metrics: {scrapedOtherwise: true}}
  "ingress.from: is": {trainer: {page: {enabled: true, ingress: {enabled: true, host: a.b, withoutLogin: true, from: []}}}}
  "resolve a name; name the pods or addresses that answer DNS (needed even if a": {networkPolicy: {dns: {to: []}}}
  "nats.enabled: is true while trainer.enabled is false": {trainer: &none {enabled: false}}
  "recipe.set.weights.backend: auto needs connections between trainer and actors; while trainer.enabled is false, set":
    &alone {trainer: *none, nats: {enabled: false, url: 'tls://n'}}
  "recipe.set.mode: conventional waits until each actor serves":
    {<<: *alone, recipe: {set: {mode: conventional, weights: &log {backend: log}}}}
  "recipe.set.model.source: s3://a/b is copied or unpacked by the trainer, which the actors cannot reach":
    {<<: *alone, recipe: &reads {set: {weights: *log}}, model: {source: 's3://a/b'}}
  "kueue.queue: q has no group of trainer and actors": {<<: *alone, recipe: *reads, kueue: {queue: q}}
  "actor.autoscaling.enabled: follows a metric of the trainer":
    {<<: *alone, recipe: *reads, actor: {autoscaling: {enabled: true, kind: hpa}}, metrics: {scrapedOtherwise: true}}
  "metrics.prometheusRule.enabled: the alerts need the trainer's":
    {<<: *alone, recipe: *reads, metrics: {prometheusRule: {enabled: true}}}
  "nats.external.host: a.b would be open to other clusters without encryption or logins; set": {nats: {external: {host: a.b}}}
  "nats.existingSecret: login protects nothing": {nats: {existingSecret: login, auth: {enabled: false}}}
  "nats.url: is empty while nats.enabled is false": {nats: {enabled: false}}
  "nats.url: a server does not begin with nats:// or tls://": {nats: {enabled: false, url: 'nats://user:pass,word@nats:4222'}}
  ": is empty; name a Secret with tls.crt, tls.key and ca.crt": {tls: {grpc: {enabled: true}}}
  "tls.certManager.issuerRef: has no name": {tls: {nats: {enabled: true}, certManager: {enabled: true}}}
  "tls: certificates are given, but nothing is encrypted; set tls.grpc.enabled": {tls: {secrets: {actor: actor-tls}}}
  "keda.prometheusAddress: is empty; set": {actor: {autoscaling: {enabled: true}}, metrics: {scrapedOtherwise: true}}
  "verifier.autoscaling.maxReplicas: 2 is less than": {verifier: {autoscaling: {minReplicas: 3, maxReplicas: 2}}}
  "autoscaling.kind: hpa scales on": {verifier: {autoscaling: {kind: hpa}}, metrics: {scrapedOtherwise: true}}
  "keda needs it": {metrics: {scrapedOtherwise: true}, recipe: {set: *episodes}, verifier: {autoscaling: {kind: keda}}}
refused by the Job:  # before an install or upgrade
  "trainer.persistence.size = '500Gi': the model, 2 checkpoints of 216 GB": {model: {name: a/14B}}
  "'': the model, 2 checkpoints of 108 GB (checkpoint.keep) and the next one need 316Gi": {trainer: {persistence: {size: ''}}}
  "trainer.persistence.size = '': is empty": {model: {source: 's3://a/b'}, trainer: {persistence: {size: null}}}
  "[4443]: lacks port 4222 of": {nats: {enabled: false, url: 'nats://n'}, networkPolicy: {nats: {ports: [4443]}}}
  "trainer.expectedActors = 9: is more than actor.replicas = 8": {actor: {replicas: 8}, trainer: {expectedActors: 9}}
  "trainer.expectedActors = 8: is more than": {actor: *hpa, trainer: {expectedActors: 8}, metrics: {scrapedOtherwise: true}}
  "shard_ranks = 3: does": {recipe: {set: {trainer: {shard_ranks: 3}}}, trainer: {nodes: 2, persistence: *many}}
  "context_parallel = 2: does": {recipe: {set: {trainer: {context_parallel: 2}}}, trainer: {gpus: 1}}
  "trainer.resources.limits.cpu = '7500m': is less than": {trainer: {resources: {limits: {cpu: 7500m}}}}
  "trainer.page.resources.limits.memory = '64M': is": {trainer: {page: {resources: {limits: {memory: 64M}}}}}
  "networkPolicy.verifierEgress = []: is empty, so that no verifier would reach the": {recipe: {set: {reward: *judge}}}
  "the recipe's judge (https://judge.example.com/v1)":
    {recipe: {set: {evaluation: {sets: [{name: b, task: {name: chain_sum}, reward: *judge}]}}}}
  "networkPolicy.extraEgress = []: is": {recipe: *upload, networkPolicy: *closed, kubernetesApi: {enabled: false}}
  "would not reach hf://a/latest while networkPolicy.hub.enabled is false; add a rule to the store's":
    {model: {source: 'hf://a/latest'}, networkPolicy: {<<: *closed, kubernetesApi: {cidrs: [10.0.0.1/32, 'fd00::1/128']}}}
  "not reach gs://a/b":
    {recipe: {set: {checkpoint: {upload: 'gs://a/b'}}}, networkPolicy: {<<: *closed, kubernetesApi: {ports: [6443]}}}
  "maxSurge and maxUnavailable are both 0, so no": {actor: {strategy: {rollingUpdate: {maxUnavailable: 0%}}}}
  "[4222]: lacks port 4223 of nats.url = nats://nats-1.messaging:4223": {nats: {enabled: false, url: 'nats://nats-0.messaging:4222,nats://nats-1.messaging:4223'}}
  "nats.sequencesMaxGib = 18: is, together with nats.weightsMaxGib = 8, more than three quarters of":
    {model: {name: a/0.5B}, nats: {sequencesMaxGib: 18}, recipe: {set: {weights: {log: nats}}}}
  "nats.weightsMaxGib = 8: cannot hold the three whole versions that the weight log keeps; give at least 43":
    {model: {name: a/7B}, recipe: {set: {model: {dtype: bfloat16}, weights: {log: nats}}}}
  "trainer.resources.limits.memory = '144Gi': cannot hold a checkpoint and":
    model: {name: a/7B}
    recipe: {set: {model: {dtype: bfloat16}, weights: {backend: gloo, log: 's3://a/b'}}}
    trainer: &holds3 {resources: {requests: {memory: 1Gi}, limits: {memory: 144Gi}}}
  "nats.sequencesMaxGib = 25: is more than three quarters of nats.persistence.size = 32Gi": {nats: {sequencesMaxGib: 25}}
  "verifier.maxEpisodes = 191: gives 382 in 2 pods, but actors keep 384 episodes in progress":
    {recipe: {set: *episodes}, actor: {replicas: 3}, verifier: {maxEpisodes: 191, autoscaling: {enabled: false}}}
  "verifier.maxEpisodes = 95: gives 190 in 2 pods, but actors keep 192 episodes in progress":
    recipe: {set: {evaluation: {sets: [{name: b, task: {source: environment, name: 'a.b:C'}, reward: {scorer: task}}]}}}
    actor: {replicas: 3}
    verifier: {maxEpisodes: 95, autoscaling: {enabled: false}}
  "defaultLimits.cpu = '4': is less than trainer.resources.requests.cpu = 8": {defaultLimits: {cpu: '4'}}
  "networkPolicy.tracing.ports = [4317, 4318]: lacks port 9999 of": {tracing: {endpoint: 'http://collector:9999/v1'}}
  "lacks port 443 of tracing.endpoint": {tracing: {endpoint: 'https://otel.example.com/in:4318'}}
  "lacks port 80 of": {tracing: {endpoint: 'http://[2001:db8::4318]'}}
  "lacks port 55680 of": {tracing: {endpoint: 'http://[2001:db8::1]:55680'}}
  "lacks port 443 of": {tracing: {endpoint: 'http://collector', protocol: grpc}}
taken:  # although they look like those
- {model: {name: a/7B}, recipe: {set: {model: {dtype: bfloat16}, weights: {backend: gloo}}}, trainer: *holds3}
- {actor: {resources: null}, trainer: {resources: {limits: null}}}
- {actor: {resources: {requests: {memory: 24G}, limits: {memory: 24Gi}}}}
- {recipe: {set: {reward: *judge}}, networkPolicy: {verifierEgress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}}
- {recipe: {set: {reward: *judge}}, networkPolicy: {enabled: false, dns: {to: []}}}
- {recipe: *upload}
- {recipe: *upload, networkPolicy: *closed}
- {model: {source: 's3://a/x-70B/latest'}, networkPolicy: {<<: *closed, extraEgress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}}
- {model: {name: a/b}, actor: {cache: {existingClaim: models}}, networkPolicy: *closed}
- {actor: {strategy: {type: Recreate, rollingUpdate: {maxUnavailable: 0}}}}
- {recipe: {set: {checkpoint: {upload: 'file:///data/up'}}}, networkPolicy: *closed, kubernetesApi: {enabled: false}}
- {model: {source: 'file:///data/first'}, networkPolicy: *closed, kubernetesApi: {enabled: false}}
- {actor: {podAnnotations: {limits: x, requests: y}, replicas: 0}}
- {<<: *alone, trainer: {enabled: false, expectedActors: 9}, recipe: {set: {trainer: {shard_ranks: 3}, weights: *log}}}
- {nats: {url: null}, trainer: {persistence: {size: null, existingClaim: shared}}}
- {actor: {serviceAccount: &theirs {create: false, name: theirs}}, trainer: {serviceAccount: *theirs}}
- {nats: {enabled: false, url: 'nats://n:4222', serviceAccount: {name: pipelinerl-actor}}}
- {tracing: &collector {endpoint: 'http://collector:9999'}, networkPolicy: {tracing: {ports: [9999]}}}
- {tracing: *collector, networkPolicy: {enabled: false}}
- {tracing: *collector, networkPolicy: {tracing: {to: []}}}
""")
REFUSED, REFUSED_BY_THE_JOB, TAKEN = (TABLES[kind] for kind in ("refused", "refused by the Job", "taken"))


def said_by_the_job(rendered: Rendered, folder: Path) -> list[str]:
    """The problems that it finds in the files of its ConfigMap."""
    file = folder / "values.yaml"
    file.write_text(rendered.one("ConfigMap", "pipelinerl-validation")["data"]["values.yaml"])
    return [str(problem) for problem in chart_problems(file, recipe_of(rendered, folder))]


@pytest.mark.parametrize("message", REFUSED_BY_THE_JOB)
def test_the_job_refuses_what_needs_arithmetic(message: str, tmp_path: Path) -> None:
    (problem,) = said_by_the_job(render(REFUSED_BY_THE_JOB[message]), tmp_path)
    assert message in problem


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_contradict_each_other_are_refused_by_name(message: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(REFUSED[message])
    assert "\n\npipelinerl: " in str(refused.value)
    assert message in str(refused.value)


def test_a_release_that_cannot_name_a_service_and_files_for_which_it_has_no_room_are_refused() -> None:
    with pytest.raises(HelmError, match="set fullnameOverride"):
        render(release="7b")
    assert render({"fullnameOverride": "seven"}, release="7b").one("Deployment", "seven-actor")
    with pytest.raises(HelmError, match="400001 bytes together are more than the 400000"):
        render({"rewards": {"files": {"big.py": "#" * 200_000}}, "task": {"files": {"big.jsonl": "x" * 200_001}}})


@pytest.mark.parametrize("values", TAKEN, ids=str)
def test_values_that_only_look_like_those_are_taken(values: dict[str, Any], tmp_path: Path) -> None:
    assert said_by_the_job(render(values), tmp_path) == []
