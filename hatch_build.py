"""Compiles gpuwatch/_hot.c while a wheel or an editable installation is made, where there is a C compiler; else the same runs in Python.

GPUWATCH_COMPILED=0 makes a wheel without it, for any interpreter and machine.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHotPath(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled module to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("GPUWATCH_COMPILED", "1") == "0":
            return
        root = Path(self.root)
        editable = version == "editable"
        self._scratch = tempfile.TemporaryDirectory(prefix="gpuwatch-build-")
        try:
            built = compile_extension(root, root if editable else Path(self._scratch.name))
        except Exception as error:
            # No compiler, no headers, another implementation of Python: the package is whole without it.
            self.app.display_warning(f"the hot path is not compiled, and runs in Python: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if not editable:
            build_data["force_include"][str(built)] = f"gpuwatch/{built.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()


def compile_extension(root: Path, folder: Path) -> Path:
    """Compile gpuwatch/_hot.c to a module under `folder`/gpuwatch and return its path. Raises: what setuptools raises."""
    from setuptools import Distribution, Extension

    extension = Extension("gpuwatch._hot", [str(root / "gpuwatch" / "_hot.c")])
    command = Distribution({"name": "gpuwatch-hot", "ext_modules": [extension]}).get_command_obj("build_ext")
    with tempfile.TemporaryDirectory() as scratch:
        command.build_temp, command.build_lib = scratch, str(folder)
        command.force = True  # a module that is there may be newer than its source and yet of another: an archive keeps its files' times
        command.ensure_finalized()
        command.run()
    (built,) = command.get_outputs()
    return Path(built)
