"""The compiled hot path, where this installation has it; None where it has not, and the same is done in Python.

It is made on installation from `_hot.c` where there is a C compiler. GPUWATCH_COMPILED=0 leaves it alone.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

INTERFACE = 2
"""Counted on, here and in `_hot.c`, with every change to what they have of each other."""


def _load() -> Any:
    if os.environ.get("GPUWATCH_COMPILED", "1") == "0":
        return None
    try:
        module = import_module("gpuwatch._hot")
    except Exception:  # whatever one that was left over says: nobody needs it
        return None
    return module if getattr(module, "INTERFACE", None) == INTERFACE else None


hot: Any = _load()

__all__ = ["INTERFACE", "hot"]
