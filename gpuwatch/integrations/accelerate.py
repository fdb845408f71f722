"""Accelerate: the loop is the user's, and all it needs is `gpuwatch.watch` around the loader, prepared or not yet.

`watch` from here, and a loader that is watched before it is prepared, also count Accelerate's own copies to the device
as `transfer`; `gpuwatch.watch` around a prepared loader counts them as `input_wait`, as the copy is inside the fetch.
"""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, TypeVar

from gpuwatch.hook.loader import PreparedLoader
from gpuwatch.hook.watch import is_set, open_session
from gpuwatch.hook.watch import watch as watch_loader
from gpuwatch.integrations import MissingFramework

if find_spec("accelerate") is None:
    raise MissingFramework("accelerate", "accelerate")

T = TypeVar("T")


def watch(loader: Iterable[T], *, samples: Callable[[Any], int] | None = None) -> Iterable[T]:
    """Return a prepared loader, watched as by `gpuwatch.watch`, its copies to the device as `transfer`."""
    if is_set("GPUWATCH_DISABLE"):
        return loader
    return watch_loader(PreparedLoader(loader, session=open_session), samples=samples)
