"""The real Chromium for browser tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.servers import require

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NO_NETLINK = """
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int socket(int domain, int type, int protocol) {
    if (domain == AF_NETLINK) { errno = EAFNOSUPPORT; return -1; }
    return (int)syscall(SYS_socket, domain, type, protocol);
}
"""
"""Chromium asks the kernel for news of network interfaces by such a socket. When one comes or goes, as docker's do in tests that run at
the same time, it drops the requests under way (ERR_NETWORK_CHANGED), on loopback too, and a page whose script was among them stays empty."""
DESKTOP, PHONE = {"width": 1400, "height": 1000}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """Give a headless browser (playwright's Browser). Skips where there is none; fails instead when CI=true."""
    path = require("chromium", "chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        environment = {**os.environ, **without_netlink(Path(folder))}
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, env=environment)
        try:
            yield browser
        finally:
            browser.close()


def without_netlink(folder: Path) -> dict[str, str]:
    """Return the environment in which a program on Linux does not notice changes of network interfaces; empty without a compiler."""
    compiler, library = os.environ.get("CC", "cc"), folder / "no_netlink.so"
    if sys.platform != "linux" or shutil.which(compiler) is None:
        return {}
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=NO_NETLINK, text=True, check=True)
    return {"LD_PRELOAD": str(library)}


def missing(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"browser tests must run here: {why}")
    pytest.skip(why)
