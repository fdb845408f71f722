import fcntl
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, NoReturn

import typer

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def run(
    command: Annotated[list[str], typer.Argument(help="Program and its arguments.", metavar="COMMAND…")],
    trace: Annotated[bool, typer.Option("--trace", help="Allow `gpuwatch trace` for the run.")] = False,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Time forward, backward and the optimizer.")] = False,
) -> None:
    """Run a program and watch the training in it and in its child processes, such as torchrun's workers.

    Example: `gpuwatch run -- python train.py --epochs 3`. The `--` may be left out.

    Every DataLoader that the main thread, or a thread that has created an optimizer (Ray Train), iterates is watched as
    if by `gpuwatch.watch`. Lightning, Hugging Face Trainer and Ignite get their integration. In a loop without a
    DataLoader a step lasts from one optimizer step to the next. If no step was found, one line at the end gives the
    reason. The program replaces this process: its output, signals and exit code are its own.

    A script `train.py` that is not executable, or has no `#!` line, runs with the Python interpreter of gpuwatch.

    Exit codes of gpuwatch itself: 127 program not found, 126 program cannot be executed.
    """
    name = command[0]
    if name.endswith(".py") and Path(name).is_file() and not _is_program(name):
        command = [name := sys.executable, *command]
    if (program := shutil.which(name)) is None:
        if os.sep in name and Path(name).exists():
            _end(_NOT_EXECUTABLE, f"{name}: {'is a directory' if Path(name).is_dir() else 'not executable'}")
        _end(_NOT_FOUND, f"{name}: no such program")
    startup = Path(__file__).parents[1] / "startup"
    wanted = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(startup), os.environ.get("PYTHONPATH")])),
        "GPUWATCH_AUTO": "1",
        "GPUWATCH_AUTO_PID": str(os.getpid()),
        **{f"GPUWATCH_{option}": "1" for option, on in (("TRACE", trace), ("BREAKDOWN", breakdown)) if on},
    }
    if script := next((Path(word).name for word in command if word.endswith(".py")), None):
        wanted["GPUWATCH_AUTO_SCRIPT"] = script
    # In memory: on NFS, or by FUSE, an open file keeps a link when it is deleted, as if it were the program's.
    with suppress(OSError), TemporaryFile(dir="/dev/shm") as file:
        # A process that prints a verdict notes there which ones have started it. Few programs use such a number.
        notes = fcntl.fcntl(file, fcntl.F_DUPFD, 500)
        wanted["GPUWATCH_AUTO_NOTES"] = f"/proc/{os.getpid()}/fd/{notes}"
    try:
        # Each Python runs our `sitecustomize` first. torch's flight recorder is off in some versions: see `Standstill`.
        os.execve(program, command, {"TORCH_FR_BUFFER_SIZE": "2000", **os.environ, **wanted})
    except OSError as error:
        _end(_NOT_EXECUTABLE, f"{name}: {error.strerror}")


def _is_program(script: str) -> bool:
    """Return whether the kernel can execute a script: on some file systems every file has the mode for it."""
    with suppress(OSError), Path(script).open("rb") as file:
        return file.read(2) == b"#!" and shutil.which(script) is not None
    return False


def _end(code: int, message: str) -> NoReturn:
    """End with a shell's exit code for a program that does not exist, or cannot be executed."""
    print(f"gpuwatch run: {message}", file=sys.stderr)
    raise typer.Exit(code)
