{{- define "baton.routerSettings" -}}
{{- $settings := mergeOverwrite (deepCopy .Values.router.settings) (include "baton.logSettings" . | fromYaml) (include "baton.tlsSettings" . | fromYaml) (include "baton.healthSettings" . | fromYaml) (include "baton.traceSettings" . | fromYaml) -}}
{{- if .Values.tracing.endpoint -}}
{{- $_ := set $settings "trace_sample" .Values.tracing.sample -}}
{{- $_ := set $settings "trace_content" .Values.tracing.content -}}
{{- end -}}
{{- if ne .Values.metrics.aliases.router "none" }}{{- $_ := set $settings "metrics_aliases" .Values.metrics.aliases.router }}{{ end -}}
{{- if include "baton.asksClients" . }}{{- $_ := set $settings "tls_client_ca" "/etc/baton-client-ca/ca.crt" }}{{ end -}}
{{- if include "baton.apiKeysSecret" . }}{{- $_ := set $settings "api_keys_file" "/etc/baton-keys/keys" }}{{ end -}}
{{- if .Values.limits }}{{- $_ := set $settings "limits_file" "/etc/baton-limits/limits.yaml" }}{{ end -}}
{{- with .Values.gateway.endpointPicker -}}
{{- if .enabled -}}
{{- if and (eq .tls "router") (not $.Values.tls.enabled) -}}
{{- fail "gateway.endpointPicker.tls: router is for tls.enabled" -}}
{{- end -}}
{{- $_ := set $settings "endpoint_picker_listen" "0.0.0.0:9002" -}}
{{- $_ := set $settings "endpoint_picker_replicas" (printf "k8s:///%s/%s:http" $.Release.Namespace (include "baton.name" (dict "root" $ "component" "router"))) -}}
{{- $_ := set $settings "endpoint_picker_key_file" "/etc/baton-picker/keys" -}}
{{- $_ := set $settings "endpoint_picker_tls" .tls -}}
{{- end -}}
{{- end -}}
{{- if .Values.router.batches }}{{- $_ := set $settings "batch_file" "/var/lib/baton/batches.db" }}{{ end -}}
{{- if .Values.router.responses }}{{- $_ := set $settings "response_file" "/var/lib/baton/responses.db" }}{{ end -}}
{{- $_ := set $settings "http_listen" "0.0.0.0:8000" -}}
{{- $_ := set $settings "grpc_listen" "0.0.0.0:50051" -}}
{{- if gt (int .Values.router.processes) 1 }}{{- $_ := set $settings "processes" (int .Values.router.processes) }}{{ end -}}
{{- $_ := set $settings "drain_timeout" .Values.router.drainTimeoutSeconds -}}
{{- $_ := set $settings "prefill" (include "baton.discovery" (dict "root" . "component" "prefill")) -}}
{{- $_ := set $settings "decode" (include "baton.discovery" (dict "root" . "component" "decode")) -}}
{{- if and (include "baton.scalesToZero" .) (not (hasKey $settings "worker_wait")) -}}
{{- $start := max (int .Values.prefill.startupTimeoutSeconds) (int .Values.decode.startupTimeoutSeconds) -}}
{{- if .Values.both.replicas }}{{- $start = max $start (int .Values.both.startupTimeoutSeconds) }}{{ end -}}
{{- $_ := set $settings "worker_wait" (min $start (int (default 600 $settings.request_timeout))) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* The claim of what the router keeps; empty if it keeps nothing. */}}
{{- define "baton.routerClaim" -}}
{{- with .Values.router -}}
{{- if or .batches .responses -}}
{{ default (printf "%s-router" (include "baton.fullname" $)) .storage.existingClaim }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether there may be no worker at all: then requests wait for the first one, and autoscalers hear of them. */}}
{{- define "baton.scalesToZero" -}}
{{- $root := . -}}
{{- range $role := list "prefill" "decode" "both" -}}
{{- $values := get $root.Values $role -}}
{{- if and (include "baton.autoscaled" (dict "root" $root "values" $values)) (eq (int $values.autoscaling.minReplicas) 0) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret by which routers sign and check what an endpoint picker chose; empty if there is no picker. */}}
{{- define "baton.pickerSecret" -}}
{{- with .Values.gateway.endpointPicker -}}
{{- if .enabled -}}
{{- default (printf "%s-endpoint-picker" (include "baton.fullname" $)) .existingSecret -}}
{{- end -}}
{{- end -}}
{{- end -}}
