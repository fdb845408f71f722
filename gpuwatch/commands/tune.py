"""`gpuwatch tune`: the loader settings that feed a training step, found by trying."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Annotated

import typer

from gpuwatch.api import Client
from gpuwatch.errors import ConfigError
from gpuwatch.extras import require
from gpuwatch.formatting import duration
from gpuwatch.tools.tuning import Interrupted, Progress, Setting, TuneResult
from gpuwatch.tools.tuning import tune as tune_loader
from gpuwatch.tools.tuning.result import as_json, line, table
from gpuwatch.tools.tuning.target import load

_NARROW = 76
"""Columns of a terminal below which there is no room for a bar beside the words."""


def tune(
    loader: Annotated[
        str, typer.Argument(help="module:make_loader or file.py:make_loader.", metavar="MODULE:MAKE_LOADER")
    ],
    step_ms: Annotated[float | None, typer.Option(help="A training step without any wait, in milliseconds.")] = None,
    run: Annotated[str | None, typer.Option(help="Take the step from this run: its id or name at the agent.")] = None,
    agent: Annotated[str, typer.Option(help="The agent's URL.", envvar="GPUWATCH_AGENT")] = "http://127.0.0.1:9478",
    budget_s: Annotated[float, typer.Option(help="How long to try, in seconds.", min=1)] = 60.0,
    max_workers: Annotated[int | None, typer.Option(help="The most workers to try.", min=0)] = None,
    ranks: Annotated[int, typer.Option(help="Training processes that share this node.", min=1)] = 1,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try a loader's settings, alone and within what the machine has; print the smallest that feed a training step.

    Example: `gpuwatch tune train:make_loader --step-ms 40`

    `make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers)` returns the loader; a DataLoader, or a function without
    arguments that returns one, will do as well. Each setting runs in a process of its own, which is ended when memory or /dev/shm get
    short. Exit codes: 0 done, 2 no such loader or none that gives a batch, 130 after Ctrl-C, with what was measured so far.
    """
    require("rich", "all")
    if step_ms is not None and run is not None:
        raise ConfigError("--step-ms and --run both say how long a step takes; give one of them")
    if step_ms is not None and not step_ms > 0:
        raise ConfigError(f"--step-ms {step_ms:g}: a step takes some time, e.g. --step-ms 40")
    step_s = step_ms / 1e3 if step_ms is not None else step_of_run(agent, run) if run is not None else None
    found = load(loader)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _bar() as progress:
            result: TuneResult | None = tune_loader(
                found,
                step_s,
                budget_s=budget_s,
                max_workers=max_workers,
                ranks=ranks,
                progress=progress,
                name=loader,
            )
    except Interrupted as interrupted:
        result, code = interrupted.result, 130
    else:
        code = 0
    if result is not None:
        width = shutil.get_terminal_size((80, 24)).columns
        typer.echo(json.dumps(as_json(result), indent=2) if as_json_ else table(result, min(width, 120)))
    else:
        typer.echo("gpuwatch: interrupted before anything was measured", err=True)
    raise typer.Exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """Give what shows progress on stderr: a bar on a terminal, a line a setting elsewhere.

    The bar has no thread of its own: a process that forks while a thread holds a lock may hang.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    shown = [0, 0.0]
    if not console.is_terminal:
        yield lambda progress: _log(progress, shown)
        return
    narrow = console.width < _NARROW
    columns = [TextColumn("{task.description}", markup=False), TextColumn("{task.fields[time]}")]
    with Bar(
        *columns[:1],
        *(() if narrow else (BarColumn(bar_width=20),)),
        *columns[1:],
        console=console,
        auto_refresh=False,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=1.0, time="")

        def show(progress: Progress) -> None:
            if progress.trying is not None and progress.elapsed_s - shown[1] < 0.1:
                return
            shown[1] = progress.elapsed_s
            trying = progress.trying
            if trying is not None:
                bar.update(task, description=_short(f"trying {_few(trying) if narrow else trying}", 40))
            else:
                bar.console.print(line(progress.rows[-1]), markup=False, highlight=False)
            bar.update(
                task,
                completed=min(1.0, progress.elapsed_s / progress.budget_s),
                time=f"{progress.elapsed_s:.0f} of {duration(progress.budget_s)}",
            )
            bar.refresh()

        yield show


def _few(setting: Setting) -> str:
    return f"{setting.num_workers} worker{'' if setting.num_workers == 1 else 's'}"


def _log(progress: Progress, shown: list[float]) -> None:
    for row in progress.rows[int(shown[0]) :]:
        print(line(row), file=sys.stderr, flush=True)
    shown[0] = len(progress.rows)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def step_of_run(agent: str, name: str) -> float:
    """Return a run's step without its wait for data: the median of transfer and compute of its last steps, in seconds."""
    client = Client(agent, "start `gpuwatch up`, give --agent or --step-ms")
    runs = client.runs()
    found = next((run for run in runs if name in (run.run, run.name)), None)
    if found is None:
        known = ", ".join(sorted({run.name or run.run for run in runs})) or "none"
        raise ConfigError(f"--run {name}: the agent at {agent} knows no such run; it knows {known}")
    steps = client.last_steps(found.run, found.rank, 600)
    taken = (
        []
        if steps is None
        else [
            (transfer or 0.0) + compute
            for transfer, compute in zip(steps.transfer_s, steps.compute_s, strict=True)
            if compute is not None
        ]
    )
    if not taken or median(taken) <= 0:
        raise ConfigError(f"--run {name}: the agent has no steps of it; give --step-ms")
    step_s = float(median(taken))
    typer.echo(f"a step of {name} takes {duration(step_s)} without its wait for data", err=True)
    return step_s
