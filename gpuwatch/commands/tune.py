"""`gpuwatch tune`: find the loader settings that feed a training step by trying them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Annotated

import typer

from gpuwatch.api.client import Client
from gpuwatch.commands.options import AGENT, Agent
from gpuwatch.errors import ConfigError, require
from gpuwatch.formatting import duration
from gpuwatch.tools.reports.gather import choose
from gpuwatch.tools.tuning import Interrupted, Progress, TuneResult
from gpuwatch.tools.tuning import tune as tune_loader
from gpuwatch.tools.tuning.result import as_json, line, table
from gpuwatch.tools.tuning.target import load

_NARROW = 76
"""Terminals of fewer columns show no progress bar."""
_REDRAW_S = 0.1


def tune(
    loader: Annotated[
        str, typer.Argument(help="module:make_loader or file.py:make_loader.", metavar="MODULE:MAKE_LOADER")
    ],
    step_ms: Annotated[
        float | None, typer.Option(help="A training step without any wait for data, in milliseconds.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Take the step time from this run: its id or name at the agent, or `last`.")
    ] = None,
    agent: Agent = AGENT,
    budget_s: Annotated[float, typer.Option(help="Time budget for all trials, in seconds.", min=1)] = 60.0,
    max_workers: Annotated[int | None, typer.Option(help="Maximum number of workers to try.", min=0)] = None,
    ranks: Annotated[int, typer.Option(help="Training processes that share this node.", min=1)] = 1,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try a loader's settings, alone and within the machine's limits; print the smallest that feed a training step.

    Example: `gpuwatch tune train:make_loader --step-ms 40`

    `make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers)` returns the loader. A DataLoader, or a function without
    arguments that returns one, also works. Each setting runs in a separate process, which is ended when memory or /dev/shm runs short.

    Exit codes: 0 done, 2 no such loader or none that gives a batch, 130 after Ctrl-C, with what was measured so far.
    """
    require("rich", "all")
    if step_ms is not None and run is not None:
        raise ConfigError("--step-ms and --run both give the step time; use one of them")
    if step_ms is not None and not step_ms > 0:
        raise ConfigError(f"--step-ms {step_ms:g}: must be positive, e.g. --step-ms 40")
    step_s = step_ms / 1e3 if step_ms is not None else step_of_run(agent, run) if run is not None else None
    found = load(loader)
    signal.signal(signal.SIGTERM, _interrupt)
    result: TuneResult | None
    try:
        with _progress() as progress:
            result = tune_loader(
                found, step_s, budget_s=budget_s, max_workers=max_workers, ranks=ranks, progress=progress, name=loader
            )
            code = 0
    except Interrupted as interrupted:
        result, code = interrupted.result, 130
    if result is not None:
        width = shutil.get_terminal_size((80, 24)).columns
        typer.echo(json.dumps(as_json(result), indent=2) if as_json_ else table(result, min(width, 120)))
    else:
        typer.echo("gpuwatch: interrupted before anything was measured", err=True)
    raise typer.Exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Give what shows progress on stderr: a line per setting, and on a terminal a bar below them.

    The bar has no thread: a process that forks while a thread holds a lock may hang.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)
    column = Column(
        no_wrap=True, overflow="ellipsis", max_width=min(40, console.width - 16)
    )  # the rest is for the time
    setting = TextColumn("{task.description}", markup=False, table_column=column)
    bars = () if console.width < _NARROW else (BarColumn(bar_width=20),)
    printed, drawn_s = 0, 0.0
    with Bar(
        setting,
        *bars,
        TextColumn("{task.fields[time]}"),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=1.0, time="")

        def show(progress: Progress) -> None:
            nonlocal printed, drawn_s
            for row in progress.rows[printed:]:
                console.print(line(row), markup=False, highlight=False, soft_wrap=not console.is_terminal)
            printed = len(progress.rows)
            if progress.trying is not None and progress.elapsed_s - drawn_s < _REDRAW_S:
                return
            drawn_s = progress.elapsed_s
            if progress.trying is not None:
                bar.update(task, description=f"trying {progress.trying}")
            bar.update(
                task,
                completed=min(1.0, progress.elapsed_s / progress.budget_s),
                time=f"{progress.elapsed_s:.0f} of {duration(progress.budget_s)}",
            )
            bar.refresh()

        yield show


def step_of_run(agent: str, name: str) -> float:
    """Return a run's step time without its wait for data, in seconds: the median of transfer and compute of its last steps."""
    client = Client(agent, "start `gpuwatch up`, give --agent or --step-ms")
    found = choose(client, name)[0]
    steps = client.last_steps(found.run, found.rank, 600)
    pairs = zip(steps.transfer_s, steps.compute_s, strict=True) if steps is not None else ()
    taken = [(transfer or 0.0) + compute for transfer, compute in pairs if compute is not None]
    if not taken or median(taken) <= 0:
        raise ConfigError(f"--run {name}: the agent has no steps of it; give --step-ms")
    step_s = float(median(taken))
    typer.echo(f"a step of {name} takes {duration(step_s)} without its wait for data", err=True)
    return step_s
