"""Clean up after tests: open `Watch`es after each test, temporary files at the end. And the parts of `make test`."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from gpuwatch.hook.watch import open_watches

# A shell gives SIGINT ignored to what it starts in the background, and so to the programs that tests press Ctrl-C in.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch's threads, one for each processor, spin while they wait for each other. That is a tenth of what the programs of
# tests compute, and takes seconds where several files run at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = "pytest.mark.alone"
HERE = Path(__file__).parent
UNIT = HERE / "unit"  # the part `unit`: what computes and waits for nothing
FIRST = (
    # A fork has only the devices that autograd knew when it began: tests that add a device in a fork come before any
    # backward pass.
    ("test_async_device", "test_accuracy_benchmark"),
    # The longest, longest first: begun last, they would run while the other workers have nothing left.
    ("test_compose",),
    ("test_ddp",),
    ("test_past_one_prometheus",),
    ("test_demo",),
    (
        "test_agent_attacks",
        "test_agent_jobs",
        "test_allocated_unused",
        "test_mig",
        "test_query_cost",
        "test_top",
    ),
    ("test_exit_codes", "test_otlp", "test_trace"),  # else late, by their names
    ("test_diagnosis_benchmark", "test_notify", "test_run", "test_tune"),  # of those that measure
)


@pytest.fixture(autouse=True)
def no_open_watch() -> Iterator[None]:
    yield
    for watch in list(open_watches):
        watch.session.quiet = True
        watch.close()
    open_watches.clear()


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have all programs put their temporary files into a folder that is deleted with the session.

    Otherwise torchrun, multiprocessing and Chromium leave some behind.
    """
    tmp_path_factory.getbasetemp()  # pytest's own stay where they are, for a look at what has failed
    before, directory = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="gw-")  # sockets go there: a short name
    Path(directory).chmod(0o755)  # and other users' programs look into them
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    multiprocessing.util._run_finalizers(-100)  # its files there, which it would miss when the interpreter ends
    shutil.rmtree(directory, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    says = "only the tests of tests/unit, or the others that may share the machine, or those marked `alone` (scripts/run-tests.sh)"
    parser.addoption("--part", choices=("unit", "shared", "alone"), help=says)


def pytest_configure(config: pytest.Config) -> None:
    if part := config.getoption("--part"):
        os.environ["TEST_PART"] = part  # tests.servers gives each part ports of its own


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have what is imported and collected, which stays, not searched for garbage again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def part_of(item: pytest.Item) -> str:
    if item.get_closest_marker("alone") is not None:
        return "alone"
    return "unit" if item.path.is_relative_to(UNIT) else "shared"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have no test of this part before Python reads them: to import them takes seconds."""
    part = config.getoption("--part")
    if part is None or (UNIT.is_relative_to(collection_path) and collection_path != UNIT):
        return None
    if part != "alone" and collection_path.is_relative_to(UNIT) != (part == "unit"):
        return True
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    whole = re.search(rf"^pytestmark = .*{re.escape(ALONE)}", text, re.MULTILINE) is not None
    return (ALONE not in text if part == "alone" else whole) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next((place for place, names in enumerate(FIRST) if item.path.stem in names), len(FIRST))
    )
    alone = [item for item in items if part_of(item) == "alone"]
    if (
        "PYTEST_XDIST_WORKER" not in os.environ
    ):  # else what fails is tried again when nothing else runs (scripts/run-tests.sh)
        for item in alone:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))  # a machine has other work at times
    if (part := config.getoption("--part")) is None:
        return
    for item in alone:
        if ALONE not in item.path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{item.nodeid}: neither part would run it: write {ALONE} in its file")
    config.hook.pytest_deselected(items=[item for item in items if part_of(item) != part])
    items[:] = [item for item in items if part_of(item) == part]
