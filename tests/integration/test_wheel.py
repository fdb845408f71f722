"""The wheel that is built of this checkout: with the hot path compiled, without a compiler, and for any machine."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from tests.servers import require

ROOT = Path(__file__).parents[2]
KIND = (
    "from gpuwatch.watched_iterator import WatchedIterator as W; import gpuwatch; print(W.__name__, gpuwatch.__file__)"
)


def build(folder: Path, **environment: str) -> tuple[Path, str]:
    """Return the wheel and what was said while it was built."""
    scratch = folder / "scratch"
    scratch.mkdir()
    environment["TMPDIR"] = str(scratch)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert not list(scratch.iterdir())
    return wheel, done.stdout + done.stderr


def unpacked(wheel: Path, folder: Path) -> str:
    """Return the kind of hot path that an installation from this wheel alone runs."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    assert not [name for name in names if name.endswith(".c")]
    assert "gpuwatch/py.typed" in names and "gpuwatch_agent/main.py" in names
    environment = {name: value for name, value in os.environ.items() if name != "GPUWATCH_COMPILED"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {KIND}"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    kind, file = done.stdout.split()
    assert Path(file).is_relative_to(folder)
    return kind


def test_with_a_compiler_the_wheel_is_this_machines_and_runs_compiled(tmp_path: Path) -> None:
    require("gcc", "cc")
    wheel, _ = build(tmp_path, GPUWATCH_COMPILED="1")
    assert not wheel.name.endswith("-none-any.whl")
    assert unpacked(wheel, tmp_path / "site") == "Compiled"


def test_without_a_compiler_it_is_whole_and_says_so(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, GPUWATCH_COMPILED="1", CC="/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "the hot path is not compiled, and runs in Python" in said
    assert unpacked(wheel, tmp_path / "site") == "InPython"


def test_a_wheel_for_any_machine_is_one_variable_away(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, GPUWATCH_COMPILED="0")
    assert wheel.name.endswith("-py3-none-any.whl") and "not compiled" not in said
    assert unpacked(wheel, tmp_path / "site") == "InPython"


def test_a_module_of_another_source_is_compiled_anew_whatever_the_files_ages(tmp_path: Path) -> None:
    require("gcc", "cc")
    source = tmp_path / "gpuwatch" / "_hot.c"
    source.parent.mkdir()
    source.write_bytes((ROOT / "gpuwatch" / "_hot.c").read_bytes())
    os.utime(source, (0, 0))  # as out of an archive
    left_over = source.with_name("_hot" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    left_over.write_bytes(b"of another source")
    code = "import sys; from pathlib import Path; from hatch_build import compile_extension; compile_extension(*map(Path, sys.argv[1:] * 2))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=120, check=True)
    assert left_over.read_bytes().startswith(b"\x7fELF")
