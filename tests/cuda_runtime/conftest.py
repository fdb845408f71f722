"""Run each test of the simulated runtime in a forked process.

A sticky error or a broken capture ends with the process, as it does on a GPU.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback

import pytest

from tests.cuda_runtime.runtime import Runtime, loaded


@pytest.fixture(scope="session")
def imported() -> None:
    """Import what torch needs for its first optimizer once for all children: it takes seconds.

    This sets up no device and starts no thread.
    """
    torch = pytest.importorskip("torch")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.fixture
def runtime(imported: None) -> Runtime:
    """The runtime, with CUDA set up in torch and nothing called yet."""
    return loaded()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a child, which sets up CUDA: this process never does, so that it can be forked."""
    if pyfuncitem.get_closest_marker("cuda_runtime") is None:
        return None
    runtime = loaded()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(_outcome(pyfuncitem, runtime), pipe)
        os._exit(0)
    os.close(writer)
    written = b""
    try:
        with os.fdopen(reader, "rb") as pipe:
            written = pipe.read()
    finally:  # a timeout too
        if not written:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not written:
        pytest.fail("the test's process crashed: see what it has printed", pytrace=False)
    kind, text = pickle.loads(written)
    if kind == "skipped":
        pytest.skip(text)
    if kind == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _outcome(test: pytest.Function, runtime: Runtime) -> tuple[str, str]:
    import torch

    try:
        torch.cuda.init()
        torch.cuda.synchronize()
        runtime.reset()
        names = test._fixtureinfo.argnames
        test.obj(**{name: test.funcargs[name] for name in names})
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped.msg)
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""
