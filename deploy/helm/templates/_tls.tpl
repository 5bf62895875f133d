{{/* dict root, component: the Secret with the service's certificate. cert-manager writes it, or the values name it. */}}
{{- define "pipelinerl.tls.secret" -}}
{{- $tls := .root.Values.tls -}}
{{- $given := index $tls.secrets .component -}}
{{- if $given -}}
{{- $given -}}
{{- else if $tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "pipelinerl.fullname" .root) .component -}}
{{- else -}}
{{- include "pipelinerl.fail" (printf "tls.secrets.%s: is empty; name a Secret with tls.crt, tls.key and ca.crt, or set tls.certManager.enabled and its issuerRef" .component) -}}
{{- end -}}
{{- end -}}

{{/* dict root, component: host names of the service, one a line, with each pod of a StatefulSet by itself, because TLS libraries
     refuse a wildcard in a name of two parts. */}}
{{- define "pipelinerl.tls.names" -}}
{{- $full := include "pipelinerl.fullname" .root -}}
{{- $service := printf "%s-%s" $full .component -}}
{{- $hosts := list $service -}}
{{- if eq .component "trainer" -}}
{{- range until (int .root.Values.trainer.nodes) -}}{{- $hosts = append $hosts (printf "%s-%d.%s" $service . $service) -}}{{- end -}}
{{- else if eq .component "nats" -}}
{{- range until (int .root.Values.nats.replicas) -}}{{- $hosts = append $hosts (printf "%s-%d.%s-headless" $service . $service) -}}{{- end -}}
{{- end -}}
{{- range $hosts }}
- {{ . }}
- {{ . }}.{{ $.root.Release.Namespace }}
- {{ . }}.{{ $.root.Release.Namespace }}.svc
- {{ . }}.{{ $.root.Release.Namespace }}.svc.{{ $.root.Values.network.clusterDomain }}
{{- end }}
{{- with and (eq .component "nats") .root.Values.nats.external.host }}
- {{ . }}
{{- end }}
{{- end -}}
