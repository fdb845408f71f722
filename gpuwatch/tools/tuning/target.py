"""What the user wants tuned: a name on the command line, a function or a DataLoader, made into a way to start a loader.

torch is not imported: what a DataLoader is, is known once the user's code has imported it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.tools.tuning.rows import Setting

SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_WRITE = "def make_loader(num_workers, prefetch_factor, pin_memory, persistent_workers): return DataLoader(…)"


@dataclass(frozen=True)
class Target:
    """How to start a loader with a setting."""

    name: str
    make: Callable[[Setting], Any]
    """Runs the user's code: call it in a trial's process only."""
    varies: frozenset[str]
    """Which of SETTINGS it takes."""


def load(name: str) -> Any:
    """Return what `module:attribute` or `file.py:attribute` names. Raises: ConfigError, with what to do."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"'{name}' is no module:function; give e.g. train:make_loader or train.py:make_loader")
    path = Path(module_name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"{name}: there is no file {path}; run it where the file is, or give its path")
        directory, module_name = str(path.resolve().parent), path.stem
    else:
        directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module = _imported(name, module_name, directory)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [
                key
                for key, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", None) == module.__name__
            ]
            has = f"it defines {', '.join(sorted(known)[:8])}" if known else "it defines no function"
            raise ConfigError(f"{name}: {module_name} has no '{part}'; {has}") from None
    return found


def _imported(name: str, module_name: str, directory: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        top = module_name.partition(".")[0]
        if error.name in (module_name, top):
            raise ConfigError(f"{name}: no module '{module_name}' in {directory} or on PYTHONPATH") from None
        raise ConfigError(f"{name}: importing {module_name} failed: {error}; {_place(error)}") from error
    except SystemExit as error:
        raise ConfigError(
            f"{name}: {module_name} ends the program when it is imported (exit {error.code}); "
            'put what it runs as a script under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{name}: importing {module_name} failed: {type(error).__name__}: {error}; {_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen importlib")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no place known"


def target(of: Any, name: str | None = None) -> Target:
    """Return how to start what the user gave. Raises: ConfigError where that is no loader and makes none."""
    name = name or getattr(of, "__qualname__", None) or type(of).__name__
    if _is_data_loader(of):
        _check_rebuildable(of, name)
        return Target(name, lambda setting: rebuilt(of, setting, name), frozenset(SETTINGS))
    if not callable(of):
        raise ConfigError(
            f"{name} is of type {type(of).__name__}, neither a function that makes a loader nor a DataLoader; {_WRITE}"
        )
    try:
        parameters = inspect.signature(of).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        takes = frozenset(SETTINGS)
    else:
        takes = frozenset(
            parameter.name
            for parameter in parameters
            if parameter.name in SETTINGS and parameter.kind is not parameter.POSITIONAL_ONLY
        )
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in takes
    ]
    if missing:
        raise ConfigError(f"{name} needs {', '.join(missing)}, which gpuwatch cannot give it: add defaults; {_WRITE}")
    if takes:
        if "num_workers" not in takes:
            raise ConfigError(f"{name} takes {', '.join(sorted(takes))} but no num_workers; {_WRITE}")
        return Target(name, lambda setting: _called(of, setting, takes), takes)
    return Target(name, lambda setting: rebuilt(of(), setting, name), frozenset(SETTINGS))


def _called(make: Callable[..., Any], setting: Setting, takes: frozenset[str]) -> Any:
    return make(**{key: value for key, value in setting.keywords().items() if key in takes})


def rebuilt(loader: Any, setting: Setting, name: str) -> Any:
    """Return a DataLoader over the same data, started as `setting` says. Raises: ConfigError where that cannot be done."""
    _check_rebuildable(loader, name)
    keywords: dict[str, Any] = {
        **setting.keywords(),
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    for key in ("in_order", "pin_memory_device"):  # neither is in every torch
        if getattr(loader, key, None) not in (None, ""):
            keywords[key] = getattr(loader, key)
    if setting.num_workers:
        keywords["timeout"] = loader.timeout
        keywords["multiprocessing_context"] = loader.multiprocessing_context
    data = _torch_data()
    if isinstance(loader.dataset, data.IterableDataset):
        keywords |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        keywords |= {"batch_size": None, "sampler": loader.sampler}
    elif loader.batch_size is not None and type(loader.batch_sampler) is data.BatchSampler:
        keywords |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": loader.sampler}
    else:
        keywords["batch_sampler"] = loader.batch_sampler
    return data.DataLoader(loader.dataset, **keywords)


def _check_rebuildable(loader: Any, name: str) -> None:
    if not _is_data_loader(loader):
        raise ConfigError(
            f"{name} takes no settings and returns a {type(loader).__name__}, which is no DataLoader: there is nothing to vary; "
            f"{_WRITE}"
        )
    if type(loader) is not _torch_data().DataLoader:
        raise ConfigError(
            f"{name} is a {type(loader).__name__}, a subclass of DataLoader whose constructor gpuwatch does not know, "
            f"and so cannot be started with other settings; {_WRITE}"
        )


def _is_data_loader(thing: Any) -> bool:
    data = _torch_data()
    return data is not None and isinstance(thing, data.DataLoader)


def _torch_data() -> Any:
    return sys.modules.get("torch.utils.data")
