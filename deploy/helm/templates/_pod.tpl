{{/* Parts of a pod that several services share. */}}

{{/* The root context: pod-level security by the `restricted` Pod Security Standard. Claims become writable through the group. */}}
{{- define "pipelinerl.podSecurityContext" -}}
{{ include "pipelinerl.runAs" . }}
{{- if not (kindIs "invalid" .Values.security.runAsUser) }}
fsGroup: {{ int .Values.security.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The root context. */}}
{{- define "pipelinerl.runAs" -}}
{{- $user := .Values.security.runAsUser -}}
runAsNonRoot: {{ or (kindIs "invalid" $user) (gt (int $user) 0) }}
{{- if not (kindIs "invalid" $user) }}
runAsUser: {{ int $user }}
runAsGroup: {{ int $user }}
{{- end }}
{{- end -}}

{{/* dict root, optional component. */}}
{{- define "pipelinerl.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{ include "pipelinerl.runAs" .root }}
capabilities:
  drop: [ALL]
  {{- with and .component (index .root.Values .component).capabilities }}
  add: {{ toYaml . | nindent 4 }}
  {{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* dict root, component: scheduling of its pods. A spread constraint without a selector gets the service's own; pods with GPUs go where
     GPU nodes are tainted as is the custom (gpu.tolerations). An actor has an affinity to the trainer's last pod in a topology that
     is one domain, since all nodes have the same operating system: it is scheduled after that pod, wherever that is. Otherwise
     actors spread over nodes of which the trainer needs one for itself, and wait for it for ever. There is a single term, because
     the scheduler wants one existing pod that matches all required terms. */}}
{{- define "pipelinerl.scheduling" -}}
{{- $values := index .root.Values .component -}}
{{- $spec := dict -}}
{{- with .root.Values.images.pullSecrets -}}{{- $_ := set $spec "imagePullSecrets" . -}}{{- end -}}
{{- $tolerations := $values.tolerations -}}
{{- if and (has .component (list "actor" "trainer")) (gt (include (printf "pipelinerl.%s.gpus" .component) .root | int) 0) -}}
{{- $tolerations = concat (default list .root.Values.gpu.tolerations) (default list $tolerations) | uniq -}}
{{- end -}}
{{- with $tolerations -}}{{- $_ := set $spec "tolerations" . -}}{{- end -}}
{{- range $key := list "nodeSelector" "affinity" "runtimeClassName" "priorityClassName" "schedulerName" -}}
{{- with index $values $key -}}{{- $_ := set $spec $key . -}}{{- end -}}
{{- end -}}
{{- if and (eq .component "actor") .root.Values.trainer.enabled $values.scheduleAfterTrainer -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $trainer := include "pipelinerl.selectorLabels" (dict "root" .root "component" "trainer") | fromYaml -}}
{{- $_ := set $trainer "apps.kubernetes.io/pod-index" (sub (int .root.Values.trainer.nodes) 1 | toString) -}}
{{- $term := dict "topologyKey" "kubernetes.io/os" "labelSelector" (dict "matchLabels" $trainer) -}}
{{- $_ := set $spec "affinity" (mergeOverwrite (default dict $values.affinity | deepCopy) (dict "podAffinity" (dict $required (list $term)))) -}}
{{- end -}}
{{- $spread := list -}}
{{- range $values.topologySpreadConstraints -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "pipelinerl.selectorLabels" $ | fromYaml)) -}}
{{- $spread = append $spread (hasKey . "labelSelector" | ternary . (merge $own .)) -}}
{{- end -}}
{{- with $spread -}}{{- $_ := set $spec "topologySpreadConstraints" . -}}{{- end -}}
{{- with $spec -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* dict root, component: metadata of its pods. */}}
{{- define "pipelinerl.podMetadata" -}}
{{- $group := include "pipelinerl.podGroup" . | fromYaml -}}
labels: {{- merge (default dict $group.labels) (include "pipelinerl.podLabels" . | fromYaml) | toYaml | nindent 2 }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  checksum/recipe: {{ include "pipelinerl.recipe" .root | sha256sum }}
  {{- with include "pipelinerl.files" . }}
  checksum/files: {{ sha256sum . }}
  {{- end }}
  {{- with $group.annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with (index .root.Values .component).podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* dict root, component: labels and annotations that put its pods into Kueue's group. The last annotation lets Kueue hold pods of a
     Deployment or StatefulSet. Without the last but one, Kueue would give away the place of a pod that ends. */}}
{{- define "pipelinerl.podGroup" -}}
{{- with .root.Values.kueue.queue -}}
{{- if has $.component (list "actor" "trainer") -}}
labels:
  kueue.x-k8s.io/queue-name: {{ . | quote }}
  kueue.x-k8s.io/pod-group-name: {{ include "pipelinerl.fullname" $.root | quote }}
annotations:
  kueue.x-k8s.io/pod-group-total-count: {{ add (int $.root.Values.trainer.nodes) (int $.root.Values.trainer.expectedActors) | quote }}
  kueue.x-k8s.io/pod-group-serving: "true"
  kueue.x-k8s.io/pod-suspending-parent: pipelinerl
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict root, component: the beginning of its pods' spec. Only the trainer has a token for the API. */}}
{{- define "pipelinerl.podSpec" -}}
{{- $values := index .root.Values .component -}}
serviceAccountName: {{ include "pipelinerl.serviceAccountName" . | quote }}
automountServiceAccountToken: {{ and (eq .component "trainer") .root.Values.kubernetesApi.enabled }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int $values.terminationGracePeriodSeconds }}
securityContext: {{- include "pipelinerl.podSecurityContext" .root | nindent 2 }}
{{- if $values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $values.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "pipelinerl.scheduling" . }}
{{ . }}
{{- end }}
{{- $builds := and (has .component (list "actor" "trainer")) (include "pipelinerl.buildsModel" .root) }}
{{- if or $values.extraInitContainers $builds }}
initContainers:
  {{- with $values.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $builds }}
  - name: initial-model
    args: [python, -m, services.{{ .component }}.initial_model]
    {{- include "pipelinerl.container" . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* dict root, component (actor, trainer, verifier): what its containers have in common. */}}
{{- define "pipelinerl.container" -}}
{{- $values := index .root.Values .component -}}
{{- $isVerifier := eq .component "verifier" -}}
{{- $gpus := 0 -}}
{{- if not $isVerifier -}}{{- $gpus = include (printf "pipelinerl.%s.gpus" .component) .root -}}{{- end -}}
image: {{ include "pipelinerl.image" . | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext: {{- include "pipelinerl.containerSecurityContext" . | nindent 2 }}
env: {{- include "pipelinerl.environment" (dict "own" (include (printf "pipelinerl.%s.env" .component) .) "extra" $values.extraEnv) | nindent 2 }}
{{- $usesStore := or (eq .component "trainer") (and (eq .component "actor") (include "pipelinerl.actorsReadStore" .root)) }}
{{- with and $usesStore .root.Values.storage.existingSecret }}
envFrom: [{secretRef: {name: {{ . | quote }}}}]
{{- end }}
resources: {{- include "pipelinerl.resources" (dict "root" .root "values" $values "gpus" $gpus) | nindent 2 }}
volumeMounts: {{- include (printf "pipelinerl.%s" ($isVerifier | ternary "mounts" "policyMounts")) . | nindent 2 }}
{{- end -}}

{{/* dict root, values, optional gpus: requests and limits, with defaultLimits, GPUs (or their claims) and RDMA devices added. */}}
{{- define "pipelinerl.resources" -}}
{{- $devices := dict -}}
{{- if and (gt (int .gpus) 0) (not .values.resourceClaims) -}}
{{- $_ := set $devices .root.Values.gpu.resource (int .gpus) -}}
{{- end -}}
{{- $devices = mergeOverwrite $devices (default dict .values.rdma) -}}
{{- $resources := default dict .values.resources | deepCopy -}}
{{- with .root.Values.defaultLimits -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) .) -}}
{{- end -}}
{{- if $devices -}}
{{- $resources = mergeOverwrite (dict "limits" (dict) "requests" (dict)) $resources (dict "limits" $devices "requests" $devices) -}}
{{- end -}}
{{- range .values.resourceClaims -}}
{{- $_ := set $resources "claims" (append (default list $resources.claims) (pick . "name") | uniq) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Probes of a service: /healthz shows that its loop runs, /readyz that it does its work. Takes the seconds within which the server must answer. */}}
{{- define "pipelinerl.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int .) 5) }}
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* dict own (YAML list), extra (list): a container's environment. Variables in `extra` replace those in `own`. */}}
{{- define "pipelinerl.environment" -}}
{{- $names := list -}}
{{- range .extra -}}{{- $names = append $names .name -}}{{- end -}}
{{- $kept := list -}}
{{- range .own | fromYamlArray -}}
{{- if not (has .name $names) -}}{{- $kept = append $kept . -}}{{- end -}}
{{- end -}}
{{- concat $kept (default list .extra) | toYaml -}}
{{- end -}}

{{/* dict root, component: environment that every service reads. */}}
{{- define "pipelinerl.env" -}}
- {name: PIPELINERL_RUN, value: {{ include "pipelinerl.run" .root | quote }}}
- {name: PIPELINERL_RECIPE, value: /etc/pipelinerl/recipe/recipe.yaml}
- name: PIPELINERL_INSTANCE
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: PIPELINERL_GRPC_HOST, value: {{ .root.Values.network.bindHost | quote }}}
- {name: PIPELINERL_GRPC_PORT, value: "50051"}
- {name: PIPELINERL_HTTP_HOST, value: {{ .root.Values.network.bindHost | quote }}}
- {name: PIPELINERL_HTTP_PORT, value: "8080"}
- name: PIPELINERL_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: PIPELINERL_LOG_FORMAT, value: {{ .root.Values.log.format }}}
- {name: PIPELINERL_LOG_LEVEL, value: {{ .root.Values.log.level }}}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ .protocol }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .ratio | quote }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(PIPELINERL_INSTANCE)"}
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.root.Values.tracing.headersKey | quote }}}}
{{- end }}
{{- end }}
{{- end }}
{{- if .root.Values.tls.grpc.enabled }}
- {name: PIPELINERL_TLS_DIR, value: /etc/pipelinerl/tls}
{{- end }}
{{- end -}}

{{/* Further environment of the actor and the trainer. */}}
{{- define "pipelinerl.policyEnv" -}}
{{- $values := index .root.Values .component -}}
- {name: PIPELINERL_NATS_URL, value: {{ include "pipelinerl.nats.url" .root | quote }}}
{{- if include "pipelinerl.nats.authSecret" .root }}
- {name: PIPELINERL_NATS_CREDENTIALS, value: /etc/pipelinerl/nats/credentials}
{{- end }}
{{- if include "pipelinerl.nats.caSecret" .root }}
- {name: PIPELINERL_NATS_TLS_DIR, value: /etc/pipelinerl/nats-tls}
{{- end }}
- {name: PIPELINERL_MODEL_CACHE, value: /var/lib/pipelinerl/models}
- {name: HF_HOME, value: /var/lib/pipelinerl/huggingface}
{{- with include "pipelinerl.huggingface.secret" .root }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.root.Values.huggingface.key | quote }}}}
{{- end }}
- {name: HOME, value: /tmp}
- {name: USER, value: pipelinerl}
- {name: TMPDIR, value: /tmp}
- {name: XDG_CACHE_HOME, value: {{ eq .component "trainer" | ternary "/var/lib/pipelinerl/cache" "/tmp/cache" }}}
{{- with $values.threads }}
- {name: OMP_NUM_THREADS, value: {{ . | int | quote }}}
- {name: MKL_NUM_THREADS, value: {{ . | int | quote }}}
{{- end }}
{{- include "pipelinerl.networkEnv" .root }}
{{- end -}}

{{/* The root context: variables for torch, NCCL and Gloo, each after a line break. */}}
{{- define "pipelinerl.networkEnv" }}
# Otherwise torch logs two lines each time it looks for a missing pod, ten times a second.
- {name: TORCH_CPP_LOG_LEVEL, value: ERROR}
{{- with .Values.network.interface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ . | quote }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ . | quote }}}
{{- end }}
{{- with .Values.network.infinibandDevices }}
- {name: NCCL_IB_HCA, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* dict root, component: mounts of the read-only configuration and of /tmp. */}}
{{- define "pipelinerl.mounts" -}}
- {name: recipe, mountPath: /etc/pipelinerl/recipe, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.grpc.enabled }}
- {name: tls, mountPath: /etc/pipelinerl/tls, readOnly: true}
{{- end }}
{{- with include "pipelinerl.files" . }}
- {name: files, mountPath: {{ eq $.component "verifier" | ternary "/etc/pipelinerl/rewards" "/etc/pipelinerl/task" }}, readOnly: true}
{{- end }}
{{- with (index .root.Values .component).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict root, component: files of the values that its pods see, as JSON: modules with rewards, or problems. Nothing if there are none. */}}
{{- define "pipelinerl.files" -}}
{{- with dict "verifier" .root.Values.rewards.files "trainer" .root.Values.task.files | dig .component dict -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{- define "pipelinerl.volumes" -}}
- name: recipe
  configMap: {name: {{ include "pipelinerl.fullname" .root }}-recipe}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.grpc.enabled }}
- name: tls
  secret: {secretName: {{ include "pipelinerl.tls.secret" . | quote }}}
{{- end }}
{{- with include "pipelinerl.files" . }}
- name: files
  configMap: {name: {{ include "pipelinerl.fullname" $.root }}-{{ $.component }}-files}
{{- end }}
{{- with (index .root.Values .component).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All mounts of the actor and the trainer. Only they have the login and the CA of NATS, and shared memory. */}}
{{- define "pipelinerl.policyMounts" -}}
- {name: data, mountPath: /var/lib/pipelinerl}
- {name: shm, mountPath: /dev/shm}
{{- if include "pipelinerl.nats.authSecret" .root }}
- {name: nats-credentials, mountPath: /etc/pipelinerl/nats, readOnly: true}
{{- end }}
{{- if include "pipelinerl.nats.caSecret" .root }}
- {name: nats-tls, mountPath: /etc/pipelinerl/nats-tls, readOnly: true}
{{- end }}
{{ include "pipelinerl.mounts" . }}
{{- end -}}

{{/* dict root, component, tests. With tests, the actors' login is included, too. */}}
{{- define "pipelinerl.policyVolumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index .root.Values .component).sharedMemory }}}
{{- with include "pipelinerl.nats.authSecret" .root }}
- name: nats-credentials
  secret:
    secretName: {{ . | quote }}
    items:
      - {key: {{ $.component }}-credentials, path: credentials}
      {{- if $.tests }}
      - {key: actor-credentials, path: actor-credentials}
      {{- end }}
{{- end }}
{{- with include "pipelinerl.nats.caSecret" .root }}
- name: nats-tls
  secret:
    secretName: {{ . | quote }}
{{- if $.root.Values.nats.enabled }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
{{- end -}}

{{/* Name of the Secret with the Hugging Face token, or nothing. */}}
{{- define "pipelinerl.huggingface.secret" -}}
{{- $own := printf "%s-huggingface" (include "pipelinerl.fullname" .) -}}
{{- default (.Values.huggingface.token | empty | ternary "" $own) .Values.huggingface.existingSecret -}}
{{- end -}}
