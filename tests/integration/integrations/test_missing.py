"""An integration without its framework names the pip line; gpuwatch itself imports none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuwatch.host.frames import may_be_users
from gpuwatch.startup.instrumented import FRAMEWORKS
from tests.integration.integrations.workload import INTEGRATIONS, need


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_missing_framework_is_named_with_its_pip_line(integration: str) -> None:
    code = f"""
import sys, importlib
for name in ("{integration}", "pytorch_lightning"):
    sys.modules[name] = None
import gpuwatch
try:
    importlib.import_module("gpuwatch.integrations.{integration}")
except gpuwatch.MissingExtra as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert f"pip install {INTEGRATIONS[integration]}" in done.stdout, done.stderr


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_a_frameworks_own_code_is_not_the_users(integration: str) -> None:
    file = f"/v/lib/python3.11/site-packages/{integration}/loop.py"
    assert not may_be_users(file), "add the framework's module to gpuwatch/startup/instrumented.py"


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_what_run_instruments_exists_and_its_integration_takes_its_place(module: str) -> None:
    integration, place = FRAMEWORKS[module]
    need(module.partition(".")[0])
    code = f"""
import importlib, operator
method = operator.attrgetter("{place}")(importlib.import_module("{module}"))
unchanged = importlib.import_module("gpuwatch.integrations.{integration}").unchanged
print(callable(method), callable(unchanged))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout == "True True\n", f"correct its line in gpuwatch/startup/instrumented.py: {done.stderr}"


def test_gpuwatch_imports_no_framework() -> None:
    names = {"torch", "gpuwatch.integrations", *INTEGRATIONS}
    code = f"import sys, gpuwatch; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout == "set()\n", done.stderr
