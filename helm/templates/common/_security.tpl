{{/* Certificates and API keys, as settings, names and probes. */}}

{{- define "baton.tlsSecret" -}}
{{ default (printf "%s-tls" (include "baton.fullname" .)) .Values.tls.existingSecret }}
{{- end -}}

{{/* What every certificate of the release holds: processes reach each other by address, and prove this name. */}}
{{- define "baton.tlsName" -}}
{{ include "baton.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* CAs of clients, if the router asks for their certificates: Secrets with ca.crt, and with a client's tls.crt and
     tls.key. The fleet's own CA is none of these, since workers let in whoever has a certificate of it. */}}
{{- define "baton.makesClientCa" -}}
{{- with .Values.tls -}}
{{- if and .enabled .clientCertificates (not .clientCa.existingSecret) -}}
{{- if .existingSecret -}}
{{- fail "tls.clientCa.existingSecret: names the Secret whose ca.crt signs clients' certificates; it is not the fleet's CA" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.clientCaSecret" -}}
{{- if include "baton.makesClientCa" . -}}
{{ include "baton.fullname" . }}-client-ca
{{- else -}}
{{ .Values.tls.clientCa.existingSecret }}
{{- end -}}
{{- end -}}

{{- define "baton.clientSecret" -}}
{{- if include "baton.makesClientCa" . -}}
{{ include "baton.fullname" . }}-client-tls
{{- else -}}
{{ required "tls.clientCa.clientSecret: names the Secret with a client's tls.crt and tls.key" .Values.tls.clientCa.clientSecret }}
{{- end -}}
{{- end -}}

{{- define "baton.asksClients" -}}
{{- if and .Values.tls.enabled .Values.tls.clientCertificates -}}true{{- end -}}
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

{{/* Name of the Secret with the API keys; empty if nobody is asked for one. */}}
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
    secret: {name: {{ include "baton.clientSecret" . }}, key: tls.crt}
  keySecret: {name: {{ include "baton.clientSecret" . }}, key: tls.key}
  {{- end }}
{{- end -}}

{{/* A CA that signs itself, and an issuer of it: (dict "root" $ "name" NAME) */}}
{{- define "baton.certificateAuthority" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" (dict "root" .root "component" "tls") | nindent 4 }}
spec:
  isCA: true
  commonName: {{ .name }}
  secretName: {{ .name }}
  duration: 87600h
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Never}
  issuerRef:
    kind: Issuer
    name: {{ include "baton.fullname" .root }}-self
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" (dict "root" .root "component" "tls") | nindent 4 }}
spec:
  ca:
    secretName: {{ .name }}
{{- end -}}
