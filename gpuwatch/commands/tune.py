import signal
import sys
from contextlib import redirect_stdout
from statistics import median
from typing import Annotated

import typer
from typer import Argument, Option

from gpuwatch.api.client import Client
from gpuwatch.commands.options import AGENT, Agent, Json
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import as_json, duration
from gpuwatch.tools.reports.gather import choose
from gpuwatch.tools.tuning import tune as tune_loader
from gpuwatch.tools.tuning.result import TuneResult, line
from gpuwatch.tools.tuning.sweep import Interrupted
from gpuwatch.tools.tuning.target import load

_STEP_MS = "Training step time without data wait, in milliseconds."


def tune(
    loader: Annotated[str, Argument(help="module:make_loader or file.py:make_loader.", metavar="MODULE:MAKE_LOADER")],
    step_ms: Annotated[float | None, Option(help=_STEP_MS, min=0.001)] = None,
    run: Annotated[str | None, Option(help="Run to take the step time from: id, name or `last`.")] = None,
    agent: Agent = AGENT,
    budget_s: Annotated[float, Option(help="Time budget for all trials, in seconds.", min=1)] = 60.0,
    max_workers: Annotated[int | None, Option(help="Maximum number of workers to try.", min=0)] = None,
    ranks: Annotated[int, Option(help="Training processes that share this node.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Benchmark settings of a DataLoader within the machine's limits; print the smallest that keep up with training.

    Example: `gpuwatch tune train:make_loader --step-ms 40`

    `make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers)` returns the loader. A DataLoader, or a
    function without arguments that returns one, also works. Each setting runs in its own process, which is stopped if
    memory or /dev/shm runs short.

    Exit codes: 0 done, 2 no such loader, or one without batches, 130 after Ctrl-C (the results so far are printed).
    """
    if step_ms is not None and run is not None:
        raise ConfigError("--step-ms and --run both set the step time; use one of them")
    step_s = step_ms / 1e3 if step_ms is not None else step_of_run(agent, run) if run is not None else None
    with redirect_stdout(sys.stderr):  # stdout is the result's
        found = load(loader)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result: TuneResult | None
    try:
        result = tune_loader(
            found,
            step_s,
            budget_s=budget_s,
            max_workers=max_workers,
            ranks=ranks,
            progress=lambda row: typer.echo(line(row), err=True),
            name=loader,
        )
        code = 0
    except Interrupted as interrupted:
        result, code = interrupted.result, 130
    if result is not None:
        typer.echo(as_json(result) if json else str(result))
    else:
        typer.echo("gpuwatch: interrupted before anything was measured", err=True)
    raise typer.Exit(code)


def step_of_run(agent: str, name: str) -> float:
    """Return a run's step without data wait, in seconds: the median of its last ones, on the device if measured."""
    client = Client(agent, "start `gpuwatch up`, give --agent or --step-ms")
    found = choose(client, name)[0]
    steps = client.last_steps(found.run, found.rank, 600)
    on_device = steps is not None and any(wait is not None for wait in steps.input_wait_s)
    names = ("device_compute_s", "device_transfer_s", "host_wait_s") if on_device else ("compute_s", "transfer_s")
    rows = zip(*(getattr(steps, name) for name in names), strict=True) if steps is not None else ()
    taken = [sum(part or 0.0 for part in parts) for parts in rows if parts[0] is not None]
    if not taken or median(taken) <= 0:
        raise ConfigError(f"--run {name}: the agent has no steps of it; give --step-ms")
    step_s = float(median(taken))
    typer.echo(f"a step of {name} takes {duration(step_s)} without data wait", err=True)
    return step_s
