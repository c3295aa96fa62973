{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's objects. (dict "root" $ "component" "router") */}}
{{- define "baton.name" -}}
{{ include "baton.fullname" .root }}-{{ .component }}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.router) */}}
{{- define "baton.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{ .image.repository }}:{{ coalesce .image.tag $images.tag .root.Chart.AppVersion }}
{{- end -}}

{{/* Where a component's workers are: the ready addresses behind its Service, and those of both roles. */}}
{{- define "baton.discovery" -}}
k8s:///{{ .root.Release.Namespace }}/{{ include "baton.serviceName" . }}:grpc
{{- if and (has .component (list "prefill" "decode")) .root.Values.both.replicas -}}
,k8s:///{{ .root.Release.Namespace }}/{{ include "baton.serviceName" (dict "root" .root "component" "both") }}:grpc
{{- end -}}
{{- end -}}

{{/* Of a component's Service. A LeaderWorkerSet makes one of its own name, by which members find their leader before it
     is ready. */}}
{{- define "baton.serviceName" -}}
{{ include "baton.name" . }}{{ if dig "multiNode" "enabled" false (get .root.Values .component) }}-leaders{{ end }}
{{- end -}}

{{/* Components that are workers. */}}
{{- define "baton.workers" -}}
{{- concat (list "prefill" "decode") (ternary (list "both") (list) (gt (int .Values.both.replicas) 0)) | toJson -}}
{{- end -}}

{{/* One mapping of settings: what the user gave, then what the chart decides. Goes into a ConfigMap. */}}
{{- define "baton.settingsMap" -}}
{{- $name := include "baton.name" . -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
data:
  settings.yaml: |
    {{- include (printf "baton.%sSettings" .component) .root | fromYaml | toYaml | nindent 4 }}
{{- end -}}

{{- define "baton.logSettings" -}}
log_level: {{ .Values.logging.level }}
log_format: {{ .Values.logging.format }}
{{- end -}}

{{- define "baton.traceSettings" -}}
{{- with .Values.tracing.endpoint -}}
trace_endpoint: {{ . | quote }}
trace_protocol: {{ $.Values.tracing.protocol }}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
  {{- with .root.Values.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
# Mounted by those pods that talk to the API server, and by no other.
automountServiceAccountToken: false
{{- end -}}

{{- define "baton.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end -}}

{{- define "baton.podMetadata" -}}
labels:
  # Not the chart's version: a new chart alone restarts nobody.
  {{- include "baton.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: baton
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # New settings are a new pod.
  checksum/settings: {{ include (printf "baton.%sSettings" .component) .root | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Where pods may run, whom they run as: everything in a pod's spec that is not about its containers. */}}
{{- define "baton.podSpec" -}}
{{- $values := .values -}}
serviceAccountName: {{ include "baton.name" . }}
automountServiceAccountToken: {{ .usesApi }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .gracePeriod }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.podSecurity.runAsUser }}
  runAsGroup: {{ .root.Values.podSecurity.runAsGroup }}
  fsGroup: {{ .root.Values.podSecurity.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "baton.affinity" . | fromYaml }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadKeys }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "baton.selector" $ | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.affinity" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "baton.selector" . | fromYaml)) -}}
{{- $made := dict -}}
{{- if eq .values.antiAffinity "soft" -}}
{{- $made = dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) -}}
{{- else if eq .values.antiAffinity "hard" -}}
{{- $made = dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- mergeOverwrite $made (deepCopy .values.affinity) | toYaml -}}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Home, caches and temporary files, on a read-only root. */}}
{{- define "baton.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /tmp/.cache
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.mounts" -}}
- name: settings
  mountPath: /etc/baton
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: settings
  configMap:
    name: {{ include "baton.name" . }}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "baton.tlsSecret" .root }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Before SIGTERM: the pod leaves the Service at once and gets its last new connections; then it drains by itself. */}}
{{- define "baton.preStop" -}}
preStop:
  sleep:
    seconds: {{ . }}
{{- end -}}

{{/* preStop, drain, and what it takes to end. */}}
{{- define "baton.gracePeriod" -}}
{{ add (int .preStopSeconds) (int .drainTimeoutSeconds) 15 }}
{{- end -}}

{{- define "baton.autoscaled" -}}
{{- if and (ne .root.Values.autoscaling.mode "none") .values.autoscaling.enabled -}}true{{- end -}}
{{- end -}}
