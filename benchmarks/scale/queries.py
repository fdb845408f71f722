"""What is asked of Prometheus at scale: each question by the raw counters and by what the rules record."""

_OWNED = "* on (job, instance, gpu, UUID) group_left (user, run) gpuwatch_gpu_owner_info"

QUERIES: dict[str, tuple[str, str]] = {
    "fleet: GPUs that starve": (
        'sum(rate(gpuwatch_gpu_seconds_total{state="input_wait"}[5m]))',
        'kind:gpuwatch_gpu_seconds:rate5m{kind="starved"}',
    ),
    "fleet: share that starves": (
        'sum(rate(gpuwatch_gpu_seconds_total{state="input_wait"}[5m])) / sum(rate(gpuwatch_gpu_seconds_total[5m]))',
        'kind:gpuwatch_gpu_seconds:share5m{kind="starved"}',
    ),
    "users: GPUs held idle": (
        'sum by (user) (sum without (state) (rate(gpuwatch_gpu_seconds_total{state="held_idle"}[5m])) ' + _OWNED + ")",
        'sum by (user) (owner_kind:gpuwatch_gpu_seconds:rate{kind="idle"})',
    ),
    "runs: the ten that starve most GPUs": (
        'topk(10, sum by (run) (sum without (state) (rate(gpuwatch_gpu_seconds_total{state="input_wait"}[5m])) '
        + _OWNED + '{run!=""}))',
        'topk(10, sum by (run) (owner_kind:gpuwatch_gpu_seconds:rate{kind="starved",run!=""}))',
    ),
    "nodes: useful share": (
        'sum by (instance) (rate(gpuwatch_gpu_seconds_total{state="compute"}[5m]))'
        " / sum by (instance) (rate(gpuwatch_gpu_seconds_total[5m]))",
        'sum by (instance) (owner_kind:gpuwatch_gpu_seconds:rate{kind="useful"})'
        ' / sum by (instance) (owner_kind:gpuwatch_gpu_seconds:rate{kind="all"})',
    ),
}  # fmt: skip
"""By question: (raw, recorded)."""
