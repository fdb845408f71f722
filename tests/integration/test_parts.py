"""The parts of `make test`: every test is in exactly one, and what comes of all is one exit status."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT

FILES = {
    "test_waits.py": "def test_waits(): pass\n",
    "unit/test_computes.py": "import pytest\ndef test_computes(): pass\n@pytest.mark.alone\ndef test_computes_alone(): pass\n",
    "test_measures.py": "import pytest\npytestmark = [pytest.mark.alone, pytest.mark.timeout(60)]\ndef test_measures(): pass\n",
    "test_both.py": "import pytest\ndef test_waits_too(): pass\n@pytest.mark.alone\ndef test_measures_too(): pass\n",
}
# Only what is needed: each start of pytest would import all that is installed.
PLUGINS = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "TEST_WORKERS": "1",
    "PYTEST_PLUGINS": "xdist.plugin,pytest_rerunfailures,pytest_timeout",
    "ALONE_WORKERS": "1",
}
SETTINGS = "[pytest]\nmarkers = alone\naddopts = --import-mode=importlib --strict-markers -p no:cacheprovider\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def collected(project: Path, *options: str) -> tuple[set[str], str]:
    """Return the names of the tests that would run, and all that was printed."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    done = subprocess.run(command, cwd=project, env=PLUGINS, capture_output=True, text=True, timeout=180)
    output = done.stdout + done.stderr
    return {line.rpartition("::")[2] for line in output.splitlines() if "::" in line}, output


@pytest.mark.parametrize("paths", [(), ("unit/test_computes.py", "test_both.py")])
def test_every_test_is_in_one_part(project: Path, paths: tuple[str, ...]) -> None:
    unit, shared, alone = {"test_computes"}, {"test_waits_too"}, {"test_measures_too", "test_computes_alone"}
    if not paths:
        shared, alone = shared | {"test_waits"}, alone | {"test_measures"}
    for part, tests in (("unit", unit), ("shared", shared), ("alone", alone)):
        assert collected(project, "--part", part, *paths)[0] == tests
    assert paths or collected(project)[0] == unit | shared | alone


@pytest.mark.parametrize(
    ("part", "others"),
    [
        ("unit", "test_waits.py"),
        ("shared", "unit/test_computes.py"),
        ("alone", "test_waits.py"),
    ],
)
def test_no_part_reads_what_is_in_another(project: Path, part: str, others: str) -> None:
    """To import a test takes seconds."""
    (project / others).write_text("raise SystemError('read')\n" + FILES[others])
    found, output = collected(project, "--part", part)
    assert found and "SystemError" not in output


def test_a_mark_that_would_be_overlooked_is_refused(project: Path) -> None:
    (project / "test_hidden.py").write_text("from pytest import mark\n@mark.alone\ndef test_hidden(): pass\n")
    output = collected(project, "--part", "shared")[1]
    assert "test_hidden: neither part would run it: write pytest.mark.alone in its file" in output


@pytest.mark.parametrize(
    ("unit", "shared", "alone", "status", "ran"),
    [
        *(
            (0, 0, 0, 0, 3),
            (5, 5, 0, 0, 3),
            (0, 5, 5, 0, 3),
            (5, 0, 5, 0, 3),
            (5, 5, 5, 5, 3),
            (0, 2, 0, 2, 1),
            (4, 4, 4, 4, 1),
        ),
        *(
            (0, 1, 0, 1, 3),
            (5, 1, 5, 1, 3),
            (0, 0, 1, 1, 4),
            (1, 0, 5, 1, 3),
            (1, 1, 1, 1, 4),
        ),  # what fails in `alone` runs once more
        (3, 0, 0, 3, 3),
    ],
)
def test_one_status_of_all_parts(tmp_path: Path, unit: int, shared: int, alone: int, status: int, ran: int) -> None:
    python = tmp_path / "python"
    cases = " ".join(f'*"--part {name} "*) exit {ends} ;;' for name, ends in (("unit", unit), ("shared", shared)))
    python.write_text(f'#!/bin/sh\necho "$@"\ncase "$*" in {cases} esac\nexit {alone}\n')
    python.chmod(0o755)
    command = ["sh", ROOT / "scripts/run-tests.sh", python, "-k", "hook or tune"]
    environment = {**os.environ, "TEST_WORKERS": "6", "ALONE_WORKERS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == status
    assert done.stdout.count("-k hook or tune") == ran == done.stdout.count("-m pytest --part")
    again = "-k hook or tune -n 0 --last-failed --last-failed-no-failures none\n"
    assert done.stdout.count(again) == (alone == 1)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy its processors are")
def test_fewer_files_at_a_time_where_other_programs_have_a_processor(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_WORKERS")}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        command = ["sh", ROOT / "scripts/run-tests.sh", python]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    finally:
        for other in others:
            other.kill()
            other.wait()
    workers = {line.split()[3]: line.split(" -n ")[1][0] for line in done.stdout.splitlines()}
    assert workers == {"unit": "2", "shared": "6", "alone": "1"}


@pytest.mark.parametrize("mark", ["@pytest.mark.alone", ""])
def test_what_fails_in_company_has_to_pass_alone_where_it_measures_time(project: Path, mark: str) -> None:
    """And fails for good where it does not."""
    (project / "test_measures.py").write_text(
        f"import os, pytest\n{mark}\n"
        "@pytest.mark.parametrize('passes', [True, False])\n"
        "def test_measures(passes): assert passes and 'PYTEST_XDIST_WORKER' not in os.environ\n"
    )
    (project / "pytest.ini").write_text(SETTINGS.replace(" -p no:cacheprovider", ""))
    script = ["sh", ROOT / "scripts/run-tests.sh", sys.executable]
    done = subprocess.run(script, cwd=project, env=PLUGINS, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    results = re.findall(r"1 failed, 1 passed|2 failed", done.stdout)
    assert results == (["2 failed", "1 failed, 1 passed"] if mark else ["2 failed"])
    (project / "test_measures.py").write_text((project / "test_measures.py").read_text().replace("passes and ", ""))
    done = subprocess.run(script, cwd=project, env=PLUGINS, capture_output=True, text=True, timeout=180)
    assert done.returncode == (0 if mark else 1)
    assert ("the failures of part 'alone' passed by themselves" in done.stdout) == bool(mark)
