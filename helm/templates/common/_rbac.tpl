{{/* Gives a component's service account the Role of the same name. */}}
{{- define "baton.roleBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ include "baton.name" . }}
subjects: {{- include "baton.subject" . | nindent 2 }}
{{- end -}}

{{- define "baton.subject" -}}
- kind: ServiceAccount
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
{{- end -}}
