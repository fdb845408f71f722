from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.api.client import Client
from gpuwatch.commands.options import AGENT, Agent, Json, Run
from gpuwatch.errors import ConfigError, usable
from gpuwatch.formatting import as_json, file_name
from gpuwatch.hook.requests import ask
from gpuwatch.host.proc import node_name
from gpuwatch.tools.reports.gather import choose
from gpuwatch.tools.stacks.records import lines
from gpuwatch.tools.stacks.spy import Target, take


def stacks(
    run: Run = "last",
    agent: Agent = AGENT,
    pid: Annotated[int | None, typer.Option(help="Process to sample, without asking an agent.", min=1)] = None,
    rank: Annotated[int | None, typer.Option(help="Sample only this rank.", min=0)] = None,
    seconds: Annotated[float, typer.Option(help="Duration of sampling.", min=1, max=600)] = 5.0,
    rate: Annotated[int, typer.Option(help="Samples per second.", min=1, max=1000)] = 50,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the flame graphs.")] = Path(),
    json: Json = False,
) -> None:
    """Sample the stacks of a run's processes on this node, and print the hottest line of your code in each loader
    worker.

    Example: `gpuwatch stacks resnet50-a`, `gpuwatch stacks --pid 4711 --seconds 10`

    The training continues and needs no extra package. Without py-spy the training process samples itself, but not its
    loader workers.

    Exit codes: 0 done, 1 no process can be read (the message says what to do), 2 wrong usage, or no such run.
    """
    found = take(targets_of(agent, pid, run, rank, output / "gpuwatch-stacks-{}.speedscope.json"), seconds, rate)
    if json:
        typer.echo(as_json(found))
        return
    typer.echo("\n".join(lines(found)))
    for graph in found.flame_graphs:
        typer.echo(f"flame graph: {graph} (drop it on https://www.speedscope.app, which keeps it in your browser)")


def trace(
    run: Run = "last",
    agent: Agent = AGENT,
    pid: Annotated[int | None, typer.Option(help="Trace this process; no agent is needed.", min=1)] = None,
    rank: Annotated[int, typer.Option(help="Trace only this rank.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Number of training steps to trace.", min=1, max=1000)] = 20,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; by default a new one.")] = None,
) -> None:
    """Write a torch.profiler trace of a run's next steps: each operator and each kernel, on a timeline.

    Example: `gpuwatch trace resnet50-a --steps 20`

    The run has to allow it: `gpuwatch run --trace`, GPUWATCH_TRACE=1 or `Watch(trace=True)`. Its training thread starts
    and stops the profiler between two steps; without a request there is no cost.

    Exit codes: 0 done, 1 the process does not answer or does not allow traces, 2 wrong usage, or no such run.
    """
    target = targets_of(agent, pid, run, rank, Path("gpuwatch-trace-{}.json"))[0]
    others = (Path(f"{target.flame_graph.stem}-{number}.json") for number in count(2))
    file = output or next(each for each in chain([target.flame_graph], others) if not each.exists())
    with usable(f"--output {file}", "choose a file that you may write to"):
        is_new = not file.exists()
        file.open("ab").close()  # found out before the trace is taken
        if is_new:
            file.unlink()
        typer.echo(f"waiting for {steps} steps of pid {target.pid}", err=True)
        file.write_bytes(ask(target.pid, steps=steps))
    typer.echo(f"{file} (drop it on https://ui.perfetto.dev)")


def targets_of(agent: str, pid: int | None, run: str, rank: int | None, file: Path) -> list[Target]:
    """Return this process, else the run's living ones; {} in `file`: the pid, or name and rank. Raises: ConfigError."""
    if pid is not None:
        return [Target(0, pid, file.with_name(file.name.format(pid)))]
    source = Client(agent, "give --agent URL, or --pid")
    ranks = [each for each in choose(source, run) if rank is None or each.rank == rank]
    if not ranks:
        raise ConfigError(f"--rank {rank}: run {run} has no such rank on this node")
    name, host = ranks[0].name, source.status().host
    if host != (own := node_name()):
        raise ConfigError(
            f"{source.where} is on {host}, this is {own}: run this command there; that agent can sample stacks "
            "automatically ([stacks] automatic = true)"
        )
    living = [
        Target(each.rank, each.host_pid, file.with_name(file.name.format(f"{file_name(name)}-rank{each.rank}")))
        for each in ranks
        if each.status == "running" and each.host_pid is not None
    ]
    if not living:
        raise ConfigError(
            f"{name} has no running process that the agent can see ({', '.join(sorted({each.status for each in ranks}))}); "
            "an agent in a container needs pid: host"
        )
    return living
