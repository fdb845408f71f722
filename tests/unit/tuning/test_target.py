"""What a user may give, and what is reported where it will not do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuwatch.errors import ConfigError
from gpuwatch.tools.tuning.result import Setting
from gpuwatch.tools.tuning.target import load, target


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    known, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if "tuned" in name:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["tuned_a:make", "tuned_a.py:make", "tuned_a:Data.make"])
def test_a_function_is_found_by_module_by_file_and_within_a_class(directory: Path, name: str) -> None:
    (directory / "tuned_a.py").write_text("def make(): return 1\nclass Data:\n    make = staticmethod(make)\n")
    assert load(name)() == 1


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("tuned_b", "", "is not MODULE:FUNCTION; give e.g. train:make_loader"),
        ("tuned_c:make", None, "no module 'tuned_c' in"),
        ("tuned_d.py:make", None, "there is no file tuned_d.py"),
        ("tuned_e:make", "def build(): ...", "tuned_e has no 'make'; it defines build"),
        ("tuned_f:make", "import nothere", "No module named 'nothere'"),
        ("tuned_g:make", "raise SystemExit(3)", "ends the program when it is imported"),
        ("tuned_h:make", "x = 1\ny = 1 / 0", "ZeroDivisionError: division by zero; "),
    ],
)
def test_what_cannot_be_loaded_is_reported(directory: Path, name: str, code: str | None, says: str) -> None:
    if code is not None:
        (directory / f"{name.partition(':')[0]}.py").write_text(code)
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert says in str(caught.value)
    if name == "tuned_h:make":
        assert "tuned_h.py:2" in str(caught.value)


def test_a_function_gets_the_settings_that_it_takes() -> None:
    setting = Setting(3, 4, pin_memory=True)
    some = target(lambda num_workers, prefetch_factor=2, other=1: (num_workers, prefetch_factor, other))
    assert some.make(setting) == (3, 4, 1)
    assert some.varies == {"num_workers", "prefetch_factor"}
    every = target(lambda **settings: settings)
    assert every.make(setting) == asdict(setting)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, "of type int, neither a function"),
        (lambda path, num_workers: None, "needs path, which gpuwatch cannot give it"),
        (lambda pin_memory: None, "takes pin_memory but no num_workers"),
    ],
)
def test_what_makes_no_loader_is_reported_before_anything_runs(given: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        target(given)


@pytest.mark.parametrize("file", ["tuned_a-b.py", "01_tuned.py", "tuned_模型.py"])
def test_a_file_whose_name_is_no_identifier_is_loaded(directory: Path, file: str) -> None:
    """It was "importing 01_tuned failed: ValueError: invalid format: '01_tuned:make'"."""
    (directory / file).write_text("def make(): return 1\nclass Data:\n    make = staticmethod(make)\n")
    assert load(f"{file}:make")() == 1
    assert load(f"./{file}:Data.make")() == 1
    with pytest.raises(ConfigError, match="has no 'other'; it defines Data, make"):
        load(f"{file}:other")
