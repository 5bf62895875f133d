{{/* Refuses values that contradict each other or would silently do nothing. Takes the root context and renders nothing. The Job of
     validation.yaml makes the checks that need arithmetic (pipelinerl/kube/checks.py). */}}
{{- define "pipelinerl.checks" -}}
{{- $v := .Values -}}
{{- range $component := list "actor" ($v.trainer.enabled | ternary "trainer" "") | compact -}}
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
  (list (and $values.hostNetwork $v.networkPolicy.enabled) (printf (print "%s.hostNetwork: NetworkPolicies do not recognize pods in the "
    "network of a node, so that NATS and verifiers would refuse them; set networkPolicy.enabled to false and protect the nodes' ports "
    "otherwise") $component))
  (list (and $v.kueue.queue (hasKey (merge (dict) $values.labels $v.commonLabels) "kueue.x-k8s.io/queue-name")) (printf (print
    "%s.labels, commonLabels: with kueue.x-k8s.io/queue-name, Kueue would admit the pods of the %s apart from their group; leave it "
    "out, or kueue.queue empty") $component $component))
) -}}
{{- end -}}
{{- range $component := list "actor" "verifier" -}}
{{- with (index $v $component).autoscaling -}}
{{- include "pipelinerl.refuse" (list (list (and .enabled (lt (int .maxReplicas) (int .minReplicas))) (printf (print "%s.autoscaling."
  "maxReplicas: %d is less than minReplicas = %d; raise it, or lower minReplicas") $component (int .maxReplicas) (int .minReplicas)))) -}}
{{- end -}}
{{- end -}}
{{- $accounts := dict -}}
{{- range $component := include "pipelinerl.components" . | fromYamlArray -}}
{{- $name := include "pipelinerl.serviceAccountName" (dict "root" $ "component" $component) -}}
{{- $other := get $accounts $name -}}
{{- if and $other (or (index $v $component).serviceAccount.create (index $v $other).serviceAccount.create) -}}
{{- include "pipelinerl.fail" (printf (print "%s.serviceAccount.name, %s.serviceAccount.name: both are %s, which the chart creates "
  "for one of the two; give each its own name") $other $component $name) -}}
{{- end -}}
{{- $_ := set $accounts $name $component -}}
{{- end -}}
{{- if not $v.trainer.enabled -}}{{- include "pipelinerl.checks.actorsOnly" . -}}{{- end -}}
{{- $episodic := and $v.verifier.autoscaling.enabled (ne $v.verifier.autoscaling.kind "cpu") -}}
{{- $scaler := or (and $v.actor.autoscaling.enabled "actor") (and $episodic "verifier") -}}
{{- $own := " (needed even if a NetworkPolicy of yours allows this)" -}}
{{- include "pipelinerl.refuse" (list
  (list (dig "actor" "colocate" false (include "pipelinerl.recipe" . | fromYaml))
    "recipe.set.actor.colocate: true is for a trainer and an actor on one GPU of one machine (pipelinerl run); set it to false")
  (list (regexReplaceAll "(^|,)(nats|tls)://[^,]+" (default "" $v.nats.url) "") (print "nats.url: a server does not begin with nats:// or "
    "tls://; begin each one so, and write %2C for a comma in a user or password"))
  (list (and $v.nats.enabled $v.nats.url)
    "nats.url: is not used while nats.enabled is true; set nats.enabled to false, or leave the url empty")
  (list (and $v.nats.enabled $v.nats.tlsSecret) (printf (print "nats.tlsSecret: %s is not used while nats.enabled is true; "
    "set tls.nats.enabled and tls.secrets.nats for the chart's own NATS") $v.nats.tlsSecret))
  (list (and $v.tls.nats.enabled (not $v.nats.enabled)) (print "tls.nats.enabled: encrypts only the chart's own NATS, but nats.enabled "
    "is false; for your own NATS, write tls:// in nats.url and name its CA in nats.tlsSecret"))
  (list (and $v.nats.enabled $v.nats.existingSecret (not $v.nats.auth.enabled)) (printf (print "nats.existingSecret: %s protects nothing "
    "while nats.auth.enabled is false; set that to true, or leave this empty") $v.nats.existingSecret))
  (list (and $v.nats.external.host (not (and $v.nats.enabled $v.nats.auth.enabled $v.tls.nats.enabled))) (printf (print
    "nats.external.host: %s would be open to other clusters without encryption or logins; set nats.enabled, nats.auth.enabled and "
    "tls.nats.enabled to true, or leave it empty") $v.nats.external.host))
  (list (and (not $v.tls.grpc.enabled) (not $v.tls.nats.enabled) (or $v.tls.certManager.enabled ($v.tls.secrets | values | compact)))
    "tls: certificates are given, but nothing is encrypted; set tls.grpc.enabled, tls.nats.enabled or both")
  (list (and $v.tracing.headersSecret (not $v.tracing.endpoint)) (printf
    "tracing.headersSecret: %s is not used while tracing.endpoint is empty; set the endpoint of your collector" $v.tracing.headersSecret))
  (list (and $v.huggingface.token $v.huggingface.existingSecret)
    "huggingface.token: huggingface.existingSecret is set, too; keep only one of them")
  (list (and $v.actor.scheduleAfterTrainer (dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list
    (default dict $v.actor.affinity)))
    (print "actor.affinity: a required podAffinity cannot be combined with actor.scheduleAfterTrainer, because the scheduler wants one "
      "pod that matches all required terms; make yours preferred, or set actor.scheduleAfterTrainer to false"))
  (list (and $v.kueue.queue $v.actor.autoscaling.enabled) (print "actor.autoscaling.enabled: Kueue deletes the actors that an autoscaler "
    "adds to a pod group of fixed size; set it to false, or leave kueue.queue empty"))
  (list (and $v.kueue.queue (lt (int $v.trainer.expectedActors) 1))
    "trainer.expectedActors: is 0, so that the pod group of kueue.queue would have no actors; set it to their number")
  (list (and $v.kueue.queue (ne (int $v.trainer.expectedActors) (default $v.trainer.expectedActors $v.actor.replicas | int))) (printf (print
    "actor.replicas: %d is not trainer.expectedActors = %d, the number of actors in the pod group of kueue.queue; make them equal, or "
    "leave actor.replicas at null") (int $v.actor.replicas) (int $v.trainer.expectedActors)))
  (list (and (or $v.trainer.resourceClaims $v.trainer.hostNetwork) $v.test.transferPair.enabled) (print "test.transferPair.enabled: its pods "
    "have GPUs by gpu.resource and the network of pods, unlike a trainer with resourceClaims or hostNetwork; set it to false"))
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

{{/* The same for a release without a trainer, whose actors belong to the run of another release. */}}
{{- define "pipelinerl.checks.actorsOnly" -}}
{{- $v := .Values -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- $without := "while trainer.enabled is false" -}}
{{- include "pipelinerl.refuse" (list
  (list $v.nats.enabled (printf (print "nats.enabled: is true %s, so that the actors would wait at an empty NATS; set it to false, and "
    "nats.url to the NATS of the release with the trainer") $without))
  (list (ne (dig "weights" "backend" "auto" $recipe) "log") (printf (print "recipe.set.weights.backend: %s needs connections between "
    "trainer and actors; %s, set it to log, and weights.log as in the release with the trainer")
    (dig "weights" "backend" "auto" $recipe) $without))
  (list (eq (dig "mode" "pipeline" $recipe) "conventional") (printf (print "recipe.set.mode: conventional waits until each actor serves "
    "a version, but actors that read a log follow at their own speed %s; use pipeline") $without))
  (list (include "pipelinerl.buildsModel" .) (printf (print "recipe.set.model.source: %s is copied or unpacked by the trainer, which the "
    "actors cannot reach %s; set it to hub or path, and recipe.set.model.name to a model with the same architecture and tokenizer, such "
    "as a folder of actor.extraVolumes: the weights come from the log") $recipe.model.source $without))
  (list $v.actor.autoscaling.enabled (printf (print "actor.autoscaling.enabled: follows a metric of the trainer, which this release does "
    "not have %s; set it to false, and scale the Deployment or set actor.replicas") $without))
  (list $v.kueue.queue (printf (print "kueue.queue: %s has no group of trainer and actors %s; leave it empty, and give the queue in "
    "actor.labels") $v.kueue.queue $without))
  (list $v.metrics.prometheusRule.enabled (printf (print "metrics.prometheusRule.enabled: the alerts need the trainer's metrics, which "
    "this release does not have %s; set it to false") $without))
) -}}
{{- end -}}

{{/* Takes a list of (condition, message) and fails with the first message whose condition holds. */}}
{{- define "pipelinerl.refuse" -}}
{{- range . -}}{{- if first . -}}{{- include "pipelinerl.fail" (last .) -}}{{- end -}}{{- end -}}
{{- end -}}
