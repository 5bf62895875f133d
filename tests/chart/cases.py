"""Values that the chart is rendered with: each case turns on what the others leave off."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CPU_VALUES, Rendered, render

SIDECAR: dict[str, Any] = {
    "name": "fabric",
    "image": "registry.example.com/fabric:1",
    "resources": {
        "requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"},
        "limits": {"cpu": "8", "memory": "1Gi", "ephemeral-storage": "3Gi"},
    },
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
OWN_OBJECT = """
apiVersion: v1
kind: ConfigMap
metadata:
  name: "{{ .Release.Name }}-fabric"
  labels: {{- include "pipelinerl.labels" (dict "root" . "component" "") | nindent 4 }}
"""
EVERYWHERE: dict[str, Any] = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
            }
        },
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"team": "a"}}}}
            ]
        },
    },
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "labels": {"kueue.x-k8s.io/queue-name": "rl", "app.kubernetes.io/name": "of-the-chart"},
    "podLabels": {"team": "a", "app.kubernetes.io/component": "of-the-chart"},
    "podAnnotations": {"example.com/note": "yes"},
    "extraEnv": [{"name": "HOME", "value": "/elsewhere"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
    "extraVolumes": [{"name": "problems", "configMap": {"name": "problems"}}],
    "extraVolumeMounts": [{"name": "problems", "mountPath": "/problems", "readOnly": True}],
    "extraContainers": [SIDECAR],
    "extraInitContainers": [SIDECAR | {"name": "fabric-init", "restartPolicy": "Always"}],
    "serviceAccount": {"annotations": {"example.com/role": "x"}},
}
MONITORED = {part: {"enabled": True, "labels": {"release": "prometheus"}} for part in ("podMonitor", "prometheusRule")}
ISSUER = {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}
TLS = {"grpc": {"enabled": True}, "nats": {"enabled": True}}
SECRETS = {name: f"{name}-certificate" for name in ("actor", "trainer", "verifier", "nats")}


@dataclass(frozen=True)
class Case:
    """`cpu`: values-cpu.yaml below `values`. `release`: its name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    release: str = "pipelinerl"

    @property
    def files(self) -> tuple[Path, ...]:
        return (CPU_VALUES,) if self.cpu else ()


def _case(values: str = "", **options: Any) -> Case:
    return Case(yaml.safe_load(values) or {}, **options)


CASES: dict[str, Case] = {
    "default": _case(),
    "model": _case("{model: {name: Qwen/Qwen3-8B}}"),
    "cpu": _case(cpu=True),
    "everything": Case(
        {
            "model": {"name": "Qwen/Qwen3-8B"},
            "recipe": {"set": {"trainer": {"steps": 10}, "actor": {"engine": {"tensor_parallel_size": 2}}}},
            "run": "all-of-it",
            "huggingface": {"token": "hf_x"},
            "images": {"registry": "registry.example.com/ml", "tag": "1.2.3", "pullSecrets": [{"name": "login"}]},
            "actor": EVERYWHERE
            | {
                "rdma": {"rdma/hca": 1},
                "threads": 8,
                "cache": {"existingClaim": "models"},
                "autoscaling": {"enabled": True, "keda": {"prometheusAddress": "http://p:9090", "authentication": "t"}},
            },
            "trainer": EVERYWHERE
            | {
                "nodes": 2,
                "gpus": 8,
                "rdma": {"rdma/hca": 8},
                "persistence": {"accessMode": "ReadWriteMany"},
                "page": {"enabled": True, "hosts": ["runs.example.com", "runs"]},
            },
            "verifier": EVERYWHERE,
            "nats": EVERYWHERE | {"replicas": 3, "persistence": {"storageClass": "fast"}, "exporter": {"enabled": True}},
            "tls": TLS | {"certManager": ISSUER},
            "network": {"interface": "net1", "infinibandDevices": "mlx5"},
            "networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
            "metrics": MONITORED | {"dashboards": {"enabled": True, "annotations": {"folder": "rl"}}},
            "commonLabels": {"team": "rl"},
            "extraObjects": [OWN_OBJECT],
            "test": {"transferPair": {"enabled": True}},
        }
    ),
    "tls-cert-manager": _case(
        "{tls: {grpc: {enabled: true}, nats: {enabled: true}, certManager: {enabled: true, issuerRef: {name: ca, kind: "
        "ClusterIssuer}}}}",
        cpu=True,
    ),
    "tls-secrets": _case(
        "{tls: {grpc: {enabled: true}, nats: {enabled: true}, secrets: {actor: actor-certificate, trainer: "
        "trainer-certificate, verifier: verifier-certificate, nats: nats-certificate}}, nats: {replicas: 3}}",
        cpu=True,
    ),
    "tls-grpc-only": _case(
        "{tls: {grpc: {enabled: true}, certManager: {enabled: true, issuerRef: {name: ca, kind: ClusterIssuer}}}}", cpu=True
    ),
    "external-nats": _case(
        "{nats: {enabled: false, url: 'tls://nats.messaging:4222', existingSecret: login, tlsSecret: nats-ca, "
        "streamReplicas: 3}}",
        cpu=True,
    ),
    "external-nats-open": _case("{nats: {enabled: false, url: 'nats://nats.messaging:4222'}}", cpu=True),
    "nats-3": _case(
        "{nats: {replicas: 3}, trainer: {page: {enabled: true, ingress: {enabled: true, host: runs.example.com, "
        "annotations: {auth: x}}}}}"
    ),
    "nats-no-login": _case("{nats: {auth: {enabled: false}, persistence: {enabled: false}}}", cpu=True),
    "two-nodes": _case("{trainer: {nodes: 2, gpus: 8, persistence: {existingClaim: shared}}}"),
    "group": _case(
        "{recipe: {name: smollm2}, kueue: {queue: rl}, trainer: {nodes: 2, expectedActors: 3, persistence: "
        "{existingClaim: shared}}, actor: {resourceClaims: [{name: gpu, resourceClaimTemplateName: h100}]}}"
    ),
    "keda": _case(
        "{actor: {autoscaling: {enabled: true, keda: {prometheusAddress: 'http://p:9090'}}}, metrics: {podMonitor: "
        "{enabled: true, labels: {release: prometheus}}, prometheusRule: {enabled: true, labels: {release: prometheus}}}}"
    ),
    "hpa": _case("{actor: {autoscaling: {enabled: true, kind: hpa}}, metrics: {scrapedOtherwise: true}}"),
    "episodes": _case(
        "{recipe: {set: {task: {source: environment, name: 'my_package.envs:GuessNumber'}, reward: {scorer: task, "
        "overlong: {buffer_tokens: 0}, timeout_s: 5}}}, verifier: {image: {reference: "
        "'registry.example.com/team/guess:3'}, maxEpisodes: 64, autoscaling: {kind: keda}, extraVolumes: [{name: keys, "
        "secret: {secretName: search-keys}}], extraVolumeMounts: [{name: keys, mountPath: /secrets, readOnly: true}]}, "
        "actor: {replicas: 8, autoscaling: {keda: {prometheusAddress: 'http://p:9090'}}}, metrics: {podMonitor: "
        "{enabled: true, labels: {release: prometheus}}, prometheusRule: {enabled: true, labels: {release: prometheus}}}}"
    ),
    "no-policies": _case("{networkPolicy: {enabled: false}}"),
    "no-rbac": _case("{rbac: {create: false}, actor: {serviceAccount: {create: false, name: mine}}}"),
    "no-kubernetes-api": _case("{kubernetesApi: {enabled: false}, test: {enabled: false}}", cpu=True),
    "traces": _case(
        "{tracing: {endpoint: 'http://otel-collector.observability:4318', ratio: 0.05, headersSecret: collector-login}}",
        cpu=True,
    ),
    "other-name": _case("{recipe: {name: smollm2}, network: {bindHost: '::'}}", cpu=True, release="blue"),
}


@functools.cache
def rendered_case(name: str) -> Rendered:
    """Rendered once."""
    case = CASES[name]
    return render(case.values, case.files, case.release)
