"""gpuwatch: where every GPU-second of a training job goes, and what to change.

for batch in gpuwatch.watch(loader):    # one line; a verdict is printed when the loop ends
    ...
"""

from importlib import import_module
from typing import TYPE_CHECKING

from gpuwatch.errors import ConfigError, GpuwatchError, MissingExtra, NoData, ProtocolError
from gpuwatch.hook.watch import Watch, watch
from gpuwatch.version import __version__

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report
    from gpuwatch.tools.tuning import tune
    from gpuwatch.tools.tuning.result import TuneResult

__all__ = [
    "ConfigError",
    "GpuwatchError",
    "MissingExtra",
    "NoData",
    "ProtocolError",
    "Report",
    "TuneResult",
    "Watch",
    "__version__",
    "tune",
    "watch",
]


def __getattr__(name: str) -> object:
    """Return what is imported only when asked for: a training process has no use for it."""
    later = {"tune": "tools.tuning", "TuneResult": "tools.tuning.result", "Report": "diagnosis.report"}
    if name in later:
        return getattr(import_module(f"gpuwatch.{later[name]}"), name)
    raise AttributeError(f"module 'gpuwatch' has no attribute {name!r}")
