"""`gpuwatch demo`: a real training whose bottleneck is chosen, watched live."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.api import Client
from gpuwatch.commands.children import Child, free_port, wait_for_end
from gpuwatch.commands.up import running
from gpuwatch.errors import ConfigError, GpuwatchError, SourceError
from gpuwatch.extras import require


class Bottleneck(str, Enum):
    """What the demo's training suffers from."""

    input = "input"
    transfer = "transfer"
    epoch_start = "epoch-start"
    eval = "eval"
    shm = "shm"
    none = "none"


_NEXT = {
    Bottleneck.input: "gpuwatch demo --bottleneck none      the same model with data that is ready",
    Bottleneck.transfer: "gpuwatch demo --bottleneck input     a loader that is too slow",
    Bottleneck.epoch_start: "gpuwatch demo --bottleneck eval      training that stops to evaluate",
    Bottleneck.eval: "gpuwatch demo --bottleneck shm       a /dev/shm that is nearly full",
    Bottleneck.shm: "gpuwatch demo --bottleneck input     a loader that is too slow",
    Bottleneck.none: "gpuwatch demo --bottleneck input     a loader that is too slow",
}


def demo(
    bottleneck: Annotated[Bottleneck, typer.Option(help="What the training suffers from.")] = Bottleneck.input,
    seconds: Annotated[float, typer.Option(help="How long it trains.", min=5)] = 40.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the page up at the end, until Ctrl-C.")] = False,
) -> None:
    """Train on synthetic data with a chosen bottleneck, and watch it: page, verdict, advice.

    Example: `gpuwatch demo --bottleneck epoch-start --seconds 60 --keep`

    It has an agent, a history and ports of its own, and leaves a running agent alone.
    """
    try:
        require("torch", "all")
    except GpuwatchError:
        raise ConfigError("the demo trains with PyTorch, which is not installed: pip install torch") from None
    command = _training_command(bottleneck, seconds)
    with tempfile.TemporaryDirectory(prefix="gpuwatch-demo-") as directory:
        endpoint = f"ipc://{directory}/hook.sock"
        http, port = f"127.0.0.1:{free_port(9478)}", free_port(8501)
        with running(http, port, [endpoint], Path(directory) / "history.db") as (children, agent_url, page_url):
            typer.echo(f"page    {page_url}\nagent   {agent_url}/metrics\n")
            typer.echo(f"A training with the bottleneck '{bottleneck.value}' runs for {seconds:.0f} s. Live verdicts:")
            environment = {**os.environ, "GPUWATCH_ENDPOINT": endpoint, "GPUWATCH_RUN": f"demo-{bottleneck.value}"}
            with Child("training", command, environment) as training:
                _tell_live(training, agent_url)
            code = training.process.returncode
            if code != 0:
                raise GpuwatchError(f"the demo's training ended with status {code}, see above")
            typer.echo(f"\nNext:\n  {_NEXT[bottleneck]}")
            typer.echo("  for batch in gpuwatch.watch(loader):      the one line in a training loop of yours\n")
            if keep:
                typer.echo(f"The page stays up at {page_url}; Ctrl-C ends it.")
                raise typer.Exit(wait_for_end(children))


def _tell_live(training: Child, agent_url: str) -> None:
    """Print the agent's verdict every few seconds while the training runs."""
    begun = time.monotonic()
    due = begun + 5.0
    while training.process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() < due:
            continue
        due += 5.0
        verdict = _verdict(agent_url)
        if verdict is not None and training.process.poll() is None:
            typer.echo(f"  {time.monotonic() - begun:4.0f} s  {verdict}")


def _verdict(agent_url: str) -> str | None:
    try:
        runs = Client(agent_url).runs()
    except SourceError:
        return None
    return runs[0].verdict.sentence if runs and runs[0].verdict is not None else None


def _training_command(bottleneck: Bottleneck, seconds: float) -> list[str]:
    """Return the training's command line. Raises: ConfigError where this machine cannot have that bottleneck."""
    command = [
        sys.executable,
        "-m",
        "gpuwatch.tools.demo_training",
        "--bottleneck",
        bottleneck.value,
        "--seconds",
        str(seconds),
    ]
    if bottleneck is Bottleneck.transfer and not _has_gpu():
        raise ConfigError(
            "--bottleneck transfer needs a GPU: without one nothing is copied to a device; choose another bottleneck"
        )
    if bottleneck is Bottleneck.shm:
        from gpuwatch.tools.demo_training import small_shm_command

        return small_shm_command(command)
    return command


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
