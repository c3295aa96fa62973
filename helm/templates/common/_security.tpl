{{/* Certificates and API keys, as settings, names and probes. */}}

{{- define "baton.tlsSecret" -}}
{{ default (printf "%s-tls" (include "baton.fullname" .)) .Values.tls.existingSecret }}
{{- end -}}

{{/* What every certificate of the release holds: processes reach each other by address, and prove this name. */}}
{{- define "baton.tlsName" -}}
{{ include "baton.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "baton.tlsSettings" -}}
{{- if .Values.tls.enabled -}}
tls_cert: /etc/baton-tls/tls.crt
tls_key: /etc/baton-tls/tls.key
tls_ca: /etc/baton-tls/ca.crt
tls_server_name: {{ include "baton.tlsName" . }}
{{- end -}}
{{- end -}}

{{/* The kubelet's gRPC probes speak no TLS: with TLS, a port of its own answers them. */}}
{{- define "baton.healthSettings" -}}
{{- if .Values.tls.enabled -}}
health_listen: 0.0.0.0:50069
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "port" 50061) */}}
{{- define "baton.healthPort" -}}
{{ ternary 50069 .port .root.Values.tls.enabled }}
{{- end -}}

{{/* Name of the Secret with the API keys; empty where nobody is asked for one. */}}
{{- define "baton.apiKeysSecret" -}}
{{- with .Values.apiKeys -}}
{{- if and .existingSecret .keys -}}
{{- fail "apiKeys.keys: give either these or apiKeys.existingSecret" -}}
{{- else if .existingSecret -}}
{{ .existingSecret }}
{{- else if .keys -}}
{{ include "baton.fullname" $ }}-api-keys
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of an endpoint of a ServiceMonitor: how Prometheus reaches the router. */}}
{{- define "baton.scrapeTls" -}}
{{- $secret := include "baton.tlsSecret" . -}}
scheme: https
tlsConfig:
  serverName: {{ include "baton.tlsName" . }}
  ca:
    secret: {name: {{ $secret }}, key: ca.crt}
  {{- if .Values.tls.clientCertificates }}
  cert:
    secret: {name: {{ $secret }}, key: tls.crt}
  keySecret: {name: {{ $secret }}, key: tls.key}
  {{- end }}
{{- end -}}
