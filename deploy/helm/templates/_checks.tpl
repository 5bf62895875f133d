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
{{- $encrypts := or .Values.tls.grpc.enabled .Values.tls.nats.enabled -}}
{{- if and (not $encrypts) (or .Values.tls.certManager.enabled (.Values.tls.secrets | values | compact)) -}}
{{- include "pipelinerl.fail" "tls: certificates are given, and nothing is encrypted; set tls.grpc.enabled, tls.nats.enabled or both" -}}
{{- end -}}
{{- if and .Values.tracing.headersSecret (not .Values.tracing.endpoint) -}}
{{- include "pipelinerl.fail" (printf "tracing.headersSecret: %s is not used while tracing.endpoint is empty; set the endpoint of your collector" .Values.tracing.headersSecret) -}}
{{- end -}}
{{- $way := .Values.networkPolicy.tracing -}}
{{- if and .Values.tracing.endpoint .Values.networkPolicy.enabled $way.to -}}
{{- $address := regexReplaceAll "^https?://([^/]*).*$" .Values.tracing.endpoint "${1}" -}}
{{- $port := regexFind ":[0-9]+$" $address | trimPrefix ":" | default (or (hasPrefix "https:" .Values.tracing.endpoint) (eq .Values.tracing.protocol "grpc") | ternary "443" "80") -}}
{{- $open := list -}}
{{- range $way.ports -}}
{{- $open = append $open (int . | toString) -}}
{{- end -}}
{{- if not (has $port $open) -}}
{{- include "pipelinerl.fail" (printf "networkPolicy.tracing.ports: [%s] lacks port %s of tracing.endpoint = %s, so that no span would leave; add it, beside the port of the collector's pods where that is another" (join ", " $open) $port .Values.tracing.endpoint) -}}
{{- end -}}
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
