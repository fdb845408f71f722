"""What the healthy machine of the doctor's tests is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuwatch.api import Status
from gpuwatch.api.client import Reply
from gpuwatch.tools.doctor.machine import NvmlFacts, Outcome, ask_agent

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "host": "node-17",
    "collectors": [
        {"name": "cpu", "success": True, "message": None},
        {"name": "gpu", "success": None, "message": "no driver"},
    ],
    "history": {},
}
VERSIONS = {
    "gpuwatch-training": "0.1.0",
    "msgspec": "0.18.6",
    "pyzmq": "26.0",
    "nvidia-ml-py": "13.0",
    "psutil": "5.10",
    "streamlit": "1.50.0",
}
REQUIREMENTS = [
    "msgspec>=0.18",
    "pyzmq>=25",
    "nvidia-ml-py; extra == 'agent'",
    'psutil>=5.9; extra == "agent"',
    "tomli; (python_version < '3.11') and extra == 'agent'",
    "streamlit>=1.50; (python_version >= '3.11') and extra == 'dashboard'",
    "streamlit>=1.40; (python_version < '3.11') and extra == 'dashboard'",
]
UNLIMITED = float("inf")


def two_gpus(**changes: Any) -> NvmlFacts:
    facts: dict[str, Any] = {"driver": "550.54.15", "cuda": (12, 4), "gpus": (("GPU-aa11", H100), ("GPU-ab22", H100))}
    return NvmlFacts("answers", **{**facts, **changes})


def alive(**changes: Any) -> tuple[Status | None, Outcome]:
    """Return what an agent says that is ready."""
    url = "http://127.0.0.1:9478"
    pages = {f"{url}/api/v1/status": {**STATUS, **changes}, f"{url}/readyz": "ready"}
    return ask_agent(url, True, answers(pages))


def answers(pages: Mapping[str, Any]) -> Callable[[str], Reply]:
    """Return a fetch that knows these URLs: a body, or the error to raise; anything else refuses."""

    def fetch(url: str) -> Reply:
        page = pages.get(url, ConnectionRefusedError(111, "Connection refused"))
        if isinstance(page, Exception):
            raise page
        if isinstance(page, Reply):
            return page
        return Reply(200, json.dumps(page).encode())

    return fetch


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
