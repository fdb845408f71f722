"""The doctor's checks on real things: NVML's binding on a library with its ABI, TCP sockets, this machine's kernel."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from gpuwatch.api.client import fetch
from gpuwatch.tools.doctor.machine import Machine, read_nvml
from gpuwatch.tools.doctor.machine import this_machine as machine_of
from gpuwatch.tools.doctor.services import hook_socket
from tests.nvml.fake import FakeGpu, FakeNvml, patch_library
from tests.servers import free_port


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no driver that hangs."""
    monkeypatch.setattr("gpuwatch.tools.doctor.machine._NVML_DEADLINE_S", 60.0)


def test_nvml_tells_driver_gpus_and_processes(nvml: FakeNvml) -> None:
    nvml.write([FakeGpu(processes=((4711, 1 << 30),)), FakeGpu(uuid="GPU-b", name="NVIDIA L4", minor=1)])
    facts = read_nvml()
    assert (facts.state, facts.driver) == ("answers", "550.54.15")
    assert facts.cuda is not None and facts.cuda >= (12, 0)
    assert facts.gpus == (("GPU-00000000-0000-4000-8000-000000000000", "NVIDIA H100 80GB HBM3"), ("GPU-b", "NVIDIA L4"))
    assert facts.lost == ()


def test_nvml_names_the_gpu_that_is_lost_and_still_lists_the_others(nvml: FakeNvml) -> None:
    nvml.write([FakeGpu(), FakeGpu(uuid="GPU-b", minor=1, lost=True)])
    facts = read_nvml()
    assert facts.state == "answers" and len(facts.lost) == 1
    assert facts.lost[0].startswith("GPU 1: ") and len(facts.gpus) == 1


def test_nvml_without_driver_library_or_with_two_versions(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_nvml().state == "not loaded"
    nvml.write([FakeGpu()], errors={"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    assert read_nvml().state == "mismatch"
    nvml.write([FakeGpu()], errors={"nvmlInitWithFlags": pynvml.NVML_ERROR_UNKNOWN})
    assert read_nvml().state == "fails"
    patch_library(monkeypatch, tmp_path / "none.so")
    assert read_nvml().state == "no library"


def test_nvml_that_hangs_is_given_up_on(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwatch.tools.doctor.machine._NVML_DEADLINE_S", 2.0)
    nvml.write([FakeGpu()], hangs_s={"nvmlInitWithFlags": 120.0})
    begun_s = time.monotonic()
    try:
        assert read_nvml().state == "hangs"
        assert time.monotonic() - begun_s < 30
    finally:
        nvml.write([])  # lets the thread go


def this_machine() -> Machine:
    return machine_of("http://127.0.0.1:9478", False, None, None)


def test_a_declared_tcp_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("GPUWATCH_ENDPOINT", f"tcp://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("GPUWATCH_TOKEN_FILE", raising=False)
        monkeypatch.delenv("GPUWATCH_TOKEN", raising=False)
        assert "needs the agent's token" in hook_socket(this_machine()).found
        monkeypatch.setenv("GPUWATCH_TOKEN", "t" * 32)
        assert "does not accept this token" in hook_socket(this_machine()).found
    refused = hook_socket(this_machine())
    assert refused.status == "problem" and "no process listens" in refused.found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("groups", "status"), [([], "problem"), ([4343], "ok")])
def test_a_socket_of_root_is_open_to_its_group_alone(groups: list[int], status: str) -> None:
    with tempfile.TemporaryDirectory(prefix="gw-") as directory, socket.socket(socket.AF_UNIX) as server:
        path = Path(directory) / "hook.sock"
        server.bind(str(path))
        server.listen()
        os.chown(path, 0, 4343)
        path.chmod(0o660)
        path.parent.chmod(0o755)
        around = replace(this_machine(), environ={}, socket_directories=(path.parent,), uid=4242)
        assert (
            hook_socket(around).status == "ok"
        )  # root may; and what it imports lies where the other user may not read
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the doctor's threads do not matter to the child
            child = os.fork()
        if child == 0:
            try:
                os.setgroups(groups)
                os.setgid(4242)
                os.setuid(4242)
                os._exit(int(hook_socket(around).status != status))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_listener_is_found_by_its_port() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert this_machine().connects("127.0.0.1", server.getsockname()[1])
    assert not this_machine().connects("127.0.0.1", free_port())


def test_what_this_machine_says_agrees_with_its_own_tools() -> None:
    around = this_machine()
    usage = shutil.disk_usage("/")
    assert around.space(Path("/"))[0] == usage.total
    assert around.cores() == len(os.sched_getaffinity(0))
    assert around.version_of("msgspec") and around.version_of("no-such-distribution") is None
    assert "msgspec>=0.18" in around.requirements()
    assert around.reads(Path("/proc/self/io")) and not around.reads(Path("/proc/self/none"))


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/readyz" else 200)
        self.end_headers()
        self.wfile.write(b"words")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_fetch_gives_every_status_and_passes_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert [(fetch(url + path, 60).status, fetch(url + path, 60).body) for path in ("/", "/readyz")] == [
                (200, b"words"),
                (503, b"words"),
            ]
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ConnectionRefusedError):
        fetch(url)


@pytest.fixture
def not_http() -> Iterator[int]:
    """The port of a server that greets with something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail ready\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(timeout=60)
        assert not thread.is_alive(), "no one has connected"


def test_fetch_from_what_is_no_web_server_is_an_error_as_any_other(not_http: int) -> None:
    with pytest.raises(
        OSError, match=r"not an HTTP server|closed connection"
    ):  # urllib3, or urllib3-future in its place
        fetch(f"http://127.0.0.1:{not_http}/")
