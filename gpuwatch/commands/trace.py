from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.api.client import Client
from gpuwatch.commands.options import AGENT, Agent, Run
from gpuwatch.commands.stacks import targets_of
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import file_name
from gpuwatch.hook.requests import ask


def trace(
    run: Run = "last",
    agent: Agent = AGENT,
    pid: Annotated[int | None, typer.Option(help="Trace this process; no agent is needed.", min=1)] = None,
    rank: Annotated[int, typer.Option(help="Trace this rank.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Training steps that are traced.", min=1, max=1000)] = 20,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
) -> None:
    """Write a torch.profiler trace of a run's next steps: each operator and each kernel, on a time line.

    Example: `gpuwatch trace resnet50-a --steps 20`

    The run has to allow it: `gpuwatch run --trace`, GPUWATCH_TRACE=1 or `Watch(trace=True)`. Its training thread starts and stops the
    profiler between two steps; until then it costs nothing.

    Exit codes: 0 done, 1 a process that does not answer, or does not allow it, 2 wrong use, or no such run.
    """
    if pid is None:
        pid = targets_of(Client(agent, "give --agent URL, or --pid"), run, rank, Path())[0].pid
    file = output or Path(f"gpuwatch-trace-{file_name(run)}-rank{rank}.json")
    typer.echo(f"waiting for {steps} steps of pid {pid}", err=True)
    try:
        file.write_bytes(ask(pid, steps=steps))
    except OSError as error:
        raise ConfigError(f"--output {file}: {error.strerror}; choose a file that you may write to") from error
    typer.echo(f"{file} (drop it on https://ui.perfetto.dev)")
