{{/* Address and logins of NATS: of the chart's own server, or of the one in nats.url. */}}

{{- define "pipelinerl.nats.url" -}}
{{- if .Values.nats.enabled -}}
{{- printf "%s://%s-nats:4222" (.Values.tls.nats.enabled | ternary "tls" "nats") (include "pipelinerl.fullname" .) -}}
{{- else if .Values.nats.url -}}
{{- .Values.nats.url -}}
{{- else -}}
{{- include "pipelinerl.fail" "nats.url: is empty while nats.enabled is false; set it to your server's address, such as nats://nats.messaging:4222" -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with passwords and credentials; nothing if your own NATS requires no login. */}}
{{- define "pipelinerl.nats.authSecret" -}}
{{- $own := printf "%s-nats-auth" (include "pipelinerl.fullname" .) -}}
{{- default (and .Values.nats.enabled .Values.nats.auth.enabled | ternary $own "") .Values.nats.existingSecret -}}
{{- end -}}

{{/* Name of the Secret with the CA that signed NATS's certificate; nothing without TLS. */}}
{{- define "pipelinerl.nats.caSecret" -}}
{{- if .Values.nats.enabled -}}
{{- if .Values.tls.nats.enabled -}}{{- include "pipelinerl.tls.secret" (dict "root" . "component" "nats") -}}{{- end -}}
{{- else -}}
{{- .Values.nats.tlsSecret -}}
{{- end -}}
{{- end -}}

{{/* The subjects that each user may publish, one a line, for the run of this release: the lists of pipelinerl/bus/permissions.py. */}}
{{- define "pipelinerl.nats.reads" -}}
{{- range $stream := . }}
- $JS.API.CONSUMER.CREATE.{{ $stream }}
- $JS.API.CONSUMER.MSG.NEXT.{{ $stream }}.*
- $JS.API.CONSUMER.DELETE.{{ $stream }}.*
{{- end }}
{{- end -}}

{{- define "pipelinerl.nats.trainerPublishes" -}}
{{- $run := include "pipelinerl.run" . -}}
{{- $streams := list (printf "PROMPTS_%s" $run) (printf "SEQUENCES_%s" $run) (printf "CONTROL_%s" $run) (printf "DEAD_%s" $run) (printf "KV_members-%s" $run) -}}
- {{ $run }}.prompts
{{- range list "manifest" "epoch" "announce" "commit" "published" "sleep" "abort" "end" }}
- {{ $run }}.control.{{ . }}
{{- end }}
{{- range list "epoch" "announce" "commit" "abort" }}
- {{ $run }}.control.{{ . }}.*
{{- end }}
- $JS.API.INFO
{{- range $streams }}
- $JS.API.STREAM.CREATE.{{ . }}
{{- end }}
{{- range $streams }}
- $JS.API.STREAM.INFO.{{ . }}
{{- end }}
- $JS.API.CONSUMER.INFO.PROMPTS_{{ $run }}.actors
- $JS.API.CONSUMER.DURABLE.CREATE.PROMPTS_{{ $run }}.actors
- $JS.API.STREAM.MSG.GET.PROMPTS_{{ $run }}
- $JS.API.STREAM.MSG.GET.DEAD_{{ $run }}
- $JS.API.STREAM.PURGE.SEQUENCES_{{ $run }}
- $JS.API.STREAM.DELETE.PROMPTS_{{ $run }}
- $JS.API.STREAM.DELETE.SEQUENCES_{{ $run }}
{{- include "pipelinerl.nats.reads" (list (printf "SEQUENCES_%s" $run) (printf "CONTROL_%s" $run) (printf "KV_members-%s" $run)) }}
- $O.weights-{{ $run }}.>
{{- range list "CREATE" "INFO" "PURGE" "MSG.GET" }}
- $JS.API.STREAM.{{ . }}.OBJ_weights-{{ $run }}
{{- end }}
{{- include "pipelinerl.nats.reads" (list (printf "OBJ_weights-%s" $run)) }}
{{- end -}}

{{- define "pipelinerl.nats.actorPublishes" -}}
{{- $run := include "pipelinerl.run" . -}}
- {{ $run }}.sequences
- {{ $run }}.prompts
- {{ $run }}.dead
{{- range list "joined" "staged" "serving" "failed" }}
- {{ $run }}.control.{{ . }}.*
{{- end }}
- $KV.members-{{ $run }}.*
- $JS.API.CONSUMER.MSG.NEXT.PROMPTS_{{ $run }}.actors
- $JS.ACK.PROMPTS_{{ $run }}.actors.>
- $JS.ACK.*.*.PROMPTS_{{ $run }}.actors.>
{{- range list "PROMPTS" "SEQUENCES" "DEAD" }}
- $JS.API.STREAM.INFO.{{ . }}_{{ $run }}
{{- end }}
{{- include "pipelinerl.nats.reads" (list (printf "CONTROL_%s" $run)) }}
- $JS.API.STREAM.MSG.GET.OBJ_weights-{{ $run }}
{{- include "pipelinerl.nats.reads" (list (printf "OBJ_weights-%s" $run)) }}
{{- end -}}

{{/* NATS's own image, to which images.registry and images.tag do not apply. */}}
{{- define "pipelinerl.nats.image" -}}
{{- $image := .Values.nats.image -}}
{{- default (printf "%s:%s" $image.repository $image.tag) $image.reference -}}
{{- end -}}
