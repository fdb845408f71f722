{{/* The release's name as far as it is not the chart's already. */}}
{{- define "gpuwatch.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "gpuwatch.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What selects the pods of a component: (dict "root" $ "component" "agent"). */}}
{{- define "gpuwatch.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image's full name: (dict "root" $ "image" "gpuwatch-agent"). */}}
{{- define "gpuwatch.image" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* "true" where objects of the Prometheus operator are wanted. */}}
{{- define "gpuwatch.operator" -}}
{{- $wanted := .Values.prometheus.operator -}}
{{- if or (eq $wanted "always") (and (eq $wanted "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}true{{ end }}
{{- end }}

{{/* What a monitor does to its targets' labels: the job that the rules know, the node's name as the instance. A pod's own name
     would restart every series whenever the pod is replaced, though its counters go on. */}}
{{- define "gpuwatch.relabelings" -}}
- {targetLabel: job, replacement: gpuwatch}
- {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance}
- {action: labeldrop, regex: pod|container|endpoint|service}
{{- end }}
