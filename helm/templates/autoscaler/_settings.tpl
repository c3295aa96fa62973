{{- define "baton.autoscalerSettings" -}}
{{- $settings := mergeOverwrite (deepCopy .Values.autoscaler.settings) (include "baton.logSettings" . | fromYaml) (include "baton.tlsSettings" . | fromYaml) -}}
{{- $name := include "baton.name" (dict "root" . "component" "autoscaler") -}}
{{- range list "prefill" "decode" -}}
{{- $_ := set $settings . (include "baton.discovery" (dict "root" $ "component" .)) -}}
{{- end -}}
{{- $_ := set $settings "routers" (include "baton.discovery" (dict "root" . "component" "router")) -}}
{{- $_ := set $settings "http_listen" "0.0.0.0:8010" -}}
{{- $_ := set $settings "namespace" .Release.Namespace -}}
{{- $_ := set $settings "leader_elect" true -}}
{{- $_ := set $settings "lease_name" $name -}}
{{- $_ := set $settings "deletion_costs" .Values.autoscaling.deletionCosts -}}
{{- with .Values.prefill.autoscaling -}}
{{- $_ := set $settings "prefill_min" .minReplicas -}}
{{- $_ := set $settings "prefill_max" .maxReplicas -}}
{{- if .queuedTokensPerPod }}{{- $_ := set $settings "target_queued_tokens" .queuedTokensPerPod }}{{ end -}}
{{- if .arrivalTokensPerSecond }}{{- $_ := set $settings "target_prefill_rate" .arrivalTokensPerSecond }}{{ end -}}
{{- end -}}
{{- with .Values.decode.autoscaling -}}
{{- $_ := set $settings "decode_min" .minReplicas -}}
{{- $_ := set $settings "decode_max" .maxReplicas -}}
{{- if .kvUsage }}{{- $_ := set $settings "target_kv_usage" .kvUsage }}{{ end -}}
{{- if .requestsPerPod }}{{- $_ := set $settings "target_requests" .requestsPerPod }}{{ end -}}
{{- end -}}
{{- $mode := .Values.autoscaling.mode -}}
{{- $moves := .Values.autoscaling.moveRoles -}}
{{- if $moves -}}
{{- if not .Values.both.replicas -}}
{{- fail "autoscaling.moveRoles: only workers of both roles can take work of another one, and both.replicas is 0" -}}
{{- end -}}
{{- range $role, $values := dict "prefill" .Values.prefill "decode" .Values.decode -}}
{{- if $values.autoscaling.enabled -}}
{{- fail (printf "%s.autoscaling.enabled: with autoscaling.moveRoles only workers of both roles come and go" $role) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $settings "move_roles" true -}}
{{- $_ := set $settings "both_min" .Values.both.autoscaling.minReplicas -}}
{{- $_ := set $settings "both_max" .Values.both.autoscaling.maxReplicas -}}
{{- else if .Values.both.autoscaling.enabled -}}
{{- fail "both.autoscaling.enabled: workers of both roles come and go with autoscaling.moveRoles alone" -}}
{{- end -}}
{{- if and (eq $mode "planner") .Values.both.replicas (not $moves) -}}
{{- fail "both.replicas: autoscaling.mode planner counts these in both roles, and would take others away for them" -}}
{{- end -}}
{{- if eq $mode "external-metrics" -}}
{{- $_ := set $settings "external_metrics_listen" "0.0.0.0:6443" -}}
{{- $_ := set $settings "external_metrics_service" (printf "%s/%s" .Release.Namespace $name) -}}
{{- if ne .Values.autoscaler.tls.mode "self" -}}
{{- $_ := set $settings "external_metrics_cert" "/etc/baton-metrics-tls/tls.crt" -}}
{{- $_ := set $settings "external_metrics_key" "/etc/baton-metrics-tls/tls.key" -}}
{{- end -}}
{{- else if eq $mode "keda" -}}
{{- $_ := set $settings "keda_listen" "0.0.0.0:50070" -}}
{{- else if eq $mode "planner" -}}
{{- $_ := set $settings "apply" (or (not $moves) .Values.both.autoscaling.enabled) -}}
{{- range $role, $values := ternary (dict "both" .Values.both) (dict "prefill" .Values.prefill "decode" .Values.decode) $moves -}}
{{- if $values.autoscaling.enabled -}}
{{- $_ := set $settings (printf "%s_workload" $role) (printf "%s/%s" (ternary "leaderworkerset" "deployment" $values.multiNode.enabled) (include "baton.name" (dict "root" $ "component" $role))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Name of the Secret with the serving certificate of the external metrics API, if it comes from outside. */}}
{{- define "baton.autoscalerSecret" -}}
{{- if eq .Values.autoscaler.tls.mode "secret" -}}
{{ required "autoscaler.tls.secretName: names a Secret of type kubernetes.io/tls" .Values.autoscaler.tls.secretName }}
{{- else -}}
{{ include "baton.name" (dict "root" . "component" "autoscaler") }}-tls
{{- end -}}
{{- end -}}
