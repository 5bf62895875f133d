{{/* Values that contradict each other, or would silently do nothing. The root context; renders nothing. */}}
{{- define "pipelinerl.checks" -}}
{{- range $component := list "actor" "trainer" -}}
{{- $gpus := include (printf "pipelinerl.%s.gpus" $component) $ | int -}}
{{- if and (eq $.Values.images.variant "cpu") (gt $gpus 0) (not (index $.Values $component).image.reference) -}}
{{- include "pipelinerl.fail" (printf "images.variant: cpu has no use for %s.gpus = %d; set actor.gpus and trainer.gpus to 0 (values-cpu.yaml), or images.variant to cuda" $component $gpus) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.nats.enabled .Values.nats.url -}}
{{- include "pipelinerl.fail" (printf "nats.url: %s is not used while nats.enabled is true; set nats.enabled to false, or leave the url empty" .Values.nats.url) -}}
{{- end -}}
{{- $way := .Values.networkPolicy.nats -}}
{{- if and (not .Values.nats.enabled) .Values.networkPolicy.enabled $way.cidrs (not .Values.networkPolicy.extraEgress) -}}
{{- range $url := splitList "," .Values.nats.url -}}
{{- $port := regexFind ":[0-9]+/?$" $url | trimAll ":/" | default "4222" -}}
{{- include "pipelinerl.checkPort" (dict "field" "networkPolicy.nats.ports" "ports" $way.ports "port" $port "of" (printf "nats.url = %s" $url)) -}}
{{- end -}}
{{- end -}}
{{- $trainer := dig "trainer" dict (include "pipelinerl.recipe" . | fromYaml) -}}
{{- $here := include "pipelinerl.trainer.gpus" . | int | default (dig "nproc" 1 $trainer | int) -}}
{{- $ranks := mul (int .Values.trainer.nodes) $here -}}
{{- range $name := list "context_parallel" "shard_ranks" -}}
{{- $share := dig $name 0 $trainer | int -}}
{{- if and $share (ne (mod $ranks $share) 0) -}}
{{- include "pipelinerl.fail" (printf "recipe.set.trainer.%s: %d does not divide the %d ranks of the trainer (trainer.nodes = %d, %d each); change it, trainer.nodes or trainer.gpus" $name $share $ranks (int $.Values.trainer.nodes) $here) -}}
{{- end -}}
{{- end -}}
{{- $actors := .Values.actor -}}
{{- $expected := int .Values.trainer.expectedActors -}}
{{- if and $actors.autoscaling.enabled (gt $expected (int $actors.autoscaling.minReplicas)) -}}
{{- include "pipelinerl.fail" (printf "trainer.expectedActors: %d is more than actor.autoscaling.minReplicas = %d, and the autoscaler adds none before the first step; make them equal" $expected (int $actors.autoscaling.minReplicas)) -}}
{{- else if and (not $actors.autoscaling.enabled) $actors.replicas (gt $expected (int $actors.replicas)) -}}
{{- include "pipelinerl.fail" (printf "trainer.expectedActors: %d is more than actor.replicas = %d, so that the first step would wait for ever; make them equal" $expected (int $actors.replicas)) -}}
{{- end -}}
{{- $scaled := list -}}
{{- if $actors.autoscaling.enabled -}}{{- $scaled = append $scaled "actor" -}}{{- end -}}
{{- if and .Values.verifier.autoscaling.enabled (ne .Values.verifier.autoscaling.kind "cpu") -}}{{- $scaled = append $scaled "verifier" -}}{{- end -}}
{{- if and $scaled (not .Values.metrics.podMonitor.enabled) (not .Values.metrics.scrapedOtherwise) -}}
{{- include "pipelinerl.fail" (printf "metrics.podMonitor.enabled: is false, and %s.autoscaling follows a metric that nobody would collect; set it, or metrics.scrapedOtherwise where your Prometheus finds the pods without" (first $scaled)) -}}
{{- end -}}
{{- range $component := list "actor" "trainer" -}}
{{- $capabilities := (index $.Values $component).capabilities -}}
{{- if and $capabilities (or (kindIs "invalid" $.Values.security.runAsUser) (ne (int $.Values.security.runAsUser) 0)) -}}
{{- include "pipelinerl.fail" (printf "%s.capabilities: [%s] have no effect for a process that is not root; set security.runAsUser to 0, or leave it empty and raise the nodes' limit of locked memory" $component (join ", " $capabilities)) -}}
{{- end -}}
{{- end -}}
{{- $encrypts := or .Values.tls.grpc.enabled .Values.tls.nats.enabled -}}
{{- if and (not $encrypts) (or .Values.tls.certManager.enabled (.Values.tls.secrets | values | compact)) -}}
{{- include "pipelinerl.fail" "tls: certificates are given, and nothing is encrypted; set tls.grpc.enabled, tls.nats.enabled or both" -}}
{{- end -}}
{{- if and .Values.tracing.headersSecret (not .Values.tracing.endpoint) -}}
{{- include "pipelinerl.fail" (printf "tracing.headersSecret: %s is not used while tracing.endpoint is empty; set the endpoint of your collector" .Values.tracing.headersSecret) -}}
{{- end -}}
{{- $way = .Values.networkPolicy.tracing -}}
{{- if and .Values.tracing.endpoint .Values.networkPolicy.enabled $way.to -}}
{{- $address := regexReplaceAll "^https?://([^/]*).*$" .Values.tracing.endpoint "${1}" -}}
{{- $port := regexFind ":[0-9]+$" $address | trimPrefix ":" | default (or (hasPrefix "https:" .Values.tracing.endpoint) (eq .Values.tracing.protocol "grpc") | ternary "443" "80") -}}
{{- include "pipelinerl.checkPort" (dict "field" "networkPolicy.tracing.ports" "ports" $way.ports "port" $port "of" (printf "tracing.endpoint = %s" .Values.tracing.endpoint)) -}}
{{- end -}}
{{- if include "pipelinerl.hasEpisodes" . -}}
{{- $pods := .Values.verifier.autoscaling.enabled | ternary .Values.verifier.autoscaling.maxReplicas .Values.verifier.replicas -}}
{{- $room := mul (int $pods) (int .Values.verifier.maxEpisodes) -}}
{{- $wanted := include "pipelinerl.actor.episodes" . | int -}}
{{- if and (not (kindIs "invalid" $pods)) (lt (int $room) $wanted) -}}
{{- include "pipelinerl.fail" (printf "verifier.maxEpisodes: %d pods with %d episodes each are fewer than the %d that the actors keep under way; raise it or the number of pods, or set recipe.set.actor.episodes_in_progress" (int $pods) (int .Values.verifier.maxEpisodes) $wanted) -}}
{{- end -}}
{{- else if and .Values.verifier.autoscaling.enabled (ne .Values.verifier.autoscaling.kind "cpu") -}}
{{- include "pipelinerl.fail" (printf "verifier.autoscaling.kind: %s scales on episodes, and the recipe has none; set it to cpu" .Values.verifier.autoscaling.kind) -}}
{{- end -}}
{{- if and .Values.huggingface.token .Values.huggingface.existingSecret -}}
{{- include "pipelinerl.fail" "huggingface.token: huggingface.existingSecret is set too; keep one of them" -}}
{{- end -}}
{{- end -}}

{{/* dict field, ports, port (text), of: a policy's ports hold that of an address. */}}
{{- define "pipelinerl.checkPort" -}}
{{- $open := list -}}
{{- range .ports -}}{{- $open = append $open (int . | toString) -}}{{- end -}}
{{- if not (has .port $open) -}}
{{- include "pipelinerl.fail" (printf "%s: [%s] lacks port %s of %s, so that nothing would get there; add it, beside the port of the pods where a Service maps it to another" .field (join ", " $open) .port .of) -}}
{{- end -}}
{{- end -}}
