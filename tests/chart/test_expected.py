"""Single values of the rendered objects that matter, and why: a table per case.

What holds for every case is in the other files; the whole of the cases `default` and `cpu` is in the snapshots.
"""

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from services.trainer.launch import RENDEZVOUS_TIMEOUT_S
from tests.chart.cases import EVERYWHERE, rendered_case
from tests.chart.rendering import SERVICES, Rendered, environment, render
from tests.chart.scheduler import PREFERRED
from tests.monitoring.catalogue import names_in, samples

RELEASE_TEST = ["python", "-m", "services.trainer.release_test"]
OF_THE_ACTOR = ["--actor=pipelinerl-actor:8080", "--actor-login=/etc/pipelinerl/nats/actor-credentials"]
CLOSED = "--closed=pipelinerl-trainer-0.pipelinerl-trainer:50051"
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
AMD_TAINT = {"key": "amd.com/gpu", "operator": "Exists"}
IMAGE = "registry.example.com/actor@sha256:" + "0" * 64
PODS = (*SERVICES, "nats", "test")
ACTOR, TRAINER, VERIFIER = ("Deployment/pipelinerl-actor", "StatefulSet/pipelinerl-trainer", "Deployment/pipelinerl-verifier")
WANTED, EPISODES = "pipelinerl_actor_replicas_wanted", "pipelinerl_verifier_episodes"
KUEUE = "kueue.x-k8s.io"

OF_CASES: dict[str, dict[str, Any]] = {
    "everything": {
        "env/trainer PIPELINERL_RUN": "all-of-it",
        "env/trainer PIPELINERL_RUN_DIR": "/var/lib/pipelinerl/runs/all-of-it",
        "env/trainer PIPELINERL_PAGE": "true",
        "env/trainer PIPELINERL_PAGE_HOSTS": "pipelinerl-trainer-0.pipelinerl-trainer,runs.example.com,runs",
        "env/trainer PIPELINERL_ON_COMPLETION": "keep",  # KEDA would start the actors again
        "main/actor image": "registry.example.com/ml/pipelinerl/actor:1.2.3",
        "main/actor resources limits nvidia.com/gpu": 2,
        "main/actor resources limits rdma/hca": 1,
        "main/trainer resources limits nvidia.com/gpu": 8,
        "main/trainer resources limits rdma/hca": 8,
        # Variables of the values replace the chart's.
        "env/actor HOME": "/elsewhere",
        "env/actor NCCL_DEBUG": "INFO",
        "env/actor NCCL_SOCKET_IFNAME": "net1",
        "env/actor NCCL_IB_HCA": "mlx5",
        "env/actor HF_TOKEN secretKeyRef": {"name": "pipelinerl-huggingface", "key": "token"},
        "Secret/pipelinerl-huggingface data token": "aGZfeA==",  # hf_x
        # Labels of the values are added, podLabels before commonLabels, and the chart's own win.
        f"{ACTOR} metadata labels kueue.x-k8s.io/queue-name": "rl",
        f"{ACTOR} metadata labels team": "rl",
        f"{ACTOR} metadata labels app.kubernetes.io/name": "pipelinerl",
        "pod/actor metadata labels team": "a",
        "pod/actor metadata labels kueue.x-k8s.io/queue-name": None,
        # Both pods of the pair at once, in one hook; each says its own failure. None preempts a pod of the run.
        "Job/pipelinerl-test-transfer spec parallelism": 2,
        "Job/pipelinerl-test-transfer spec backoffLimitPerIndex": 0,
        "pod/transfer-test spec priorityClassName": None,
        "pod/transfer-test spec nodeSelector": EVERYWHERE["nodeSelector"],
        "main/transfer-test args": [
            *("python", "-m", "services.trainer.transfer_test", "--index=$(JOB_COMPLETION_INDEX)"),
            *("--host=pipelinerl-test-transfer-0.pipelinerl-test-transfer", "--own-host=$(POD_IP)"),
            *("--device=cuda", "--within=300"),
        ],
        "main/transfer-test resources limits": {"memory": "8Gi", "nvidia.com/gpu": 1, "rdma/hca": 1},
        **{f"pod/{pod} spec containers * name": [pod, "fabric"] for pod in SERVICES},
        **{f"pod/{pod} spec initContainers * name": ["fabric-init"] for pod in (*SERVICES, "nats")},
        "pod/nats spec containers * name": ["nats", "exporter", "fabric"],
        f"pod/actor spec affinity podAffinity {PREFERRED}": EVERYWHERE["affinity"]["podAffinity"][PREFERRED],
    },
    "two-nodes": {
        # Nodes of a trainer start and change over together under one name: a rolling update waits for the new pod to be ready,
        # and that one for an old pod that it can never meet. A node is not killed while it waits for the others.
        f"{TRAINER} spec podManagementPolicy": "Parallel",
        f"{TRAINER} spec replicas": 2,
        f"{TRAINER} spec updateStrategy": {"type": "OnDelete"},
        "Service/pipelinerl-trainer spec publishNotReadyAddresses": True,
        "main/trainer startupProbe failureThreshold": (600 + RENDEZVOUS_TIMEOUT_S) / 5,
    },
    "group": {
        "pod/actor spec resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
        "main/actor resources claims": [{"name": "gpu"}],
        "pod/actor spec initContainers * resources claims": [[{"name": "gpu"}]],
        "main/actor resources limits": {"memory": "96Gi"},
        "pod/actor spec tolerations": [GPU_TAINT],
        f"{ACTOR} spec replicas": 3,
        f"{ACTOR} spec strategy": {"type": "Recreate"},  # new pods beside old ones would be too many for Kueue
        **{f"pod/{pod} metadata labels {KUEUE}/queue-name": "rl" for pod in ("actor", "trainer")},
        **{f"pod/{pod} metadata annotations {KUEUE}/pod-suspending-parent": "pipelinerl" for pod in ("actor", "trainer")},
    },
    "keda": {
        f"{ACTOR} spec replicas": None,  # an autoscaler decides alone
        "ScaledObject/pipelinerl-actor spec minReplicaCount": 1,
        "ScaledObject/pipelinerl-actor spec maxReplicaCount": 8,
        "ScaledObject/pipelinerl-actor spec triggers * metadata ignoreNullValues": ["false"],  # else no value would mean 0
    },
    "hpa": {
        f"{ACTOR} spec replicas": None,
        "HorizontalPodAutoscaler/pipelinerl-actor spec metrics * external metric name": [WANTED],
    },
    "episodes": {
        "main/verifier image": "registry.example.com/team/guess:3",
        "main/release-test args": [*RELEASE_TEST, *OF_THE_ACTOR, "--episodes=pipelinerl-actor:8090", CLOSED],
        f"{VERIFIER} spec replicas": None,
        "HorizontalPodAutoscaler/pipelinerl-verifier": None,
        "ScaledObject/pipelinerl-verifier spec triggers * type": ["cpu", "prometheus"],
        "ScaledObject/pipelinerl-verifier spec triggers * metadata value": ["70", None],
        "ScaledObject/pipelinerl-verifier spec triggers * metadata threshold": [None, "44"],  # 70 % of 64
        "ScaledObject/pipelinerl-verifier spec triggers * metadata ignoreNullValues": [None, "false"],
    },
    "nats-3": {"env/trainer PIPELINERL_STREAM_REPLICAS": "3"},
    "external-nats-open": {"main/release-test args": [*RELEASE_TEST, OF_THE_ACTOR[0], CLOSED]},
    "external-nats": {"env/trainer PIPELINERL_STREAM_REPLICAS": "3"},
    "no-kubernetes-api": {"pod/test": None},
    "traces": {
        key: value
        for service in SERVICES
        for key, value in {
            f"env/{service} OTEL_EXPORTER_OTLP_HEADERS secretKeyRef": {"name": "collector-login", "key": "headers"},
            f"env/{service} OTEL_RESOURCE_ATTRIBUTES": "k8s.namespace.name=train,k8s.pod.name=$(PIPELINERL_INSTANCE)",
            f"env/{service} OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel-collector.observability:4318",
            f"env/{service} OTEL_TRACES_SAMPLER_ARG": "0.05",
        }.items()
    },
}
OF_VALUES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"actor": {"tolerations": [GPU_TAINT]}}, {"pod/actor spec tolerations": [GPU_TAINT]}),  # once
    (
        {"gpu": {"resource": "amd.com/gpu", "tolerations": [AMD_TAINT]}},
        {"pod/trainer spec tolerations": [AMD_TAINT], "main/trainer resources limits amd.com/gpu": 4},
    ),
    ({"actor": {"image": {"reference": IMAGE}}}, {"main/actor image": IMAGE}),
    (
        {
            "actor": {"gpus": 0},
            "trainer": {"gpus": 0},
            "images": {"variant": "cpu"},
            "test": {"transferPair": {"enabled": True}},
        },
        {"main/transfer-test resources limits": {"memory": "8Gi"}, "main/transfer-test image": "pipelinerl/trainer:0.1.0-cpu"},
    ),
    (
        {"actor": {"hostNetwork": True}, "networkPolicy": {"enabled": False}},
        {
            "pod/actor spec hostNetwork": True,
            "pod/actor spec dnsPolicy": "ClusterFirstWithHostNet",
            "pod/trainer spec hostNetwork": None,
        },
    ),
    (
        {service: {"schedulerName": "volcano"} for service in SERVICES},
        {f"pod/{pod} spec schedulerName": "volcano" for pod in SERVICES},
    ),
    (  # OpenShift gives each namespace uids of its own, and refuses others
        {"security": {"runAsUser": None}},
        {
            f"pod/{pod} spec securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
            for pod in PODS
        }
        | {f"main/{pod} securityContext {key}": None for pod in PODS for key in ("runAsUser", "runAsGroup")},
    ),
    (
        {"actor": {"capabilities": ["IPC_LOCK"]}, "security": {"runAsUser": 0}},
        {f"pod/{pod} spec securityContext fsGroup": 0 for pod in PODS}
        | {
            f"main/{pod} securityContext {key}": value
            for pod in PODS
            for key, value in (("runAsUser", 0), ("runAsNonRoot", False))
        }
        | {
            "main/actor securityContext capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            "main/trainer securityContext capabilities": {"drop": ["ALL"]},
        },
    ),
    (
        {"rewards": {"files": {"mine.py": "def score(item): ...\n"}}, "task": {"files": {"train.jsonl": "{}\n"}}},
        {
            "ConfigMap/pipelinerl-verifier-files data": {"mine.py": "def score(item): ...\n"},
            "env/verifier PIPELINERL_REWARD_MODULES": "/etc/pipelinerl/rewards",
            "main/verifier volumeMounts * mountPath": ["/etc/pipelinerl/recipe", "/tmp", "/etc/pipelinerl/rewards"],
            "ConfigMap/pipelinerl-trainer-files data": {"train.jsonl": "{}\n"},
            "env/verifier PYTHONPATH": None,  # the image's, or one's own, stays
        },
    ),
    (
        {"verifier": {"serviceAccount": {"annotations": {"example.com/role": "pulls"}}}},
        {
            "pod/validation spec serviceAccountName": "pipelinerl-validation",
            "ServiceAccount/pipelinerl-validation metadata annotations example.com/role": "pulls",
            "ServiceAccount/pipelinerl-validation metadata annotations helm.sh/hook": "pre-install,pre-upgrade",
            "pod/test spec serviceAccountName": "pipelinerl-verifier",
        },
    ),
    (
        {"verifier": {"serviceAccount": {"create": False, "name": "mine"}}},
        {f"pod/{pod} spec serviceAccountName": "mine" for pod in ("verifier", "validation", "test")},
    ),
    *(  # a claim that one pod takes is the trainer's
        (
            {"trainer": {"persistence": {"accessMode": "ReadWriteOncePod", "existingClaim": claim}}},
            {
                "pod/release-test spec volumes * persistentVolumeClaim": [None] * 5,
                "main/release-test args": [*RELEASE_TEST, "--no-volume", *OF_THE_ACTOR, CLOSED],
            },
        )
        for claim in ("", "mine")
    ),
    (  # each address in the family that it is of
        {"networkPolicy": {"hub": {"cidrs": ["0.0.0.0/0", "::/0", "10.0.0.0/8"]}}},
        {
            "NetworkPolicy/pipelinerl-actor spec egress * to * ipBlock except": [
                *[[None, None], [None], [None], [None]],
                [["169.254.169.254/32"], ["fd00:ec2::254/128", "fd20:ce::254/128"], None],
            ]
        },
    ),
    (
        {"nats": {"exporter": {"enabled": True}}, "metrics": {"podMonitor": {"enabled": True}}},
        {
            "pod/nats spec containers * image": [
                "docker.io/library/nats:2.15.1-alpine",
                "docker.io/natsio/prometheus-nats-exporter:0.17.3",
            ],
            "PodMonitor/pipelinerl-nats spec podMetricsEndpoints * port": ["metrics"],
            "NetworkPolicy/pipelinerl-nats spec ingress * ports": [
                [{"protocol": "TCP", "port": port}] for port in ("client", "metrics")
            ],
        },
    ),
    ({"actor": {"strategy": {"type": "Recreate"}}}, {f"{ACTOR} spec strategy": {"type": "Recreate"}}),
    (
        {
            "verifier": {"maxEpisodes": 1000, "autoscaling": {"kind": "hpa", "targetEpisodes": 50}},
            "recipe": {"set": {"task": {"source": "environment", "name": "a.b:C"}}},
            "metrics": {"podMonitor": {"enabled": True}},
        },
        {
            "HorizontalPodAutoscaler/pipelinerl-verifier spec metrics * type": ["Resource", "External"],
            "HorizontalPodAutoscaler/pipelinerl-verifier spec metrics * external target averageValue": [None, "500"],
            "HorizontalPodAutoscaler/pipelinerl-verifier spec metrics * external metric name": [None, EPISODES],
            "HorizontalPodAutoscaler/pipelinerl-verifier spec metrics * external metric selector matchLabels": [
                None,
                {"app_kubernetes_io_instance": "pipelinerl"},
            ],
        },
    ),
]


def found(rendered: Rendered, place: str) -> Any:
    """The value at a place; None where there is none. `*` is a list's items.

    A place begins with an object (KIND/NAME), a pod of a component, its main container, or a variable of that.
    """
    start, *path = place.split(" ")
    kind, _, name = start.partition("/")
    if kind not in ("pod", "main", "env"):
        return functools.reduce(_step, path, rendered.find(kind, name))
    pod = next((pod for pod in rendered.pods if pod.component == name), None)
    if pod is None or kind == "pod":
        return functools.reduce(_step, path, pod and {"metadata": pod.metadata, "spec": pod.spec})
    if kind == "main":
        return functools.reduce(_step, path, pod.main)
    entry = environment(pod.main).get(path[0], {})
    return functools.reduce(_step, path[1:], entry.get("valueFrom")) if path[1:] else entry.get("value")


def _step(value: Any, key: str) -> Any:
    """Lists of what `*` opened are gone through."""
    if isinstance(value, list):
        return value if key == "*" else [_step(item, key) for item in value]
    return value.get(key) if isinstance(value, Mapping) else None


@pytest.mark.parametrize("case", OF_CASES)
def test_values_are_as_expected(case: str) -> None:
    rendered = rendered_case(case)
    assert {place: found(rendered, place) for place in OF_CASES[case]} == OF_CASES[case]


@pytest.mark.parametrize(("values", "expected"), OF_VALUES, ids=lambda one: next(iter(one)))
def test_these_values_lead_to(values: dict[str, Any], expected: dict[str, Any]) -> None:
    rendered = render(values)
    assert {place: found(rendered, place) for place in expected} == expected


def test_autoscalers_ask_for_a_metric_that_exists_and_monitors_tell_releases_apart_by_it(rendered: Rendered) -> None:
    """The HPA's selector is a label that podTargetLabels puts on every sample."""
    for case, service, wanted in (("keda", "actor", WANTED), ("episodes", "verifier", EPISODES)):
        trigger = found(rendered_case(case), f"ScaledObject/pipelinerl-{service} spec triggers")[-1]
        assert names_in(trigger["metadata"]["query"]) == {wanted}
        assert wanted in samples()
    for monitor in rendered.of_kind("PodMonitor"):
        assert "app.kubernetes.io/instance" in monitor["spec"]["podTargetLabels"]
    selectors = found(rendered, "HorizontalPodAutoscaler/pipelinerl-actor spec metrics * external metric selector matchLabels")
    assert selectors in (None, [{"app_kubernetes_io_instance": "pipelinerl"}])


def test_a_changed_recipe_replaces_the_pods() -> None:
    def sums(values: dict[str, Any]) -> set[str]:
        rendered = render(values)
        return {rendered.pod(service).metadata["annotations"]["checksum/recipe"] for service in SERVICES}

    before, after = sums({}), sums({"recipe": {"set": {"trainer": {"steps": 7}}}})
    assert len(before) == len(after) == 1
    assert before != after


def test_the_processes_of_helm_test_find_each_other_on_its_loopback_and_share_no_port() -> None:
    rendered = rendered_case("default")
    by_name = {container["name"]: environment(container) for container in rendered.pod("test").containers[1:]}
    ports = [
        entries[name]["value"]
        for entries in by_name.values()
        for name in ("PIPELINERL_GRPC_PORT", "PIPELINERL_HTTP_PORT")
        if name in entries
    ]
    assert len(set(ports)) == len(ports) == 6
    grpc = by_name["verifier"]["PIPELINERL_GRPC_PORT"]["value"]
    for name in ("actor", "trainer"):
        assert by_name[name]["PIPELINERL_VERIFIER"]["value"] == f"127.0.0.1:{grpc}"
        assert by_name[name]["PIPELINERL_NATS_URL"]["value"] == "nats://127.0.0.1:4222"
    assert "listen: 127.0.0.1:4222" in rendered.one("ConfigMap", "pipelinerl-test")["data"]["nats.conf"]
    assert all("PIPELINERL_GRPC_HOST" not in entries for entries in by_name.values())  # loopback by itself
