"""`gpuwatch run`: any training script, watched without a change."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import gpuwatch
from gpuwatch.errors import ConfigError

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def run(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments, after `--`.", metavar="-- COMMAND…")
    ],
) -> None:
    """Run a program and watch the training in it, its child processes included (torchrun's workers, say).

    Example: `gpuwatch run -- python train.py --epochs 3`

    Every DataLoader that a main thread iterates is watched as by `gpuwatch.watch`; Lightning, Hugging Face Trainer and Ignite get their
    integration. The program takes this process's place: its output, signals and exit code are its own. 127: no such program, 126: it
    cannot be run.
    """
    program = shutil.which(command[0])
    if program is None:
        _refuse(command[0])
    try:
        os.execve(str(program), command, environment(os.environ))
    except OSError as error:
        raise _ended(_NOT_EXECUTABLE, f"{command[0]}: {error.strerror}") from None


def environment(of: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return an environment in which every Python is watched."""
    places = [str(startup())]
    if of.get("PYTHONPATH"):
        places.append(of["PYTHONPATH"])
    return {**of, "PYTHONPATH": os.pathsep.join(places), "GPUWATCH_AUTO": "1"}


def startup() -> Path:
    """Return the directory whose `sitecustomize` Python runs first. Raises: ConfigError where it was not installed."""
    place = Path(gpuwatch.__file__).parent / "startup"
    if not (place / "sitecustomize.py").exists():
        raise ConfigError(f"{place}/sitecustomize.py is missing; install gpuwatch-training again")
    return place


def _refuse(name: str) -> None:
    """End as a shell does where there is no such program, or it cannot be executed."""
    if os.sep in name and Path(name).exists():
        raise _ended(_NOT_EXECUTABLE, f"{name}: is a directory" if Path(name).is_dir() else f"{name}: not executable")
    raise _ended(_NOT_FOUND, f"{name}: no such program")


def _ended(code: int, message: str) -> typer.Exit:
    print(f"gpuwatch run: {message}", file=sys.stderr)
    return typer.Exit(code)
