from typing import Annotated

import typer

from gpuwatch.commands.options import AGENT, Agent, Prometheus
from gpuwatch.errors import GpuwatchError, SourceError, require


def top(
    agent: Agent = AGENT,
    prometheus: Prometheus = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; the default if stdout is not a terminal.")
    ] = False,
) -> None:
    """Show all runs and GPUs in the terminal: where their time goes, and what to change.

    Example: `gpuwatch top`, `gpuwatch top --agent http://node-17:9478`, `gpuwatch top --once | head`

    Keys: arrows or j k select, g GPUs, f findings, p panels, ? help, q quit.

    Exit codes: 0; with `--once` 1 if the agent or Prometheus does not answer; 130 after Ctrl-C.
    """
    require("rich", "dashboard")
    from gpuwatch_dashboards.sources.agent import AgentSource
    from gpuwatch_dashboards.sources.prometheus import PrometheusSource
    from gpuwatch_dashboards.top import Reader
    from gpuwatch_dashboards.top.pages import is_interactive, print_once

    reader = Reader(PrometheusSource(prometheus, agent_url=agent) if prometheus else AgentSource(agent))
    if once or not is_interactive():
        try:
            print_once(reader)
        except SourceError as error:  # exit code 1, not 2: a script may test whether an agent answers
            raise GpuwatchError(str(error)) from error
        return
    require("textual", "dashboard")
    from gpuwatch_dashboards.top.app import watch

    if code := watch(reader):
        raise typer.Exit(code)
