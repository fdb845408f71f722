"""Versions, extras, torch's build, settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.tools.doctor.gpus import read_build, torch
from gpuwatch.tools.doctor.machine import Machine
from gpuwatch.tools.doctor.software import (
    agent_extra,
    dashboard_extra,
    environment,
    gpuwatch,
    hook,
    numbers,
    pynvml,
    python,
    required,
)
from tests.unit.doctor.machines import REQUIREMENTS, VERSIONS, two_gpus

MakeMachine = Callable[..., Machine]


def test_python(machine: MakeMachine) -> None:
    assert python(machine()).found == "3.11.7 (/usr/bin/python3)"


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ({"gpuwatch-training": "0.1.0"}, "ok", "0.1.0"),
        ({}, "warning", "not installed"),
        ({"gpuwatch-training": "0.0.9"}, "problem", "0.1.0 is imported, 0.0.9 is installed"),
        ({"gpuwatch-training": "0.1.0", "gpuwatch": "1.3"}, "problem", "unrelated 'gpuwatch' 1.3"),
    ],
)
def test_gpuwatch(machine: MakeMachine, versions: dict[str, str], status: str, words: str) -> None:
    outcome = gpuwatch(machine(versions=versions))
    assert outcome.status == status and words in outcome.found


def test_requirements_of_an_extra_are_read_from_the_metadata() -> None:
    new, old = (3, 12, 1), (3, 10)
    assert required(REQUIREMENTS, None, new) == [("msgspec", "0.18"), ("pyzmq", "25")]
    assert required(REQUIREMENTS, "agent", new) == [("nvidia-ml-py", ""), ("psutil", "5.9")]
    assert required(REQUIREMENTS, "agent", old) == [("nvidia-ml-py", ""), ("psutil", "5.9"), ("tomli", "")]
    assert required(REQUIREMENTS, "dashboard", new) == [("streamlit", "1.50")]
    assert required(REQUIREMENTS, "dashboard", old) == [("streamlit", "1.40")]
    assert required(["uvloop; sys_platform != 'win32'"], None, new) == []
    assert numbers("2.5.1+cu124") == (2, 5, 1) and numbers("rc") == ()


def test_extras(machine: MakeMachine) -> None:
    assert hook(machine()).found == "msgspec 0.18.6, pyzmq 26.0"
    assert agent_extra(machine()).found == "nvidia-ml-py 13.0, psutil 5.10"
    assert hook(machine(requirements=lambda: [])).status == "skipped"

    def without(name: str) -> dict[str, str]:
        return {other: version for other, version in VERSIONS.items() if other != name}

    missing = agent_extra(machine(versions=without("psutil")))
    assert (missing.status, missing.found) == ("warning", "missing: psutil")
    assert missing.remedy and missing.remedy.startswith("pip install --upgrade 'gpuwatch-training[agent]'")
    assert hook(machine(versions=without("pyzmq"))).status == "problem"
    old = dashboard_extra(machine(versions={**VERSIONS, "streamlit": "1.9.0"}))
    assert (old.status, old.found) == ("problem", "too old: streamlit 1.9.0 (needs 1.50)")


def test_the_deprecated_pynvml_is_distinguished_from_the_maintained_one(machine: MakeMachine) -> None:
    assert pynvml(machine()).status == "ok"
    shadowed = pynvml(machine(versions={**VERSIONS, "pynvml": "11.5.3"}))
    assert shadowed.status == "warning" and "'pynvml' 11.5.3" in shadowed.found
    assert shadowed.remedy and "pip uninstall -y pynvml" in shadowed.remedy
    assert pynvml(machine(versions={})).status == "skipped"


@pytest.mark.parametrize(
    ("build", "facts", "status", "words"),
    [
        ("cuda = '12.4'", {}, "ok", "built for CUDA 12.4; the driver runs CUDA 12.4"),
        ("cuda: Optional[str] = '12.8'", {}, "ok", "minor versions run together"),
        ("cuda = '11.8'", {}, "ok", "CUDA 11.8"),
        ("cuda = '13.0'", {}, "problem", "built for CUDA 13.0; driver 550.54.15 runs CUDA 12.4 at most"),
        ("cuda = '12.4'", {"cuda": None}, "ok", "no driver to compare with"),
        ("cuda: Optional[str] = None", {}, "warning", "is built for CPUs, and there are 2 NVIDIA GPUs"),
        ("cuda = None", {"gpus": ()}, "ok", "built for CPUs"),
        ("cuda = None\nhip: Optional[str] = '6.2.41133'", {}, "ok", "ROCm 6.2.41133"),
    ],
)
def test_torch(
    machine: MakeMachine, tmp_path: Path, build: str, facts: dict[str, Any], status: str, words: str
) -> None:
    host = machine(facts=two_gpus(**facts))
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.5.1'\n{build}\n")
    outcome = torch(host)
    assert outcome.status == status and words in outcome.found
    if status == "problem":
        assert outcome.remedy and outcome.remedy.endswith("https://download.pytorch.org/whl/cu124")


def test_torch_that_is_not_installed_is_skipped(machine: MakeMachine) -> None:
    assert torch(machine(folder_of=lambda package: None)).status == "skipped"


def test_the_build_is_read_as_torch_itself_says_it() -> None:
    real = pytest.importorskip("torch")
    assert read_build(Path(real.__file__).parent) == (str(real.__version__), real.version.cuda, real.version.hip)


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, "ok", "no GPUWATCH_* variable"),
        ({"GPUWATCH_RUN": "a", "GPUWATCH_QUIET": "1", "HOME": "/"}, "ok", "GPUWATCH_QUIET, GPUWATCH_RUN"),
        ({"GPUWATCH_QUITE": "1"}, "warning", "nothing reads GPUWATCH_QUITE (did you mean GPUWATCH_QUIET?)"),
        ({"GPUWATCH_SOMETHING": "1"}, "warning", "nothing reads GPUWATCH_SOMETHING"),
        ({"GPUWATCH_ENDPOINT": "tcp://node-17:9479"}, "problem", "give ipc:///"),
        ({"GPUWATCH_HTTP": "9478"}, "problem", "GPUWATCH_HTTP=9478: give HOST:PORT"),
        ({"GPUWATCH_AGENT": "node-17:9478"}, "problem", "http://HOST:PORT"),
        ({"GPUWATCH_DISABLE": "of"}, "problem", "GPUWATCH_DISABLE=of: give 1 or 0"),
        ({"GPUWATCH_AGENT_PORT": "70000"}, "problem", "1 to 65535"),
        ({"GPUWATCH_AGENT_PORT": "0"}, "problem", "1 to 65535"),
        ({"GPUWATCH_AGENT_PORT": "9100"}, "ok", "GPUWATCH_AGENT_PORT"),
        ({"GPUWATCH_PROMETHEUS": "https://prometheus/prefix"}, "ok", "GPUWATCH_PROMETHEUS"),
        ({"GPUWATCH_PROMETHEUS": "http:///prefix"}, "problem", "http://HOST:PORT"),
        ({"GPUWATCH_HTTP": "0.0.0.0:9478"}, "ok", "GPUWATCH_HTTP"),
        ({"GPUWATCH_RUN_DIR": "run"}, "problem", "an absolute path"),
        ({"GPUWATCH_HISTORY": "/"}, "problem", "a file, not a folder"),
        ({"GPUWATCH_DISABLE": "of", "GPUWATCH_RNU": "a"}, "problem", "nothing reads GPUWATCH_RNU"),
    ],
)
def test_settings(machine: MakeMachine, environ: dict[str, str], status: str, words: str) -> None:
    outcome = environment(machine(environ=environ))
    assert outcome.status == status and words in outcome.found
