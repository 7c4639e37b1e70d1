{{- define "smb.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: soft-memory-box
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "smb.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* HOST:PORT of each coordinator, with commas between. */}}
{{- define "smb.coordinators" -}}
{{- $name := printf "%s-coordinator" .Release.Name -}}
{{- $all := list -}}
{{- range $i := until (int .Values.coordinator.replicas) -}}
{{- $all = append $all (printf "%s-%d.%s:7070" $name $i $name) -}}
{{- end -}}
{{- join "," $all -}}
{{- end }}

{{/* MiB of the volume of memory: room for headers and journals above the capacity. */}}
{{- define "smb.volumeMiB" -}}
{{- $capacity := mul 1024 (int .Values.memserver.capacityGiB) -}}
{{- add $capacity 512 (div $capacity 16) -}}
{{- end }}

{{/* MiB of the container: the volume counts, and the process comes on top. */}}
{{- define "smb.memoryMiB" -}}
{{- add (include "smb.volumeMiB" . | int) 512 -}}
{{- end }}

{{/* What pods of both kinds have. */}}
{{- define "smb.pod" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false  # its variables begin with SMB_ too
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* Pods of one kind on several nodes and zones: root, name, whenUnsatisfiable for nodes. */}}
{{- define "smb.spread" -}}
topologySpreadConstraints:  # so that a lost node or zone takes as few as possible
  {{- range list (list "kubernetes.io/hostname" .nodes) (list "topology.kubernetes.io/zone" "ScheduleAnyway") }}
  - maxSkew: 1
    topologyKey: {{ first . }}
    whenUnsatisfiable: {{ last . }}
    labelSelector:
      matchLabels:
        app.kubernetes.io/name: {{ $.name }}
        app.kubernetes.io/instance: {{ $.root.Release.Name }}
  {{- end }}
{{- end }}

{{/* Whether a memory server does something before it stops. */}}
{{- define "smb.stops" -}}
{{- if or .Values.memserver.drainSecret .Values.memserver.preStop }}yes{{ end -}}
{{- end }}

{{/* What containers of both kinds have: root, and whether the container does something before it stops. */}}
{{- define "smb.container" -}}
image: {{ include "smb.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
  {{- if .stops }}
  terminationGracePeriodSeconds: 30
  {{- end }}
{{- end }}

{{- define "smb.mounts" -}}
- name: config
  mountPath: /etc/smb/smb.toml
  subPath: smb.toml
  readOnly: true
- name: credentials
  mountPath: /etc/smb/credentials
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "smb.volumes" -}}
- name: config
  configMap:
    name: {{ .Release.Name }}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "smb.token" -}}
- secret:
    name: {{ required "metrics.tokenSecret: name a secret with the key `token`" .Values.metrics.tokenSecret }}
    items:
      - {key: token, path: metrics-token}
{{- end }}

{{/* A certificate of cert-manager: root, name, secret, uris, names. */}}
{{- define "smb.certificate" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .secret }}
  labels:
    {{- include "smb.labels" .root | nindent 4 }}
spec:
  secretName: {{ .secret }}
  duration: {{ .root.Values.certificates.duration }}
  privateKey: {algorithm: ECDSA, size: 256, encoding: PKCS8, rotationPolicy: Always}
  usages: {{ toJson .usages }}
  uris: {{ toJson .uris }}
  {{- with .names }}
  dnsNames: {{ toJson . }}
  {{- end }}
  issuerRef:
    name: {{ .root.Values.certificates.issuer }}
    kind: {{ .root.Values.certificates.issuerKind }}
{{- end }}
