"""Real JAX, whose CPU backend computes asynchronously as a GPU does. In processes of their own: JAX changes what gpuwatch says of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax (requirements-test.txt)")


def result_of(*command: str) -> Any:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def scenario(name: str) -> Any:
    return result_of("benchmarks/accuracy_jax.py", name, "--json")


def test_a_hidden_wait_is_not_called_starvation() -> None:
    outcome = scenario("hidden wait")
    assert (outcome["device"], outcome["timeline"]) == ("jax:cpu", "device")
    assert outcome["coverage"] > 0.9
    assert outcome["host_clock"] > 0.15
    assert outcome["reported"] == pytest.approx(outcome["truth"], abs=0.02)
    assert outcome["reported"] < 0.05
    assert "input-bound" not in outcome["verdict"]


@pytest.mark.parametrize("name", ["partly hidden wait", "partly hidden, donated", "partly hidden, contexts"])
def test_exposed_starvation_is_reported_within_two_points(name: str) -> None:
    errors, exposed = [], []
    for _ in range(3):
        outcome = scenario(name)
        assert outcome["timeline"] == "device"
        errors.append(outcome["reported"] - outcome["truth"])
        exposed.append(outcome["truth"])
    assert sorted(errors)[1] == pytest.approx(0, abs=0.02)
    assert max(map(abs, errors)) < 0.05


def test_a_wait_after_each_read_of_the_loss_is_exposed() -> None:
    outcome = scenario("loss read each step")
    assert outcome["reported"] == pytest.approx(outcome["host_clock"], abs=0.02)
    assert outcome["reported"] > 0.15


def test_training_is_the_same_and_no_array_lives_longer() -> None:
    plain, watched = (result_of("tests/integration/jax_program.py", how) for how in ("plain", "watched"))
    assert watched.pop("timeline") == "device"
    assert plain.pop("timeline") is None
    assert watched == plain
    assert plain["survivors"] <= 2
