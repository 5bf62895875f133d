{{/* Names, labels and images. A template takes the root context, or (dict "root" $ "component" "actor") if its comment says so. */}}

{{/* Refuses values. All such messages of the chart come from here and have the form "pipelinerl: VALUE: problem; what to do". */}}
{{- define "pipelinerl.fail" -}}
{{- fail (printf "\n\npipelinerl: %s\n" .) -}}
{{- end -}}

{{- define "pipelinerl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name if it contains the chart's, else RELEASE-CHART; at most 40 characters, so that every object's name fits. */}}
{{- define "pipelinerl.fullname" -}}
{{- $own := include "pipelinerl.name" . -}}
{{- $name := contains $own .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $own) -}}
{{- $name = default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- include "pipelinerl.fail" (printf "fullnameOverride: %q cannot begin the names of Services, which begin with a letter and contain only lowercase letters, digits and inner dashes; set fullnameOverride to such a name" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* dict root, component: the labels for selectors, which never change for a release. */}}
{{- define "pipelinerl.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pipelinerl.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* dict root, component ("" for objects of no one service), optional extra. The chart's own labels win over `extra`, and that over
     commonLabels. */}}
{{- define "pipelinerl.labels" -}}
{{- $own := include "pipelinerl.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "pipelinerl" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- merge $own (default dict .extra) (default dict .root.Values.commonLabels) | toYaml -}}
{{- end -}}

{{/* dict root, component: labels of the service's pods. They contain no versions, so that a new chart version alone restarts no pod. */}}
{{- define "pipelinerl.podLabels" -}}
{{- $labels := include "pipelinerl.labels" (dict "root" .root "component" .component "extra" (index .root.Values .component).podLabels) | fromYaml -}}
{{- omit $labels "helm.sh/chart" "app.kubernetes.io/version" | toYaml -}}
{{- end -}}

{{/* dict root, component, optional variant (cuda, cpu): a service's image. Its own values override images.*; a whole reference gets no suffix. */}}
{{- define "pipelinerl.image" -}}
{{- $images := .root.Values.images -}}
{{- $own := (index .root.Values .component).image -}}
{{- if and $own.reference (not .variant) -}}
{{- $own.reference -}}
{{- else -}}
{{- $tag := default (default .root.Chart.AppVersion $images.tag) $own.tag -}}
{{- if and (eq (default $images.variant .variant) "cpu") (ne .component "verifier") -}}
{{- $tag = printf "%s-cpu" $tag -}}
{{- end -}}
{{- printf "%s:%s" (list $images.registry (default (printf "pipelinerl/%s" .component) $own.repository) | compact | join "/") $tag -}}
{{- end -}}
{{- end -}}

{{/* Services of the release, as a YAML list. */}}
{{- define "pipelinerl.components" -}}
{{- list "actor" (.Values.trainer.enabled | ternary "trainer" "") "verifier" (.Values.nats.enabled | ternary "nats" "") | compact | toYaml -}}
{{- end -}}

{{/* dict root, component: name of its ServiceAccount. */}}
{{- define "pipelinerl.serviceAccountName" -}}
{{- $own := (index .root.Values .component).serviceAccount -}}
{{- default ($own.create | ternary (printf "%s-%s" (include "pipelinerl.fullname" .root) .component) "default") $own.name -}}
{{- end -}}

{{/* A service's values: spec.replicas of its Deployment, or nothing if an autoscaler or `kubectl scale` owns the field. A number in
     the manifest would undo the scaling at the next upgrade or rollback, or be refused as a conflict. */}}
{{- define "pipelinerl.replicas" -}}
{{- if not (or .autoscaling.enabled (kindIs "invalid" .replicas)) -}}
replicas: {{ int .replicas }}
{{- end -}}
{{- end -}}

{{/* What a finished run keeps: keep, release or exit. KEDA would start the actors again; without the API the trainer cannot scale. */}}
{{- define "pipelinerl.onCompletion" -}}
{{- $keda := and .Values.actor.autoscaling.enabled (eq .Values.actor.autoscaling.kind "keda") -}}
{{- default (or $keda (not .Values.kubernetesApi.enabled) | ternary "keep" "release") .Values.trainer.onCompletion -}}
{{- end -}}

{{/* Name of the run: the prefix of its subjects and the name of its folder. */}}
{{- define "pipelinerl.run" -}}
{{- $run := default (include "pipelinerl.recipe" . | fromYaml).name .Values.run -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$" $run) -}}
{{- include "pipelinerl.fail" (printf "run: %q cannot name a run; use 1-40 lowercase letters, digits and inner dashes (it is the recipe's name unless run is set)" $run) -}}
{{- end -}}
{{- $run -}}
{{- end -}}
