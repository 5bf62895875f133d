{{/* Refuses values that contradict each other or would silently do nothing. Takes the root context and renders nothing. The Job of
     validation.yaml makes the checks that need arithmetic (pipelinerl/kube/checks.py). */}}
{{- define "pipelinerl.checks" -}}
{{- $v := .Values -}}
{{- range $component := list "actor" "trainer" -}}
{{- $values := index $v $component -}}
{{- $gpus := include (printf "pipelinerl.%s.gpus" $component) $ | int -}}
{{- $wanted := gt $gpus 0 | ternary "cuda" "cpu" -}}
{{- $fit := eq $wanted "cuda" | ternary "0 (values-cpu.yaml)" "null" -}}
{{- $isRoot := and (not (kindIs "invalid" $v.security.runAsUser)) (eq (int $v.security.runAsUser) 0) -}}
{{- include "pipelinerl.refuse" (list
  (list (and (ne $v.images.variant $wanted) (not $values.image.reference)) (printf (print "images.variant: %s does not fit %s.gpus = %d; "
    "set actor.gpus and trainer.gpus to %s, or images.variant to %s") $v.images.variant $component $gpus $fit $wanted))
  (list (and $values.capabilities (not $isRoot)) (printf (print "%s.capabilities: [%s] have no effect for a process that is not root; "
    "set security.runAsUser to 0, or leave this empty and raise the nodes' limit of locked memory") $component (join ", " $values.capabilities)))
) -}}
{{- end -}}
{{- range $component := list "actor" "verifier" -}}
{{- with (index $v $component).autoscaling -}}
{{- include "pipelinerl.refuse" (list (list (and .enabled (lt (int .maxReplicas) (int .minReplicas))) (printf (print "%s.autoscaling."
  "maxReplicas: %d is less than minReplicas = %d; raise it, or lower minReplicas") $component (int .maxReplicas) (int .minReplicas)))) -}}
{{- end -}}
{{- end -}}
{{- $accounts := dict -}}
{{- range $component := without (list "actor" "trainer" "verifier" "nats") ($v.nats.enabled | ternary "" "nats") -}}
{{- $name := include "pipelinerl.serviceAccountName" (dict "root" $ "component" $component) -}}
{{- $other := get $accounts $name -}}
{{- if and $other (or (index $v $component).serviceAccount.create (index $v $other).serviceAccount.create) -}}
{{- include "pipelinerl.fail" (printf (print "%s.serviceAccount.name, %s.serviceAccount.name: both are %s, which the chart creates "
  "for one of the two; give each its own name") $other $component $name) -}}
{{- end -}}
{{- $_ := set $accounts $name $component -}}
{{- end -}}
{{- $episodic := and $v.verifier.autoscaling.enabled (ne $v.verifier.autoscaling.kind "cpu") -}}
{{- $scaler := or (and $v.actor.autoscaling.enabled "actor") (and $episodic "verifier") -}}
{{- $own := " (also if a policy of your own already allows this)" -}}
{{- include "pipelinerl.refuse" (list
  (list (and $v.nats.enabled $v.nats.url)
    (printf "nats.url: %s is not used while nats.enabled is true; set nats.enabled to false, or leave the url empty" $v.nats.url))
  (list (and $v.nats.enabled $v.nats.tlsSecret) (printf (print "nats.tlsSecret: %s is not used while nats.enabled is true; "
    "set tls.nats.enabled and tls.secrets.nats for the chart's own NATS") $v.nats.tlsSecret))
  (list (and $v.tls.nats.enabled (not $v.nats.enabled)) (print "tls.nats.enabled: encrypts only the chart's own NATS, but nats.enabled "
    "is false; for your own NATS, write tls:// in nats.url and name its CA in nats.tlsSecret"))
  (list (and (not $v.tls.grpc.enabled) (not $v.tls.nats.enabled) (or $v.tls.certManager.enabled ($v.tls.secrets | values | compact)))
    "tls: certificates are given, but nothing is encrypted; set tls.grpc.enabled, tls.nats.enabled or both")
  (list (and $v.tracing.headersSecret (not $v.tracing.endpoint)) (printf
    "tracing.headersSecret: %s is not used while tracing.endpoint is empty; set the endpoint of your collector" $v.tracing.headersSecret))
  (list (and $v.huggingface.token $v.huggingface.existingSecret)
    "huggingface.token: huggingface.existingSecret is set, too; keep only one of them")
  (list (and $v.actor.scheduleAfterTrainer (dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $v.actor.affinity))
    (print "actor.affinity: a required podAffinity cannot be combined with actor.scheduleAfterTrainer, because the scheduler wants one "
      "pod that matches all required terms; make yours preferred, or set actor.scheduleAfterTrainer to false"))
  (list (and $scaler (not $v.metrics.podMonitor.enabled) (not $v.metrics.scrapedOtherwise)) (printf (print "metrics.podMonitor.enabled: "
    "is false, so that nothing would collect the metric that %v.autoscaling follows; set it to true, or metrics.scrapedOtherwise if "
    "your Prometheus finds the pods without PodMonitors") $scaler))
  (list (and $episodic (not (include "pipelinerl.hasEpisodes" .))) (printf
    "verifier.autoscaling.kind: %s scales on episodes, and the recipe has none; set it to cpu" $v.verifier.autoscaling.kind))
  (list (and $v.networkPolicy.enabled $scaler (not $v.networkPolicy.monitoring.from)) (printf (print "networkPolicy.monitoring.from: is "
    "empty, so that no Prometheus could collect the metric that %v.autoscaling follows; name its peers" $own) $scaler))
  (list (and $v.networkPolicy.enabled $v.trainer.page.ingress.enabled (not $v.trainer.page.ingress.from)) (print
    "trainer.page.ingress.from: is empty, so that no Ingress controller would reach the page; name its pods" $own))
  (list (and $v.networkPolicy.enabled (not $v.networkPolicy.dns.to)) (print "networkPolicy.dns.to: is empty, so that no pod could "
    "resolve a name; name the pods or addresses that answer DNS" $own))
) -}}
{{- end -}}

{{/* Takes a list of (condition, message) and fails with the first message whose condition holds. */}}
{{- define "pipelinerl.refuse" -}}
{{- range . -}}{{- if first . -}}{{- include "pipelinerl.fail" (last .) -}}{{- end -}}{{- end -}}
{{- end -}}
