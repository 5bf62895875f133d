"""Values that the chart is rendered with: each case turns on what the others leave off."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.chart.rendering import CPU_VALUES, Rendered, render


@dataclass(frozen=True)
class Case:
    """`cpu`: values-cpu.yaml below `values`. `release`: its name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    cpu: bool = False
    release: str = "pipelinerl"


CASES = {
    name: Case(**case)
    for name, case in yaml.safe_load(r"""
default: {}
cpu: {cpu: true}
everything:
  values:
    model: {name: Qwen/Qwen3-8B}
    recipe: {set: {trainer: {steps: 10}, actor: {engine: {tensor_parallel_size: 2}}}}
    run: all-of-it
    huggingface: {token: hf_x}
    images: {registry: registry.example.com/ml, tag: 1.2.3, pullSecrets: [{name: login}]}
    verifier: &everywhere
      nodeSelector: {pool: gpu}
      tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [h100]}]}]
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - {weight: 1, podAffinityTerm: {topologyKey: zone, labelSelector: {matchLabels: {team: a}}}}
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]
      runtimeClassName: nvidia
      priorityClassName: high
      labels: {kueue.x-k8s.io/queue-name: rl, app.kubernetes.io/name: of-the-chart}
      podLabels: {team: a, app.kubernetes.io/component: of-the-chart}
      podAnnotations: {example.com/note: 'yes'}
      extraEnv: [{name: HOME, value: /elsewhere}, {name: NCCL_DEBUG, value: INFO}]
      extraVolumes: [{name: problems, configMap: {name: problems}}]
      extraVolumeMounts: [{name: problems, mountPath: /problems, readOnly: true}]
      extraContainers:
        - &sidecar
          name: fabric
          image: registry.example.com/fabric:1
          resources:
            requests: {cpu: '1', memory: 1Gi, ephemeral-storage: 1Gi}
            limits: {cpu: '8', memory: 1Gi, ephemeral-storage: 3Gi}
          securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      extraInitContainers: [{<<: *sidecar, name: fabric-init, restartPolicy: Always}]
      serviceAccount: {annotations: {example.com/role: x}}
    actor:
      <<: *everywhere
      rdma: {rdma/hca: 1}
      threads: 8
      cache: {existingClaim: models}
      autoscaling: {enabled: true, keda: {prometheusAddress: 'http://p:9090', authentication: t}}
    trainer:
      <<: *everywhere
      nodes: 2
      gpus: 8
      rdma: {rdma/hca: 8}
      persistence: {accessMode: ReadWriteMany}
      page: {enabled: true, hosts: [runs.example.com, runs]}
    nats: {<<: *everywhere, replicas: 3, persistence: {storageClass: fast}, exporter: {enabled: true}}
    tls: {grpc: &on {enabled: true}, nats: *on, certManager: &issuer {enabled: true, issuerRef: {name: ca, kind: Issuer}}}
    network: {interface: net1, infinibandDevices: mlx5}
    networkPolicy: {extraEgress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]}
    metrics:
      podMonitor: &monitored {enabled: true, labels: {release: prometheus}}
      prometheusRule: *monitored
      dashboards: {enabled: true, annotations: {folder: rl}}
    commonLabels: {team: rl}
    extraObjects:
      - |
        apiVersion: v1
        kind: ConfigMap
        metadata:
          name: "{{ .Release.Name }}-fabric"
          labels: {{- include "pipelinerl.labels" (dict "root" . "component" "") | nindent 4 }}
    test: {transferPair: {enabled: true}}
tls-cert-manager: {cpu: true, values: {tls: {grpc: *on, nats: *on, certManager: *issuer}}}
tls-secrets:
  cpu: true
  values:
    tls: {grpc: *on, nats: *on, secrets: {actor: actor-tls, trainer: trainer-tls, verifier: verifier-tls, nats: nats-tls}}
    nats: {replicas: 3}
tls-grpc-only: {cpu: true, values: {tls: {grpc: *on, certManager: *issuer}}}
external-nats:
  cpu: true
  values: {nats: {enabled: false, url: 'tls://nats.messaging:4222', existingSecret: login, tlsSecret: ca, streamReplicas: 3}}
external-nats-open: {cpu: true, values: {nats: {enabled: false, url: 'nats://nats.messaging:4222'}}}
nats-3:
  values:
    nats: {replicas: 3}
    trainer: {page: {enabled: true, ingress: {enabled: true, host: runs.example.com, annotations: {auth: x}}}}
nats-no-login: {cpu: true, values: {nats: {auth: {enabled: false}, persistence: {enabled: false}}}}
two-nodes: {values: {trainer: {nodes: 2, gpus: 8, persistence: {existingClaim: shared, accessMode: ReadWriteMany}}}}
group:
  values:
    recipe: {name: smollm2}
    kueue: {queue: rl}
    trainer: {nodes: 2, expectedActors: 3, persistence: {existingClaim: shared, accessMode: ReadWriteMany}}
    actor: {resourceClaims: [{name: gpu, resourceClaimTemplateName: h100}]}
keda:
  values:
    actor: {autoscaling: {enabled: true, keda: {prometheusAddress: 'http://p:9090'}}}
    metrics: {podMonitor: *monitored, prometheusRule: *monitored}
hpa: {values: {actor: {autoscaling: {enabled: true, kind: hpa}}, metrics: {scrapedOtherwise: true}}}
episodes:
  values:
    recipe:
      set:
        task: {source: environment, name: 'my_package.envs:GuessNumber'}
        reward: {scorer: task, overlong: {buffer_tokens: 0}, timeout_s: 5}
    verifier:
      image: {reference: 'registry.example.com/team/guess:3'}
      maxEpisodes: 64
      autoscaling: {kind: keda}
      extraVolumes: [{name: keys, secret: {secretName: search-keys}}]
      extraVolumeMounts: [{name: keys, mountPath: /secrets, readOnly: true}]
    actor: {replicas: 8, autoscaling: {keda: {prometheusAddress: 'http://p:9090'}}}
    metrics: {podMonitor: *monitored, prometheusRule: *monitored}
no-policies: {values: {networkPolicy: {enabled: false}}}
no-rbac: {values: {rbac: {create: false}, actor: {serviceAccount: {create: false, name: mine}}}}
no-kubernetes-api: {cpu: true, values: {kubernetesApi: {enabled: false}, test: {enabled: false}}}
traces: {cpu: true, values: {tracing: {endpoint: 'http://otel.observability:4318', ratio: 0.05, headersSecret: otel-login}}}
other-name: {cpu: true, release: blue, values: {recipe: {name: smollm2}, network: {bindHost: '::'}}}
""").items()
}


@functools.cache
def rendered_case(name: str) -> Rendered:
    """Rendered once."""
    case = CASES[name]
    return render(case.values, (CPU_VALUES,) * case.cpu, case.release)
