{{- define "baton.routerSettings" -}}
{{- $settings := mergeOverwrite (deepCopy .Values.router.settings) (include "baton.logSettings" . | fromYaml) -}}
{{- $_ := set $settings "http_listen" "0.0.0.0:8000" -}}
{{- $_ := set $settings "grpc_listen" "0.0.0.0:50051" -}}
{{- $_ := set $settings "drain_timeout" .Values.router.drainTimeoutSeconds -}}
{{- $_ := set $settings "prefill" (include "baton.discovery" (dict "root" . "component" "prefill")) -}}
{{- $_ := set $settings "decode" (include "baton.discovery" (dict "root" . "component" "decode")) -}}
{{- toYaml $settings -}}
{{- end -}}
