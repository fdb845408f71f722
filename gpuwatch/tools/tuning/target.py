"""The loader to tune: a name on the command line, a function or a DataLoader, as a way to start it with a setting.

torch is not imported here: a DataLoader exists only once the user's code has imported it.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.tools.tuning.result import SETTINGS, Setting

_WRITE = "def make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers): return DataLoader(…)"


@dataclass(frozen=True)
class Target:
    name: str
    make: Callable[[Setting], Any]  # runs the user's code: call it only in a trial's process
    varies: frozenset[str]


def load(name: str) -> Any:
    """Return what `module:attribute` or `file.py:attribute` names. Raises: ConfigError, with what to do."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"'{name}' is not MODULE:FUNCTION; give e.g. train:make_loader or train.py:make_loader")
    directory = Path.cwd()
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ConfigError(f"{name}: there is no file {path}; run it where the file is, or give its path")
        directory, module_name = path.resolve().parent, path.stem
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    try:
        return reduce(getattr, attribute.split("."), importlib.import_module(module_name))  # also of 01-train.py
    except SystemExit as error:
        raise ConfigError(
            f"{name}: {module_name} ends the program when it is imported (exit {error.code}); "
            'put what it runs as a script under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        if module := sys.modules.get(module_name):
            own = {key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name}
            known = ", ".join(sorted(own)[:8]) or "no function"
            raise ConfigError(f"{name}: {module_name} has no '{attribute}'; it defines {known}") from None
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            raise ConfigError(f"{name}: no module '{module_name}' in {directory} or on PYTHONPATH") from None
        what = f"{type(error).__name__}: {error}; {place_of(error)}"
        raise ConfigError(f"{name}: importing {module_name} failed: {what}") from error


def place_of(error: BaseException) -> str:
    """Return file:line of the innermost frame that is neither ours nor importlib's; "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<frozen importlib", f"{Path(__file__).parent}/")):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def target(of: Any, name: str | None = None) -> Target:
    """Return how to start what the user gave. Raises: ConfigError where it is no loader and makes none."""
    name = name or getattr(of, "__qualname__", None) or type(of).__name__
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(of, data.DataLoader):
        _check_rebuildable(of, name)
        return Target(name, lambda setting: rebuilt(of, setting, name), SETTINGS)
    if not callable(of):
        what = f"of type {type(of).__name__}, neither a function that makes a loader nor a DataLoader"
        raise ConfigError(f"{name} is {what}; {_WRITE}")
    try:
        parameters = list(inspect.signature(of).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    takes = SETTINGS if any(each.kind is each.VAR_KEYWORD for each in parameters) else SETTINGS & named
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
    if missing := [each for each in required if each not in takes]:
        raise ConfigError(f"{name} needs {', '.join(missing)}, which gpuwatch cannot give it: add defaults; {_WRITE}")
    if not takes:
        return Target(name, lambda setting: rebuilt(of(), setting, name), SETTINGS)
    if "num_workers" not in takes:
        raise ConfigError(f"{name} takes {', '.join(sorted(takes))} but no num_workers; {_WRITE}")
    return Target(name, lambda setting: of(**{key: getattr(setting, key) for key in takes}), takes)


def rebuilt(loader: Any, setting: Setting, name: str) -> Any:
    """Return a DataLoader over the same data with another setting. Raises: ConfigError where that cannot be done."""
    _check_rebuildable(loader, name)
    data = sys.modules["torch.utils.data"]
    same = ["collate_fn", "worker_init_fn", "generator"]
    same += [key for key in ("in_order", "pin_memory_device") if getattr(loader, key, "") != ""]  # not in every torch
    if setting.num_workers:
        same += ["timeout", "multiprocessing_context"]
    keywords: dict[str, Any] = {}
    if isinstance(loader.dataset, data.IterableDataset):
        same += ["batch_size", "drop_last"]
    elif loader.batch_sampler is None:
        same += ["sampler"]
        keywords["batch_size"] = None
    elif loader.batch_size is not None and type(loader.batch_sampler) is data.BatchSampler:
        same += ["batch_size", "drop_last", "sampler"]
    else:
        same += ["batch_sampler"]
    keywords |= {**asdict(setting), **{key: getattr(loader, key) for key in same}}
    return data.DataLoader(loader.dataset, **keywords)


def _check_rebuildable(loader: Any, name: str) -> None:
    data = sys.modules.get("torch.utils.data")
    if data is None or type(loader) is not data.DataLoader:
        raise ConfigError(
            f"{name} is or returns a {type(loader).__name__}, which gpuwatch cannot start with other settings: "
            f"it only knows DataLoader's own constructor; {_WRITE}"
        )
