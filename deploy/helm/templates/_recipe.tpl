{{/* The recipe that the services read: a file of recipes/ or recipe.inline, then model.name, then recipe.set over it. YAML. */}}
{{- define "pipelinerl.recipe" -}}
{{- $recipe := dict -}}
{{- if .Values.recipe.inline -}}
{{- $recipe = deepCopy .Values.recipe.inline -}}
{{- else -}}
{{- $file := printf "recipes/%s.yaml" .Values.recipe.name -}}
{{- $text := .Files.Get $file -}}
{{- if not $text -}}
{{- $known := list -}}
{{- range $path, $_ := .Files.Glob "recipes/*.yaml" -}}
{{- $known = append $known (trimSuffix ".yaml" (base $path)) -}}
{{- end -}}
{{- include "pipelinerl.fail" (printf "recipe.name: the chart has no recipe %q; use one of %s, or give a whole recipe in recipe.inline" .Values.recipe.name (join ", " $known)) -}}
{{- end -}}
{{- $recipe = fromYaml $text -}}
{{- end -}}
{{- with .Values.model.name -}}
{{- $recipe = mergeOverwrite $recipe (dict "model" (dict "source" "hub" "name" .)) -}}
{{- end -}}
{{- with .Values.model.source -}}
{{- if $.Values.model.name -}}
{{- include "pipelinerl.fail" (printf "model.source: %s and model.name: %s both name the initial policy; give one of them" . $.Values.model.name) -}}
{{- end -}}
{{- $recipe = mergeOverwrite $recipe (dict "model" (dict "source" .)) -}}
{{- end -}}
{{- $recipe = mergeOverwrite $recipe (default dict .Values.recipe.set | deepCopy) -}}
{{- include "pipelinerl.recipe.check" $recipe -}}
{{- toYaml $recipe -}}
{{- end -}}

{{/* Checks the fields of a recipe that the chart itself needs. The services check all others, with the messages of `pipelinerl validate`. */}}
{{- define "pipelinerl.recipe.check" -}}
{{- range $section := list "name" "model" "task" -}}
{{- if not (or (index $ $section) (and (eq $section "task") $.tasks)) -}}
{{- include "pipelinerl.fail" (printf "recipe.inline: the recipe has no %s; give it there or in recipe.set.%s%s" $section $section (eq $section "model" | ternary ", or set model.name to a Hugging Face id" "")) -}}
{{- end -}}
{{- end -}}
{{- if and (has (default "hub" .model.source) (list "hub" "path")) (not .model.name) -}}
{{- include "pipelinerl.fail" "model.name: the recipe names no model; set model.name to a Hugging Face id such as Qwen/Qwen2.5-7B, or recipe.set.model" -}}
{{- end -}}
{{- $template := default "" .model.chat_template -}}
{{- if and $template (not (regexMatch "{{|{%" $template)) -}}
{{- include "pipelinerl.fail" (printf "recipe.set.model.chat_template: %s is a file, which the pods do not have; give its text by --set-file recipe.set.model.chat_template=%s" $template $template) -}}
{{- end -}}
{{- end -}}

{{/* "true" if the trainer builds the initial model or copies it from a checkpoint, also for the actors; else nothing. */}}
{{- define "pipelinerl.buildsModel" -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- $source := default "hub" $recipe.model.source -}}
{{- if or (has $source (list "checkpoint" "smollm2")) (contains "/" $source) -}}true{{- end -}}
{{- end -}}

{{/* "true" if the actors read weights from an object store, and not from NATS; else nothing. */}}
{{- define "pipelinerl.actorsReadStore" -}}
{{- $weights := dig "weights" dict (include "pipelinerl.recipe" . | fromYaml) -}}
{{- if and (eq (default "" $weights.backend) "log") (contains "://" (default "" $weights.log)) -}}true{{- end -}}
{{- end -}}

{{/* "true" if a task or an evaluation set has episodes, which run in the verifier's pods and ask the actors for turns; else nothing. */}}
{{- define "pipelinerl.hasEpisodes" -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- $tasks := list (default dict $recipe.task) -}}
{{- range concat (default list $recipe.tasks) (dig "evaluation" "sets" list $recipe) -}}
{{- $tasks = append $tasks (default dict .task) -}}
{{- end -}}
{{- $found := "" -}}
{{- range $tasks -}}
{{- if has .source (list "environment" "tools" "agent" "verifiers") -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* URL of a store of checkpoints or weights that no rule (networkPolicy.hub, extraEgress) lets the trainer reach; nothing if there is none. */}}
{{- define "pipelinerl.storeWithoutRule" -}}
{{- $policies := .Values.networkPolicy -}}
{{- if and $policies.enabled (not $policies.hub.enabled) (not $policies.extraEgress) -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- list (dig "checkpoint" "upload" "" $recipe) (dig "weights" "log" "" $recipe) (default "" $recipe.model.source) (default "" $recipe.model.name) | join " " | regexFind "(s3|gs|hf)://[^ ]+" -}}
{{- end -}}
{{- end -}}

{{/* GPUs of an actor pod: the engine's tensor parallel size, or 0. */}}
{{- define "pipelinerl.actor.gpus" -}}
{{- $recipe := include "pipelinerl.recipe" . | fromYaml -}}
{{- $size := dig "actor" "engine" "tensor_parallel_size" 1 $recipe | int -}}
{{- $gpus := kindIs "invalid" .Values.actor.gpus | ternary $size .Values.actor.gpus | int -}}
{{- if not (has $gpus (list 0 $size)) -}}
{{- include "pipelinerl.fail" (printf "actor.gpus: %d differs from the recipe's actor.engine.tensor_parallel_size = %d; set recipe.set.actor.engine.tensor_parallel_size, or leave actor.gpus at null" $gpus $size) -}}
{{- end -}}
{{- $gpus -}}
{{- end -}}

{{/* The recipe's trainer.nproc; auto, which asks for the GPUs of one machine, is 1 here. */}}
{{- define "pipelinerl.trainer.nproc" -}}
{{- $nproc := dig "trainer" "nproc" 1 (include "pipelinerl.recipe" . | fromYaml) -}}
{{- eq (toString $nproc) "auto" | ternary 1 $nproc | int -}}
{{- end -}}

{{/* GPUs, and so ranks, of a trainer pod: the recipe's trainer.nproc unless given. */}}
{{- define "pipelinerl.trainer.gpus" -}}
{{- kindIs "invalid" .Values.trainer.gpus | ternary (include "pipelinerl.trainer.nproc" .) .Values.trainer.gpus | int -}}
{{- end -}}
