"""Single values of the rendered objects that matter, and why. The snapshots have all of the cases `default` and `cpu`."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from services.trainer.launch import RENDEZVOUS_TIMEOUT_S
from tests.chart.cases import rendered_case
from tests.chart.rendering import SERVICES, Rendered, environment, render
from tests.monitoring.catalogue import names_in, samples

OF_CASES: dict[str, dict[str, Any]] = yaml.safe_load(r"""
everything:
  env/trainer:
    PIPELINERL_RUN_DIR: /var/lib/pipelinerl/runs/all-of-it
    PIPELINERL_PAGE: 'true'
    PIPELINERL_PAGE_HOSTS: pipelinerl-trainer-0.pipelinerl-trainer,runs.example.com,runs
    PIPELINERL_ON_COMPLETION: keep  # KEDA would start the actors again
  env/actor:  # Variables of the values replace the chart's.
    {HOME: /elsewhere, NCCL_DEBUG: INFO, NCCL_SOCKET_IFNAME: net1, GLOO_SOCKET_IFNAME: net1, NCCL_IB_HCA: mlx5,
     OMP_NUM_THREADS: '8', HF_TOKEN secretKeyRef: {name: pipelinerl-huggingface, key: token}}
  Secret/pipelinerl-huggingface: {data token: aGZfeA==}  # hf_x
  main/actor: {image: 'registry.example.com/ml/pipelinerl/actor:1.2.3'}
  main/actor resources limits: {nvidia.com/gpu: 2, rdma/hca: 1}
  main/trainer resources limits: {nvidia.com/gpu: 8, rdma/hca: 8}
  # Labels of the values are added, podLabels before commonLabels, and the chart's own win.
  Deployment/pipelinerl-actor metadata labels: {kueue.x-k8s.io/queue-name: rl, team: rl, app.kubernetes.io/name: pipelinerl}
  pod/actor metadata labels: {team: a, kueue.x-k8s.io/queue-name: null}
  pod/actor spec affinity podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 1, podAffinityTerm: {topologyKey: zone, labelSelector: {matchLabels: {team: a}}}}
  # Both pods of the pair at once, in one hook; each says its own failure. None preempts a pod of the run.
  Job/pipelinerl-test-transfer spec: {parallelism: 2, backoffLimitPerIndex: 0}
  pod/transfer-test spec:
    {priorityClassName: null, nodeSelector: {pool: gpu}, topologySpreadConstraints * topologyKey: [kubernetes.io/hostname]}
  main/transfer-test:
    args: python -m services.trainer.transfer_test --index=$(JOB_COMPLETION_INDEX)
      --host=pipelinerl-test-transfer-0.pipelinerl-test-transfer --own-host=$(POD_IP) --device=cuda --within=300
    resources limits: {memory: 8Gi, nvidia.com/gpu: 1, rdma/hca: 1}
  pod/actor spec, pod/trainer spec, pod/verifier spec, pod/nats spec:
    {initContainers * name: [fabric-init], imagePullSecrets * name: [login], nodeSelector pool: gpu, runtimeClassName: nvidia}
  pod/actor spec: {containers * name: [actor, fabric]}
  pod/trainer spec: {containers * name: [trainer, fabric]}
  pod/verifier spec: {containers * name: [verifier, fabric]}
  pod/nats spec: {containers * name: [nats, exporter, fabric]}
two-nodes:
  # Nodes of a trainer start and change over together under one name: a rolling update waits for the new pod to be ready,
  # and that one for an old pod that it can never meet. A node is not killed while it waits for the others.
  StatefulSet/pipelinerl-trainer spec: {updateStrategy: {type: OnDelete}}
  # Actors come after the last of them.
  pod/actor spec affinity podAffinity requiredDuringSchedulingIgnoredDuringExecution *:
    {topologyKey: [kubernetes.io/os], labelSelector matchLabels apps.kubernetes.io/pod-index: ['1']}
group:
  pod/actor spec:
    resourceClaims: [{name: gpu, resourceClaimTemplateName: h100}]
    initContainers * resources claims: [[{name: gpu}]]
  main/actor resources: {claims: [{name: gpu}], limits: {memory: 96Gi}}
  # New pods beside old ones would be too many for Kueue.
  Deployment/pipelinerl-actor spec: {replicas: 3, strategy: {type: Recreate}}
  pod/actor metadata, pod/trainer metadata:
    labels kueue.x-k8s.io/queue-name: rl
    annotations kueue.x-k8s.io/pod-group-serving: 'true'
    annotations kueue.x-k8s.io/pod-suspending-parent: pipelinerl
keda:
  ScaledObject/pipelinerl-actor spec:
    minReplicaCount: 1
    maxReplicaCount: 8
    triggers * metadata ignoreNullValues: ['false']  # else no value would mean 0
hpa:
  HorizontalPodAutoscaler/pipelinerl-actor spec: {metrics * external metric name: [pipelinerl_actor_replicas_wanted]}
episodes:
  main/verifier: {image: 'registry.example.com/team/guess:3'}
  main/release-test:
    args: python -m services.trainer.release_test --verifier=pipelinerl-verifier:50051 --actor=pipelinerl-actor:8080
      --actor-login=/etc/pipelinerl/nats/actor-credentials --episodes=pipelinerl-actor:8090
      --closed=pipelinerl-trainer-0.pipelinerl-trainer:50051
  HorizontalPodAutoscaler/pipelinerl-verifier: {kind: null}
  ScaledObject/pipelinerl-verifier spec:
    triggers * type: [cpu, prometheus]
    triggers * metadata value: ['70', null]
    triggers * metadata threshold: [null, '44']  # 70 % of 64
    triggers * metadata ignoreNullValues: [null, 'false']
nats-3: {env/trainer: {PIPELINERL_STREAM_REPLICAS: '3'}}
external-nats: {env/trainer: {PIPELINERL_STREAM_REPLICAS: '3'}}
external-nats-open:
  main/release-test: {args: python -m services.trainer.release_test --verifier=pipelinerl-verifier:50051
    --actor=pipelinerl-actor:8080 --closed=pipelinerl-trainer-0.pipelinerl-trainer:50051}
no-kubernetes-api: {pod/test: {spec: null}}
traces:
  env/actor, env/trainer, env/verifier:
    OTEL_EXPORTER_OTLP_HEADERS secretKeyRef: {name: otel-login, key: headers}
    OTEL_RESOURCE_ATTRIBUTES: k8s.namespace.name=train,k8s.pod.name=$(PIPELINERL_INSTANCE)
    OTEL_EXPORTER_OTLP_ENDPOINT: http://otel.observability:4318
    OTEL_TRACES_SAMPLER_ARG: '0.05'
""")
OF_CASES["two-nodes"]["main/trainer"] = {"startupProbe failureThreshold": (600 + RENDEZVOUS_TIMEOUT_S) / 5}
OF_VALUES: list[dict[str, Any]] = yaml.safe_load(r"""
- values: {gpu: {resource: amd.com/gpu, tolerations: &amd [{key: amd.com/gpu, operator: Exists}]}, actor: {tolerations: *amd}}
  pod/trainer spec, pod/actor spec: {tolerations: *amd}  # once
  main/trainer resources limits: {amd.com/gpu: 4}
- values: {actor: {image: {reference: registry.example.com/actor@sha256:0000}, strategy: {type: Recreate}}}
  main/actor: {image: registry.example.com/actor@sha256:0000}
  Deployment/pipelinerl-actor spec: {strategy: {type: Recreate}}
- values: {actor: {gpus: 0}, trainer: {gpus: 0}, images: {variant: cpu}, test: {transferPair: {enabled: true}}}
  main/transfer-test: {resources limits: {memory: 8Gi}, image: 'pipelinerl/trainer:0.1.0-cpu'}
- values:  # actors alone, which take part in the run of another release
    trainer: {enabled: false}
    nats: {enabled: false, url: 'tls://nats.example.com:4222', existingSecret: login, tlsSecret: nats-ca}
    recipe: {set: {weights: {backend: log, log: 's3://models/weights'}}}
    storage: {existingSecret: s3}
  pod/trainer, pod/nats, pod/release-test, pod/test: {spec: null}
  Role/pipelinerl-trainer, Service/pipelinerl-trainer, PersistentVolumeClaim/pipelinerl-trainer: {kind: null}
  env/actor: {PIPELINERL_REACHABLE: 'false', PIPELINERL_TRAINER: null, PIPELINERL_POD_UID: null}
  main/actor: {envFrom: [{secretRef: {name: s3}}]}
  main/verifier: {envFrom: null}
  pod/actor spec: {affinity: null}
- values: {storage: {existingSecret: s3}}
  env/actor: {PIPELINERL_REACHABLE: 'true'}
  main/actor: {envFrom: null}
- values:
    actor: {hostNetwork: true, schedulerName: volcano, scheduleAfterTrainer: false}
    trainer: {schedulerName: volcano, podDisruptionBudget: {maxUnavailable: 0}}
    verifier: {schedulerName: volcano}
    networkPolicy: {enabled: false}
  pod/actor spec: {hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet, schedulerName: volcano, affinity: null}
  PodDisruptionBudget/pipelinerl-trainer spec: {maxUnavailable: 0}
  pod/trainer spec, pod/verifier spec: {hostNetwork: null, schedulerName: volcano}
- values: {security: {runAsUser: null}}  # OpenShift gives each namespace uids of its own, and refuses others
  pod/actor spec, pod/trainer spec, pod/verifier spec, pod/nats spec, pod/test spec:
    securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  main/actor securityContext, main/trainer securityContext, main/verifier securityContext: {runAsUser: null, runAsGroup: null}
  main/nats securityContext, main/test securityContext: {runAsUser: null, runAsGroup: null}
- values: {actor: {capabilities: [IPC_LOCK]}, security: {runAsUser: 0}}
  pod/actor spec securityContext, pod/nats spec securityContext, pod/test spec securityContext: {fsGroup: 0, runAsUser: 0}
  main/actor securityContext: {runAsUser: 0, runAsNonRoot: false, capabilities: {drop: [ALL], add: [IPC_LOCK]}}
  main/trainer securityContext: &root {runAsUser: 0, runAsNonRoot: false, capabilities: {drop: [ALL]}}
  main/verifier securityContext, main/nats securityContext, main/test securityContext: *root
- values: {rewards: {files: {mine.py: 'def score(item): ...'}}, task: {files: {train.jsonl: '{}'}}}
  ConfigMap/pipelinerl-verifier-files: {data: {mine.py: 'def score(item): ...'}}
  ConfigMap/pipelinerl-trainer-files: {data: {train.jsonl: '{}'}}
  env/verifier: {PIPELINERL_REWARD_MODULES: /etc/pipelinerl/rewards, PYTHONPATH: null}  # the image's, or one's own, stays
  main/verifier: {volumeMounts * mountPath: [/etc/pipelinerl/recipe, /tmp, /etc/pipelinerl/rewards]}
- values: {verifier: {serviceAccount: {annotations: {example.com/role: pulls}}}}
  pod/validation spec: {serviceAccountName: pipelinerl-validation}
  ServiceAccount/pipelinerl-validation metadata annotations: {example.com/role: pulls, helm.sh/hook: 'pre-install,pre-upgrade'}
  pod/test spec: {serviceAccountName: pipelinerl-verifier}
- values: {verifier: {serviceAccount: {create: false, name: mine}}}
  pod/verifier spec, pod/validation spec, pod/test spec: {serviceAccountName: mine}
- values: {trainer: {persistence: {accessMode: ReadWriteOncePod, existingClaim: mine}}}  # which only the trainer can have
  pod/release-test spec: {volumes * persistentVolumeClaim: [null, null, null, null, null]}
  main/release-test:
    args: python -m services.trainer.release_test --no-volume --verifier=pipelinerl-verifier:50051
      --actor=pipelinerl-actor:8080 --actor-login=/etc/pipelinerl/nats/actor-credentials
      --closed=pipelinerl-trainer-0.pipelinerl-trainer:50051
- values: {networkPolicy: {hub: {cidrs: [0.0.0.0/0, '::/0', 10.0.0.0/8]}}}  # each address in the family that it is of
  NetworkPolicy/pipelinerl-actor spec:
    egress * to * ipBlock except:
      [[null, null], [null], [null], [null], [[169.254.169.254/32], ['fd00:ec2::254/128', 'fd20:ce::254/128'], null]]
- values: {nats: {exporter: {enabled: true}}, metrics: {podMonitor: {enabled: true}}, images: {registry: example.com}}
  pod/nats spec:
    containers * image: ['docker.io/library/nats:2.15.1-alpine', 'docker.io/natsio/prometheus-nats-exporter:0.17.3']
  PodMonitor/pipelinerl-nats spec: {podMetricsEndpoints * port: [metrics]}
  NetworkPolicy/pipelinerl-nats spec: {ingress * ports * port: [[client], [metrics]]}
- values:
    verifier: {maxEpisodes: 1000, autoscaling: {kind: hpa, targetEpisodes: 50}}
    recipe: {set: {task: {source: environment, name: 'a.b:C'}}}
    metrics: {podMonitor: {enabled: true}}
  HorizontalPodAutoscaler/pipelinerl-verifier spec:
    metrics * type: [Resource, External]
    metrics * external target averageValue: [null, '500']
    metrics * external metric name: [null, pipelinerl_verifier_episodes]
    metrics * external metric selector matchLabels: [null, {app_kubernetes_io_instance: pipelinerl}]
""")


def found(rendered: Rendered, place: str) -> Any:
    """The value at a place; None where there is none. `*` is a list's items, and arguments are joined. A place begins with an
    object (KIND/NAME), a pod of a component, its main container, or a variable of that."""
    start, *path = place.split(" ")
    kind, _, name = start.partition("/")
    if kind not in ("pod", "main", "env"):
        return functools.reduce(_step, path, rendered.find(kind, name))
    pod = next((pod for pod in rendered.pods if pod.component == name), None)
    if pod is None or kind == "pod":
        return functools.reduce(_step, path, pod and {"metadata": pod.metadata, "spec": pod.spec})
    if kind == "env":
        path = [path[0], *(["valueFrom", *path[1:]] if path[1:] else ["value"])]
    return functools.reduce(_step, path, environment(pod.main) if kind == "env" else pod.main)


def _step(value: Any, key: str) -> Any:
    """Lists of what `*` opened are gone through."""
    if isinstance(value, list):
        return value if key == "*" else [_step(item, key) for item in value]
    found = value.get(key) if isinstance(value, Mapping) else None
    return " ".join(found) if found and key == "args" else found


def assert_expected(rendered: Rendered, table: Mapping[str, dict[str, Any]]) -> None:
    for starts, wanted in table.items():
        for start in starts.split(", "):
            assert {path: found(rendered, f"{start} {path}") for path in wanted} == wanted, start


@pytest.mark.parametrize("case", OF_CASES)
def test_values_are_as_expected(case: str) -> None:
    assert_expected(rendered_case(case), OF_CASES[case])


@pytest.mark.parametrize("table", OF_VALUES, ids=lambda table: "-".join(table["values"]))
def test_these_values_lead_to(table: dict[str, Any]) -> None:
    assert_expected(render(table["values"]), {start: wanted for start, wanted in table.items() if start != "values"})


def test_autoscalers_ask_for_a_metric_that_exists_and_monitors_tell_releases_apart_by_it(rendered: Rendered) -> None:
    """The HPA's selector is a label that podTargetLabels puts on every sample."""
    for case, service, wanted in (("keda", "actor", "actor_replicas_wanted"), ("episodes", "verifier", "verifier_episodes")):
        trigger = found(rendered_case(case), f"ScaledObject/pipelinerl-{service} spec triggers")[-1]
        assert names_in(trigger["metadata"]["query"]) == {f"pipelinerl_{wanted}"} <= samples().keys()
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
