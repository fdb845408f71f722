"""Parts of gpuwatch that are installed on request: what is missing is said with its pip line."""

from __future__ import annotations

from importlib.util import find_spec

from gpuwatch.errors import MissingExtra


def require(module: str, extra: str) -> None:
    """Raise MissingExtra, with the pip line, where a module is not installed."""
    if find_spec(module) is None:
        raise MissingExtra(module, extra)
