"""gpuwatch: where every GPU-second of a training job goes, and what to change.

for batch in gpuwatch.watch(loader):    # one line; a verdict is printed when the loop ends
    ...
"""

__version__ = "0.1.0"

from gpuwatch.errors import ConfigError, GpuwatchError, MissingExtra, NoData, ProtocolError
from gpuwatch.hook import Watch, watch
from gpuwatch.report import Report

__all__ = [
    "ConfigError",
    "GpuwatchError",
    "MissingExtra",
    "NoData",
    "ProtocolError",
    "Report",
    "Watch",
    "__version__",
    "watch",
]
