{{/* Objects of one role: (dict "root" $ "component" "prefill" "values" .Values.prefill). Both roles are made of these. */}}

{{- define "baton.prefillSettings" -}}
{{- include "baton.workerSettings" (dict "root" . "component" "prefill" "values" .Values.prefill) -}}
{{- end -}}

{{- define "baton.decodeSettings" -}}
{{- include "baton.workerSettings" (dict "root" . "component" "decode" "values" .Values.decode) -}}
{{- end -}}

{{- define "baton.bothSettings" -}}
{{- include "baton.workerSettings" (dict "root" . "component" "both" "values" .Values.both) -}}
{{- end -}}

{{- define "baton.workerSettings" -}}
{{- $root := .root -}}
{{- $model := $root.Values.model -}}
{{- $settings := mergeOverwrite (deepCopy .values.settings) (deepCopy $root.Values.kv.settings) (include "baton.logSettings" $root | fromYaml) (include "baton.tlsSettings" $root | fromYaml) (include "baton.healthSettings" $root | fromYaml) (include "baton.traceSettings" $root | fromYaml) -}}
{{- $_ := set $settings "listen" "0.0.0.0:50061" -}}
{{- $_ := set $settings "drain_timeout" .values.drainTimeoutSeconds -}}
{{- $_ := set $settings "metrics_port" $root.Values.metrics.workerPort -}}
{{- if ne $root.Values.metrics.aliases.workers "none" }}{{- $_ := set $settings "metrics_aliases" $root.Values.metrics.aliases.workers }}{{ end -}}
{{- $_ := set $settings "connector" $root.Values.kv.connector -}}
{{- with $root.Values.kv.store }}{{- $_ := set $settings "store" . }}{{ end -}}
{{- if include "baton.lmcache" $root }}{{- $_ := set $settings "lmcache_address" "127.0.0.1:5555" }}{{ end -}}
{{- if has "shared_storage" (list $root.Values.kv.connector $root.Values.kv.store) -}}
{{- $_ := set $settings "kv_dir" "/kv/blocks" -}}
{{- if not (hasKey $root.Values.kv.settings "kv_dir_size_gb") -}}
{{- $_ := set $settings "kv_dir_size_gb" (include "baton.gib" $root.Values.kv.sharedStorage.size | float64 | mulf 0.9) -}}
{{- end -}}
{{- end -}}
{{- if eq $model.volume.type "none" -}}
{{- $_ := set $settings "model" $model.name -}}
{{- else -}}
{{- $_ := set $settings "model" (printf "%s/%s" ($model.volume.mountPath | trimSuffix "/") ($model.name | trimPrefix "/") | trimSuffix "/") -}}
{{- end -}}
{{- $_ := set $settings "dtype" $model.dtype -}}
{{- with $model.servedName }}{{- $_ := set $settings "served_model_name" . }}{{ end -}}
{{- if .values.multiNode.enabled -}}
{{- $settings = mergeOverwrite $settings (include "baton.ranksSettings" . | fromYaml) -}}
{{- end -}}
{{- if .values.gpus }}{{- if not (hasKey $settings "device") }}{{- $_ := set $settings "device" "cuda" }}{{ end }}{{ end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Of a worker on several pods, each with as many ranks. Their places in the group come from the LWS_* variables, so all pods have
     the same settings. */}}
{{- define "baton.ranksSettings" -}}
{{- $size := int .values.multiNode.size -}}
{{- $given := int (default $size .values.settings.tensor_parallel_size) -}}
{{- if mod $given $size -}}
{{- fail (printf "%s.settings.tensor_parallel_size: is %d, but %s.multiNode.size is %d: all pods have as many ranks" .component $given .component $size) -}}
{{- end -}}
{{- if .values.gpus -}}
{{- fail (printf "%s.gpus: is %d, but ranks on several pods (%s.multiNode) compute on CPUs" .component (int .values.gpus) .component) -}}
{{- end -}}
num_hosts: {{ $size }}
tensor_parallel_size: {{ $given }}
ranks_secret_file: /etc/baton-ranks/secret
# Pods may wait for nodes and images.
ranks_timeout: {{ default .values.startupTimeoutSeconds .values.settings.ranks_timeout }}
{{- end -}}

{{/* Name of the Secret by which the pods of one worker know each other. */}}
{{- define "baton.ranksSecret" -}}
{{ default (printf "%s-ranks" (include "baton.name" .)) .values.multiNode.existingSecret }}
{{- end -}}

{{- define "baton.workerService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "baton.serviceName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  # Headless: routers see every worker and choose by themselves.
  clusterIP: None
  selector:
    {{- include "baton.selector" . | nindent 4 }}
    {{- if .values.multiNode.enabled }}
    leaderworkerset.sigs.k8s.io/worker-index: "0"
    {{- end }}
  ports:
    - name: grpc
      port: 50061
      targetPort: grpc
      appProtocol: {{ ternary "https" "kubernetes.io/h2c" .root.Values.tls.enabled }}
{{- end -}}

{{- define "baton.worker" -}}
{{- $pod := merge (dict "gracePeriod" (include "baton.gracePeriod" .values) "usesApi" false) . -}}
{{- $multiNode := .values.multiNode -}}
{{- if $multiNode.enabled -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
metadata:
  name: {{ include "baton.name" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  {{- if not (include "baton.autoscaled" .) }}
  replicas: {{ .values.replicas }}
  {{- end }}
  {{- if $multiNode.enabled }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      maxSurge: {{ .values.strategy.maxSurge }}
      maxUnavailable: {{ .values.strategy.maxUnavailable }}
  leaderWorkerTemplate:
    size: {{ $multiNode.size }}
    # A group that lost a member has lost a shard of its weights and KV.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      metadata: {{- include "baton.podMetadata" . | nindent 8 }}
      spec: {{- include "baton.workerPod" (merge (dict "args" $multiNode.leaderArgs "member" false) $pod) | nindent 8 }}
    workerTemplate:
      metadata: {{- include "baton.podMetadata" . | nindent 8 }}
      spec: {{- include "baton.workerPod" (merge (dict "args" $multiNode.memberArgs "member" true) $pod) | nindent 8 }}
  {{- else }}
  progressDeadlineSeconds: {{ add (int .values.startupTimeoutSeconds) 60 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {{- toYaml .values.strategy | nindent 6 }}
  selector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
  template:
    metadata: {{- include "baton.podMetadata" . | nindent 6 }}
    spec: {{- include "baton.workerPod" (merge (dict "args" (list) "member" false) $pod) | nindent 6 }}
  {{- end }}
{{- end -}}

{{- define "baton.workerPod" -}}
{{- $values := .values -}}
{{- $root := .root -}}
{{- $volume := $root.Values.model.volume -}}
{{- $command := ternary "worker" .component (eq .component "both") -}}
{{- $healthPort := include "baton.healthPort" (dict "root" $root "port" 50061) -}}
{{- $lmcache := include "baton.lmcache" $root -}}
{{ include "baton.podSpec" . }}
{{- if $lmcache }}
initContainers: {{- include "baton.lmcacheContainer" $root | nindent 2 }}
{{- end }}
containers:
  - name: {{ $command }}
    image: {{ include "baton.image" (dict "root" $root "image" $root.Values.images.worker) }}
    imagePullPolicy: {{ $root.Values.images.pullPolicy }}
    args:
      - {{ $command }}
      - --config=/etc/baton/settings.yaml
      - --advertise=$(POD_IP):50061
      {{- range .args }}
      - {{ . | quote }}
      {{- end }}
    env: {{- include "baton.env" . | nindent 6 }}
    {{- if not .member }}
    ports:
      - {name: grpc, containerPort: 50061}
      - {name: metrics, containerPort: {{ $root.Values.metrics.workerPort }}}
      {{- if $root.Values.tls.enabled }}
      - {name: health, containerPort: {{ $healthPort }}}
      {{- end }}
      {{- if $values.multiNode.enabled }}
      - {name: ranks, containerPort: 50065}
      {{- end }}
    # It answers once the model is loaded; that may take long, and only then do the other two probes start.
    startupProbe:
      grpc: {port: {{ $healthPort }}}
      periodSeconds: 2
      failureThreshold: {{ div (add (int $values.startupTimeoutSeconds) 1) 2 }}
    readinessProbe:
      grpc: {port: {{ $healthPort }}}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 2
    # Patient: a worker that drains says that it does not serve, and has to live until its streams have ended.
    livenessProbe:
      grpc: {port: {{ $healthPort }}}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ add (div (int $values.drainTimeoutSeconds) 10) 4 }}
    {{- else }}
    # A member has no port to probe. If it ends, stands still or cannot be reached, its leader ends, and so does the group.
    {{- end }}
    lifecycle: {{- include "baton.preStop" $values.preStopSeconds | nindent 6 }}
    resources: {{- include "baton.workerResources" $values | nindent 6 }}
    securityContext: {{- include "baton.containerSecurity" (dict "ipcLock" $values.rdma.ipcLock) | nindent 6 }}
    volumeMounts:
      {{- include "baton.mounts" . | nindent 6 }}
      - name: shm
        mountPath: /dev/shm
      {{- if has "shared_storage" (list $root.Values.kv.connector $root.Values.kv.store) }}
      - name: kv
        mountPath: /kv
      {{- end }}
      {{- if $values.multiNode.enabled }}
      - name: ranks
        mountPath: /etc/baton-ranks
        readOnly: true
      {{- end }}
      {{- if ne $volume.type "none" }}
      - name: model
        mountPath: {{ $volume.mountPath }}
        readOnly: true
        {{- with $volume.subPath }}
        subPath: {{ . }}
        {{- end }}
      {{- end }}
volumes:
  {{- include "baton.volumes" . | nindent 2 }}
  - name: shm
    emptyDir:
      medium: Memory
      {{- if not $lmcache }}
      sizeLimit: {{ $values.shmSize }}
      {{- end }}
  {{- if has "shared_storage" (list $root.Values.kv.connector $root.Values.kv.store) }}
  - name: kv
    {{- include "baton.kvVolume" $root | nindent 4 }}
  {{- end }}
  {{- if $values.multiNode.enabled }}
  - name: ranks
    secret:
      secretName: {{ include "baton.ranksSecret" . }}
      defaultMode: 0440
  {{- end }}
  {{- if eq $volume.type "pvc" }}
  - name: model
    persistentVolumeClaim:
      claimName: {{ required "model.volume.claimName: names the claim that holds the model" $volume.claimName }}
      readOnly: true
  {{- else if eq $volume.type "hostPath" }}
  - name: model
    hostPath:
      path: {{ required "model.volume.hostPath: names the folder that holds the model" $volume.hostPath }}
      type: Directory
  {{- end }}
{{- end -}}

{{/* GiB of a size such as 20Gi. */}}
{{- define "baton.gib" -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- divf (mulf (trimSuffix $unit . | float64) (get $units $unit)) 1073741824.0 -}}
{{- end -}}

{{- define "baton.kvVolume" -}}
{{- $storage := .Values.kv.sharedStorage -}}
{{- if eq $storage.type "hostPath" -}}
hostPath:
  path: {{ required "kv.sharedStorage.hostPath: names the folder that all workers share" $storage.hostPath }}
  type: Directory
{{- else if eq $storage.type "existingClaim" -}}
persistentVolumeClaim:
  claimName: {{ required "kv.sharedStorage.claimName: names the claim that all workers share" $storage.claimName }}
{{- else -}}
persistentVolumeClaim:
  claimName: {{ include "baton.fullname" . }}-kv
{{- end -}}
{{- end -}}

{{/* What the user asked for, and the devices. A device's request and limit are one number. */}}
{{- define "baton.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- $devices := dict -}}
{{- if .gpus }}{{- $_ := set $devices .gpuResource (toString .gpus) }}{{ end -}}
{{- if .rdma.devices }}{{- $_ := set $devices .rdma.resource (toString .rdma.devices) }}{{ end -}}
{{- if $devices -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $devices) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $devices) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
