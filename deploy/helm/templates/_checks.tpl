{{/* Refuses values that contradict each other or would silently do nothing. Takes the root context and renders nothing. */}}
{{- define "pipelinerl.checks" -}}
{{- range $component := list "actor" "trainer" "verifier" "nats" "validation" "test" -}}
{{- include "pipelinerl.checkResources" (dict "at" $component "values" (index $.Values $component)) -}}
{{- end -}}
{{- range $component := list "actor" "trainer" -}}
{{- $values := index $.Values $component -}}
{{- $gpus := include (printf "pipelinerl.%s.gpus" $component) $ | int -}}
{{- $wanted := gt $gpus 0 | ternary "cuda" "cpu" -}}
{{- $user := $.Values.security.runAsUser -}}
{{- include "pipelinerl.refuse" (list
  (list (and (ne $.Values.images.variant $wanted) (not $values.image.reference))
    (printf "images.variant: %s does not fit %s.gpus = %d; set actor.gpus and trainer.gpus to %s, or images.variant to %s" $.Values.images.variant $component $gpus (eq $wanted "cuda" | ternary "0 (values-cpu.yaml)" "null") $wanted))
  (list (and $values.capabilities (or (kindIs "invalid" $user) (ne (int $user) 0)))
    (printf "%s.capabilities: [%s] have no effect for a process that is not root; set security.runAsUser to 0, or leave %s.capabilities empty and raise the nodes' limit of locked memory" $component (join ", " $values.capabilities) $component))
) -}}
{{- end -}}
{{- $accounts := dict -}}
{{- range $component := without (list "actor" "trainer" "verifier" "nats") (.Values.nats.enabled | ternary "" "nats") -}}
{{- $name := include "pipelinerl.serviceAccountName" (dict "root" $ "component" $component) -}}
{{- $other := get $accounts $name -}}
{{- $made := (index $.Values $component).serviceAccount.create -}}
{{- if and $other (or $made (index $.Values $other).serviceAccount.create) -}}
{{- include "pipelinerl.fail" (printf "%s.serviceAccount.name, %s.serviceAccount.name: both are %s, which the chart creates for one of the two; give each its own name" $other $component $name) -}}
{{- end -}}
{{- $_ := set $accounts $name $component -}}
{{- end -}}
{{- $way := .Values.networkPolicy.nats -}}
{{- if and (not .Values.nats.enabled) .Values.networkPolicy.enabled $way.cidrs (not .Values.networkPolicy.extraEgress) -}}
{{- range $url := splitList "," .Values.nats.url -}}
{{- $port := regexFind ":[0-9]+/?$" $url | trimAll ":/" | default "4222" -}}
{{- include "pipelinerl.checkPort" (dict "field" "networkPolicy.nats.ports" "ports" $way.ports "port" $port "of" (printf "nats.url = %s" $url)) -}}
{{- end -}}
{{- end -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- $trainer := dig "trainer" dict $recipe -}}
{{- $here := include "pipelinerl.trainer.gpus" . | int | default (include "pipelinerl.trainer.nproc" . | int) -}}
{{- $ranks := mul (int .Values.trainer.nodes) $here -}}
{{- range $name := list "context_parallel" "shard_ranks" -}}
{{- $share := dig $name 0 $trainer | int -}}
{{- if and $share (ne (mod $ranks $share) 0) -}}
{{- include "pipelinerl.fail" (printf "recipe.set.trainer.%s: %d does not divide the %d ranks of the trainer (trainer.nodes = %d, %d each); change it, trainer.nodes or trainer.gpus" $name $share $ranks (int $.Values.trainer.nodes) $here) -}}
{{- end -}}
{{- end -}}
{{- $actors := .Values.actor -}}
{{- $rolling := eq $actors.strategy.type "RollingUpdate" | ternary (default dict $actors.strategy.rollingUpdate) dict -}}
{{- $expected := int .Values.trainer.expectedActors -}}
{{- $scaler := or (and $actors.autoscaling.enabled "actor") (and .Values.verifier.autoscaling.enabled (ne .Values.verifier.autoscaling.kind "cpu") "verifier") -}}
{{- $policies := .Values.networkPolicy -}}
{{- $hasEpisodes := include "pipelinerl.hasEpisodes" . -}}
{{- $judges := include "pipelinerl.judges" $recipe -}}
{{- $api := .Values.kubernetesApi.enabled | ternary $policies.kubernetesApi dict -}}
{{- $networks := and (has "443" (join " " $api.ports | splitList " ")) (regexReplaceAll "[0-9.]+/32|[^ ]+/128" (join " " $api.cidrs) "" | trim) -}}
{{- $store := and (not $networks) (include "pipelinerl.storeWithoutRule" .) -}}
{{- include "pipelinerl.refuse" (list
  (list (dig "actor" "colocate" false $recipe)
    "recipe.set.actor.colocate: true is for a trainer and an actor on one GPU of one machine (pipelinerl run); set it to false")
  (list (and .Values.nats.enabled .Values.nats.url)
    (printf "nats.url: %s is not used while nats.enabled is true; set nats.enabled to false, or leave the url empty" .Values.nats.url))
  (list (and .Values.nats.enabled .Values.nats.tlsSecret)
    (printf "nats.tlsSecret: %s is not used while nats.enabled is true; set tls.nats.enabled and tls.secrets.nats for the chart's own NATS" .Values.nats.tlsSecret))
  (list (and .Values.tls.nats.enabled (not .Values.nats.enabled))
    "tls.nats.enabled: encrypts only the chart's own NATS, but nats.enabled is false; for your own NATS, write tls:// in nats.url and name its CA in nats.tlsSecret")
  (list (and (not .Values.tls.grpc.enabled) (not .Values.tls.nats.enabled) (or .Values.tls.certManager.enabled (.Values.tls.secrets | values | compact)))
    "tls: certificates are given, but nothing is encrypted; set tls.grpc.enabled, tls.nats.enabled or both")
  (list (and .Values.tracing.headersSecret (not .Values.tracing.endpoint))
    (printf "tracing.headersSecret: %s is not used while tracing.endpoint is empty; set the endpoint of your collector" .Values.tracing.headersSecret))
  (list (and .Values.huggingface.token .Values.huggingface.existingSecret)
    "huggingface.token: huggingface.existingSecret is set, too; keep only one of them")
  (list (and $actors.scheduleAfterTrainer (dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $actors.affinity))
    "actor.affinity: a required podAffinity cannot be combined with actor.scheduleAfterTrainer, because the scheduler wants one pod that matches all required terms; make yours preferred, or set actor.scheduleAfterTrainer to false")
  (list (and $actors.autoscaling.enabled (gt $expected (int $actors.autoscaling.minReplicas)))
    (printf "trainer.expectedActors: %d is more than actor.autoscaling.minReplicas = %d, but the autoscaler adds no actors before the first step; make them equal" $expected (int $actors.autoscaling.minReplicas)))
  (list (and (not $actors.autoscaling.enabled) $actors.replicas (gt $expected (int $actors.replicas)))
    (printf "trainer.expectedActors: %d is more than actor.replicas = %d, so that the first step would wait for ever; make them equal" $expected (int $actors.replicas)))
  (list (and (dig "maxSurge" "25%" $rolling | toString | regexMatch "^0+%?$") (dig "maxUnavailable" "25%" $rolling | toString | regexMatch "^0+%?$"))
    "actor.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0, so that no pod could ever be replaced, which Kubernetes refuses; raise one of them")
  (list (and $scaler (not .Values.metrics.podMonitor.enabled) (not .Values.metrics.scrapedOtherwise))
    (printf "metrics.podMonitor.enabled: is false, so that nothing would collect the metric that %s.autoscaling follows; set it to true, or metrics.scrapedOtherwise if your Prometheus finds the pods without PodMonitors" (toString $scaler)))
  (list (and .Values.verifier.autoscaling.enabled (ne .Values.verifier.autoscaling.kind "cpu") (not $hasEpisodes))
    (printf "verifier.autoscaling.kind: %s scales on episodes, and the recipe has none; set it to cpu" .Values.verifier.autoscaling.kind))
) -}}
{{- range $policies.enabled | ternary (list
  (list (and $scaler (not $policies.monitoring.from)) "networkPolicy.monitoring.from"
    (printf "no Prometheus could collect the metric that %v.autoscaling follows; name its peers" $scaler))
  (list (and .Values.trainer.page.ingress.enabled (not .Values.trainer.page.ingress.from)) "trainer.page.ingress.from" "no Ingress controller would reach the page; name its pods")
  (list (not $policies.dns.to) "networkPolicy.dns.to" "no pod could resolve a name; name the pods or addresses that answer DNS")
  (list (and $judges (not $policies.verifierEgress)) "networkPolicy.verifierEgress"
    (printf "no verifier would reach the recipe's judge (%s); add a rule to its address" $judges))
  (list $store "networkPolicy.extraEgress"
    (printf "the trainer would not reach %v while networkPolicy.hub.enabled is false; add a rule to the store's address" $store))
) list -}}
{{- include "pipelinerl.refuse" (list (list (first .) (printf "%s: is empty, so that %s (also if a policy of your own already allows this)" (index . 1) (last .)))) -}}
{{- end -}}
{{- $way = .Values.networkPolicy.tracing -}}
{{- if and .Values.tracing.endpoint .Values.networkPolicy.enabled $way.to -}}
{{- $address := regexReplaceAll "^https?://([^/]*).*$" .Values.tracing.endpoint "${1}" -}}
{{- $port := regexFind ":[0-9]+$" $address | trimPrefix ":" | default (or (hasPrefix "https:" .Values.tracing.endpoint) (eq .Values.tracing.protocol "grpc") | ternary "443" "80") -}}
{{- include "pipelinerl.checkPort" (dict "field" "networkPolicy.tracing.ports" "ports" $way.ports "port" $port "of" (printf "tracing.endpoint = %s" .Values.tracing.endpoint)) -}}
{{- end -}}
{{- if $hasEpisodes -}}
{{- $pods := .Values.verifier.autoscaling.enabled | ternary .Values.verifier.autoscaling.maxReplicas .Values.verifier.replicas -}}
{{- $room := mul (int $pods) (int .Values.verifier.maxEpisodes) -}}
{{- $wanted := include "pipelinerl.actor.episodes" . | int -}}
{{- if and (not (kindIs "invalid" $pods)) (lt (int $room) $wanted) -}}
{{- include "pipelinerl.fail" (printf "verifier.maxEpisodes: %d pods with %d episodes each cannot run the %d that the actors keep in progress; raise it or the number of pods, or set recipe.set.actor.episodes_in_progress" (int $pods) (int .Values.verifier.maxEpisodes) $wanted) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes a list of (condition, message) and fails with the first message whose condition holds. */}}
{{- define "pipelinerl.refuse" -}}
{{- range . -}}{{- if first . -}}{{- include "pipelinerl.fail" (last .) -}}{{- end -}}{{- end -}}
{{- end -}}

{{/* dict at, values: checks that no limit is less than its request, which Kubernetes would refuse only during the install. */}}
{{- define "pipelinerl.checkResources" -}}
{{- range $name, $part := .values -}}
{{- $at := printf "%s.%s" $.at $name -}}
{{- if kindIs "map" $part -}}
{{- range $resource, $limit := hasSuffix "resources" (lower $name) | ternary $part.limits nil -}}
{{- $request := get (default dict $part.requests) $resource -}}
{{- if and $request (gt (include "pipelinerl.quantity" $request | float64) (include "pipelinerl.quantity" $limit | float64)) -}}
{{- include "pipelinerl.fail" (printf "%s.limits.%s: %v is less than %s.requests.%s = %v, which Kubernetes refuses; raise the limit, or lower the request" $at $resource $limit $at $resource $request) -}}
{{- end -}}
{{- end -}}
{{- include "pipelinerl.checkResources" (dict "at" $at "values" $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes (24Gi, 500m) as a number. */}}
{{- define "pipelinerl.quantity" -}}
{{- $unit := toString . | regexFind "[A-Za-z]+$" -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (toString . | trimSuffix $unit | float64) (get $factors $unit) -}}
{{- end -}}

{{/* dict field, ports, port (text), of: checks that a policy's ports contain the port of an address. */}}
{{- define "pipelinerl.checkPort" -}}
{{- $open := join " " .ports | splitList " " -}}
{{- if not (has .port $open) -}}
{{- include "pipelinerl.fail" (printf "%s: [%s] lacks port %s of %s, so that nothing could reach it; add this port and, if a Service maps it to another, also the port of the pods" .field (join ", " $open) .port .of) -}}
{{- end -}}
{{- end -}}
