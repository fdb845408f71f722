"""An integration without its framework names the pip line; gpuwatch itself imports none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("integration", "missing", "line"),
    [
        ("lightning", ["lightning", "pytorch_lightning"], "pip install lightning"),
        ("transformers", ["transformers"], "pip install transformers[torch]"),
        ("accelerate", ["accelerate"], "pip install accelerate"),
        ("ignite", ["ignite"], "pip install pytorch-ignite"),
    ],
)
def test_a_missing_framework_is_named_with_its_pip_line(integration: str, missing: list[str], line: str) -> None:
    code = f"""
import sys, importlib
for name in {missing!r}:
    sys.modules[name] = None
import gpuwatch
try:
    importlib.import_module("gpuwatch.integrations.{integration}")
except gpuwatch.MissingExtra as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert line in done.stdout, done.stderr


def test_gpuwatch_imports_no_framework() -> None:
    code = "import sys, gpuwatch; print({'torch', 'gpuwatch.integrations', 'lightning', 'ignite'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout == "set()\n", done.stderr
