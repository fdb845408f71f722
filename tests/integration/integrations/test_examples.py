"""The example scripts, run as they are, and what the documentation says of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.integration.integrations import workload as w

GUIDE = w.ROOT / "docs/guides/integrations.md"


@pytest.mark.parametrize("package", w.INTEGRATIONS)
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps.*", "ignore:.*pin_memory.*:UserWarning")
def test_an_example_trains_and_ends_with_its_verdict(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    w.require(package)
    monkeypatch.chdir(tmp_path)
    example = w.ROOT / f"examples/train_{package}.py"
    assert example.exists(), f"write {example}, like train_ignite.py"
    runpy.run_path(str(example), run_name="__main__")
    err = capsys.readouterr().err
    steps = 32 if package == "transformers" else 64
    assert f"gpuwatch · {package} example" in err
    assert f"{steps} steps of" in err
    if package != "accelerate":
        assert err.count("gpuwatch · ") == 1


def test_the_documentation_names_every_example() -> None:
    for path in sorted((w.ROOT / "examples").glob("train_*.py")):
        assert f"examples/{path.name}" in GUIDE.read_text(), f"name it in {GUIDE}"


@pytest.mark.parametrize("package", w.INTEGRATIONS)
def test_the_documentation_has_a_row_for_the_integration(package: str) -> None:
    rows = re.findall(rf"^\| .* `gpuwatch\.integrations\.{package}` ", GUIDE.read_text(), re.MULTILINE)
    assert len(rows) == 1, f"add it to the first table of {GUIDE}"
