"""Real JAX, whose CPU backend computes asynchronously as a GPU does, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax (requirements-test.txt)")


def result_of(how: str) -> Any:
    done = subprocess.run(
        [sys.executable, "tests/integration/hook/jax_program.py", how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_is_the_same_no_array_lives_longer_and_a_wait_is_not_called_starvation() -> None:
    plain, watched = result_of("plain"), result_of("watched")
    assert watched.pop("device") == "jax:cpu"
    assert "JAX runs asynchronously" in watched.pop("verdict")
    assert (plain.pop("device"), plain.pop("verdict")) == (None, None)
    # JAX's own threads may hold one for a moment. What is held a step longer would survive in each of the steps.
    assert max(watched.pop("survivors"), plain.pop("survivors")) <= 8
    assert watched == plain
