import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from gpuwatch.api.client import Client, without_password
from gpuwatch.commands.up import Child, agent_and_page, free_port, running, wait_for_end
from gpuwatch.errors import ConfigError, GpuwatchError, SourceError
from gpuwatch.formatting import duration, percent
from gpuwatch.tools.demo_training import BOTTLENECKS
from gpuwatch.tools.reports.ledgers import job_text

_BOTTLENECK = f"The bottleneck of the training: {', '.join(BOTTLENECKS)}."


def demo(
    bottleneck: Annotated[str, typer.Option(help=_BOTTLENECK)] = "input",
    seconds: Annotated[float, typer.Option(help="Duration of the training, in seconds.", min=5)] = 40.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the page running afterwards, until Ctrl-C.")] = False,
) -> None:
    """Train on synthetic data with a chosen bottleneck, and show the live page, the verdict and its advice.

    Example: `gpuwatch demo --bottleneck epoch-start --seconds 60 --keep`

    The demo starts its own agent with its own history and ports; an agent that is already running is not affected.
    """
    if bottleneck not in BOTTLENECKS:
        raise ConfigError(f"--bottleneck {bottleneck}: no such bottleneck; choose one of {', '.join(BOTTLENECKS)}")
    if find_spec("torch") is None:
        raise ConfigError("the demo trains with PyTorch, which is not installed: pip install torch")
    command = [sys.executable, "-m", "gpuwatch.tools.demo_training", bottleneck, str(seconds)]
    with tempfile.TemporaryDirectory(prefix="gpuwatch-demo-") as directory:
        endpoint = f"ipc://{directory}/hook.sock"
        http, port = f"127.0.0.1:{free_port(9478)}", free_port(8501)
        with agent_and_page(http, port, [endpoint], Path(directory) / "history.db") as (children, agent_url, page_url):
            typer.echo(f"page    {page_url}\nagent   {without_password(agent_url)}/metrics\n")
            typer.echo(f"A training with the bottleneck '{bottleneck}' runs for {seconds:.0f} s. Live verdicts:")
            environment = {"GPUWATCH_ENDPOINT": endpoint, "GPUWATCH_RUN": f"demo-{bottleneck}"}
            if bottleneck == "crash":
                command.append(f"{directory}/checkpoint.pt")
                environment["GPUWATCH_JOB"] = f"demo-{bottleneck}"
            with running(command, environment) as training:
                _print_verdicts(training, agent_url, time.monotonic())
            if training.returncode:
                raise GpuwatchError(f"the demo's training ended with status {training.returncode}, see above")
            if bottleneck == "crash":
                typer.echo(f"\n{_job(agent_url)}")
            others = ", ".join(each for each in BOTTLENECKS if each != bottleneck)
            typer.echo(f"\nNext:\n  gpuwatch demo --bottleneck NAME            {others}")
            typer.echo("  for batch in gpuwatch.watch(loader):      the one line in your own training loop\n")
            if keep:
                typer.echo(f"The page keeps running at {page_url}; press Ctrl-C to stop it.")
                raise typer.Exit(wait_for_end(children))


def _job(agent_url: str) -> str:
    """Return the ledger of the only job, which has ended, and its verdict."""
    (job,) = Client(agent_url).caught_up().jobs()
    wall_s = sum(job.states.values())
    verdict = f"killed {job.interruptions} times: {percent(job.goodput_ratio or 0.0)} of {duration(wall_s)} went into new steps"
    wasted_s = sum(job.states.get(state, 0.0) for state in ("down", "restart", "redone", "lost"))
    verdict += f", {percent(wasted_s / wall_s)} into restarts and repeated steps"
    gain = "".join(f"\n  {found.advice.capitalize()}: {found.gain} the throughput, predicted" for found in job.findings)
    return f"{job_text(asdict(job))}\n\nVerdict: {verdict}{gain}"


def _print_verdicts(training: Child, agent_url: str, begun: float) -> None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            training.wait(5.0)
            return
        with suppress(SourceError):
            runs = Client(agent_url).runs()
            if runs and runs[0].verdict is not None and runs[0].status == "running":
                typer.echo(f"  {time.monotonic() - begun:4.0f} s  {runs[0].verdict.sentence}")
