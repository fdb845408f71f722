"""The browser of the tests does not notice networks that come and go."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chromium import chromium
from tests.servers import require


@pytest.mark.skipif(sys.platform != "linux", reason="netlink is Linux's")
def test_the_browser_has_no_socket_for_news_of_networks() -> None:
    """Otherwise docker's bridges, in tests at the same time, end the requests under way, and a page may stay empty."""
    require("cc")
    table = Path("/proc/net/netlink").read_text().splitlines()
    assert table[0].split()[-1] == "Inode"
    with chromium() as browser:
        browser.new_page().goto("about:blank")
        programs = psutil.Process().children(recursive=True)
        assert any("chrom" in program.name() for program in programs)
        sockets = {inode for program in programs if "chrom" in program.name() for inode in sockets_of(program.pid)}
        assert sockets
        table = Path("/proc/net/netlink").read_text().splitlines()
        assert sockets.isdisjoint(line.split()[-1] for line in table[1:])


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a program's sockets."""
    found: set[str] = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                found.update(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    return found
