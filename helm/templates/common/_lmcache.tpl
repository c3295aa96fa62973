{{/* Whether each worker's pod has an LMCache server. */}}
{{- define "baton.lmcache" -}}
{{- if .Values.lmcache.enabled -}}
{{- if ne .Values.kv.store "lmcache" -}}
{{- fail "lmcache.enabled: goes with kv.store: lmcache (and kv.connector: nixl)" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* A sidecar: it starts before the worker and ends after it. Memory that it shares with the worker is /dev/shm of the
pod, and its gRPC, which asks nobody who he is, listens inside the pod alone. */}}
{{- define "baton.lmcacheContainer" -}}
{{- $lmcache := .Values.lmcache -}}
{{- $resources := dict "requests" (dict "cpu" "500m" "memory" (printf "%dGi" (add (int $lmcache.sizeGiB) 2))) "limits" (dict "memory" (printf "%dGi" (add (int $lmcache.sizeGiB) 2))) -}}
- name: lmcache
  image: {{ required "lmcache.image: names an image with LMCache" $lmcache.image }}
  imagePullPolicy: {{ .Values.images.pullPolicy }}
  restartPolicy: Always
  command: [lmcache, server]
  args:
    - --transport=grpc
    - --host=127.0.0.1
    - --port=5555
    - --http-host=127.0.0.1
    - --http-port=8081
    - --supported-transfer-mode=engine_driven
    - --shm-name=baton
    - --no-l1-use-lazy
    - --l1-size-gb={{ $lmcache.sizeGiB }}
    - --l1-write-ttl-seconds=30
    - --eviction-policy=LRU
    - --max-workers=4
    {{- with $lmcache.redis.url }}
    {{- $address := urlParse . }}
    {{- $host := splitList ":" $address.host }}
    - {{ dict "type" "resp" "host" (first $host) "port" (ternary (last $host) "6379" (gt (len $host) 1) | int) | toJson | printf "--l2-adapter=%s" | quote }}
    {{- end }}
  env:
    - {name: LMCACHE_LOG_LEVEL, value: WARNING}
    - {name: LMCACHE_TRACK_USAGE, value: "false"}
    - {name: LMCACHE_DISABLE_BANNER, value: "1"}
    - {name: HOME, value: /tmp}
    {{- with $lmcache.redis.existingSecret }}
    - name: LMCACHE_RESP_USERNAME
      valueFrom: {secretKeyRef: {name: {{ . }}, key: username, optional: true}}
    - name: LMCACHE_RESP_PASSWORD
      valueFrom: {secretKeyRef: {name: {{ . }}, key: password}}
    {{- end }}
  # It listens inside the pod alone, so the kubelet cannot connect to it.
  startupProbe:
    exec:
      command: [python3, -c, "import socket; socket.create_connection(('127.0.0.1', 5555), 2).close()"]
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: 90
  resources: {{- toYaml (mergeOverwrite $resources (deepCopy $lmcache.resources)) | nindent 4 }}
  securityContext: {{- include "baton.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
{{- end -}}
