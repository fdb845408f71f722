"""The dashboards' variables."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from gpuwatch_dashboards.grafana.uids import DATASOURCE

EVERYTHING = ".*"
"""What "All" stands for. Not the list of values: a node or rank that comes later is in it too."""


def source() -> models.DataSourceRef:
    """Return the reference to the datasource that the reader chose."""
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def datasource_variable() -> dashboard.DatasourceVariable:
    current = models.VariableOption(selected=True, text="gpuwatch", value=DATASOURCE)
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)


def one_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable with one value at a time; `query` is `label_values(…)`."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(source())
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def some_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable of which several values can be chosen; all of them at first."""
    return _with_all(one_of(name, label, query).multi(True)).all_value(EVERYTHING)


def each_of(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return the same, but "All" is the list: for panels that are drawn once for each value."""
    return _with_all(one_of(name, label, query).multi(True))


def _with_all(variable: dashboard.QueryVariable) -> dashboard.QueryVariable:
    return variable.include_all(True).current(models.VariableOption(selected=True, text="All", value="$__all"))


FLEET_VARIABLES = (
    some_of("instance", "Node", "label_values(gpuwatch_build_info, instance)"),
    some_of("user", "User", 'label_values(gpuwatch_gpu_owner_info{user!=""}, user)'),
    some_of("job", "Job", 'label_values(gpuwatch_gpu_owner_info{job_id!=""}, job_id)'),
)
NODE_VARIABLES = (
    one_of("instance", "Node", "label_values(gpuwatch_build_info, instance)"),
    each_of("gpu", "GPU", 'label_values(gpuwatch_gpu_info{instance=~"$instance"}, gpu)'),
)
RUN_VARIABLES = (
    some_of("job", "Job", 'label_values(gpuwatch_run_info{job_id!=""}, job_id)'),
    one_of("run", "Run", 'label_values(gpuwatch_run_info{job_id=~"$job"}, run)'),
    some_of("rank", "Rank", 'label_values(gpuwatch_run_info{run="$run"}, rank)'),
    # of nodes and GPUs, only the run's own
    each_of("instance", "Node", 'label_values(gpuwatch_run_info{run="$run"}, instance)'),
    some_of("gpu", "GPU", 'label_values(gpuwatch_gpu_owner_info{run="$run"}, gpu)'),
)
