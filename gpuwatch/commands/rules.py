"""`gpuwatch rules`."""

from __future__ import annotations

import typer

from gpuwatch.cli import require


def rules() -> None:
    """Print the Prometheus recording and alert rules.

    Example: `gpuwatch rules > /etc/prometheus/rules/gpuwatch.yml`
    """
    require("yaml", "agent")
    from gpuwatch.alert_rules import AlertThresholds, render

    typer.echo(render(AlertThresholds()), nl=False)
