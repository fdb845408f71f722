"""Runs in each Python that `gpuwatch run` starts, before its script: awaits imports of torch's loaders and frameworks.

Only the standard library is imported here, and gpuwatch itself once torch's loaders or a framework are, so that other
programs that a script starts pay next to nothing. A `sitecustomize` that existed before is run too.
"""

from __future__ import annotations  # which an older Python could not evaluate

import atexit
import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib would be imported for this alone

_spec: Any = importlib.util.spec_from_file_location("gpuwatch_instrumented", f"{HERE}/instrumented.py")
_instrumented = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_instrumented)
TO_INSTRUMENT: dict[str, str] = _instrumented.MODULES.copy()


class Finder:
    """Finds the modules of instrumented.py as other finders do, and has a function called after each is executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        function = TO_INSTRUMENT.pop(name, None)
        spec = None if function is None else importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = getattr(spec, "loader", None)
        if function is None or not hasattr(loader, "exec_module"):
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            try:
                from gpuwatch.integrations import instrument

                getattr(instrument, function)(module)
            except Exception as error:
                if TO_INSTRUMENT:
                    print(f"gpuwatch: {module.__name__} is not watched: {error!r}", file=sys.stderr)
                if "gpuwatch.integrations.instrument" not in sys.modules:
                    TO_INSTRUMENT.clear()  # no module can be watched, which one message says
                    atexit.unregister(_report_nothing)

        loader.exec_module = exec_module
        return spec


_LAUNCHERS = ("torch.", "accelerate.", "deepspeed.")  # their programs start the training in other processes


def _report_nothing(pid: int) -> None:
    """Print why no verdict was printed, if this is the program, or has imported torch and has the program's stderr."""
    session, processes = sys.modules.get("gpuwatch.hook.session"), sys.modules.get("multiprocessing.process")
    if pid != os.getpid() or _instrumented.is_on(os.environ.get("GPUWATCH_QUIET", "")):
        return
    if (processes is not None and processes.parent_process() is not None) or (session and session.Session.any_printed):
        return
    with contextlib.suppress(OSError), open(_instrumented.notes()) as notes:  # noqa: PTH123
        if f"{pid}\n" in notes:
            return  # a process that it has started has trained
    program = os.environ.get("GPUWATCH_AUTO_PID")
    with contextlib.suppress(OSError):  # it has ended, or there is no /proc
        if not os.path.samefile("/proc/self/fd/2", f"/proc/{program}/fd/2"):  # noqa: PTH121
            return  # another process reads what this one prints
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if (main is not None and main.name.startswith(_LAUNCHERS)) or "ray.train" in sys.modules:
        return
    if "torch" in sys.modules:
        reason = "no DataLoader was iterated in the main thread, and no torch optimizer made two steps"
    elif program == str(pid):
        reason = "the program has not imported torch"
    else:
        return
    more = "wrap each step in `with w.step():` and loading its batch in `with w.data():`, where w = gpuwatch.Watch()"
    print(f"gpuwatch: no training step was seen in this process: {reason}. To record steps, {more}", file=sys.stderr)


sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != HERE]  # noqa: PTH100
if os.environ.get("GPUWATCH_AUTO") == "1" and not _instrumented.is_on(os.environ.get("GPUWATCH_DISABLE", "")):
    sys.meta_path.insert(0, Finder())
    atexit.register(_report_nothing, os.getpid())

# The `sitecustomize` that Python would have found without this one.
_other = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _other is not None and _other.loader is not None:
    sys.modules["sitecustomize"] = _module = importlib.util.module_from_spec(_other)
    _other.loader.exec_module(_module)
