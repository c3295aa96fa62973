{{/* What scales one role, by autoscaling.mode. (dict "root" $ "component" "prefill" "values" .Values.prefill) */}}
{{- define "baton.scaling" -}}
{{- $mode := .root.Values.autoscaling.mode -}}
{{- if include "baton.autoscaled" . -}}
{{- if has $mode (list "external-metrics" "prometheus-adapter") -}}
{{- include "baton.hpa" . -}}
{{- else if eq $mode "keda" -}}
{{- include "baton.scaledObject" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.scaleTarget" -}}
{{- if .values.multiNode.enabled -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "baton.name" . }}
{{- end -}}

{{- define "baton.hpa" -}}
{{- $scaling := .values.autoscaling -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {{- include "baton.scaleTarget" . | nindent 4 }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  behavior: {{- include "baton.scalingBehavior" $scaling | nindent 4 }}
  metrics:
    {{- range include "baton.scalingMetrics" . | fromYamlArray }}
    - type: External
      external:
        metric:
          name: {{ .name }}
          {{- with .role }}
          selector:
            matchLabels: {role: {{ . }}}
          {{- end }}
        target:
          # Of all pods together, divided by the number of pods.
          type: AverageValue
          averageValue: {{ .target | quote }}
    {{- end }}
{{- end -}}

{{/* Adding is quick, since prompts wait; removing is slow, one pod at a time, since each has to drain. */}}
{{- define "baton.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .scaleUpSeconds }}
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 15}
    - {type: Pods, value: 2, periodSeconds: 15}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{- define "baton.scalingMetrics" -}}
{{- $scaling := .values.autoscaling -}}
{{- if or .root.Values.autoscaling.followPlanner (eq .component "both") }}
- {name: baton_desired_replicas, target: 1, role: {{ .component }}}
{{- end }}
{{- if eq .component "prefill" }}
{{- with $scaling.queuedTokensPerPod }}
- {name: baton_prefill_queued_tokens, target: {{ . }}}
{{- end }}
{{- with $scaling.arrivalTokensPerSecond }}
- {name: baton_prefill_arrival_tokens_per_second, target: {{ . }}}
{{- end }}
{{- else if eq .component "decode" }}
{{- with $scaling.kvUsage }}
- {name: baton_decode_kv_used_pods, target: {{ round (mulf . 1000) 0 | int }}m}
{{- end }}
{{- with $scaling.requestsPerPod }}
- {name: baton_decode_requests, target: {{ . }}}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "baton.scaledObject" -}}
{{- $scaling := .values.autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {{- include "baton.scaleTarget" . | nindent 4 }}
  pollingInterval: {{ .root.Values.autoscaling.keda.pollingIntervalSeconds }}
  cooldownPeriod: {{ .root.Values.autoscaling.keda.cooldownSeconds }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- include "baton.scalingBehavior" $scaling | nindent 8 }}
  triggers:
    # Pushed: a first request at zero workers does not wait for a poll.
    - type: external-push
      metadata:
        scalerAddress: {{ include "baton.name" (dict "root" .root "component" "autoscaler") }}.{{ .root.Release.Namespace }}.svc:50070
        role: {{ .component }}
      {{- if .root.Values.tls.enabled }}
      authenticationRef:
        name: {{ include "baton.name" (dict "root" .root "component" "autoscaler") }}
      {{- end }}
{{- end -}}
