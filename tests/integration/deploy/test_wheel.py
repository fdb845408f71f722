"""The wheel that is built of this checkout: pure Python, for any machine, and whole."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.programs import ROOT


def test_the_wheel_is_for_any_machine_and_is_imported_from_its_files_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")

    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert not [name for name in names if name.endswith((".c", ".so"))]
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gpuwatch/tools/reports/templates").iterdir()}
    assert len(templates) > 5 and templates <= set(names)
    assert "gpuwatch/py.typed" in names and "gpuwatch_agent/main.py" in names
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import gpuwatch; "
        "from gpuwatch.alerting.render import render; "
        "import gpuwatch.metrics, gpuwatch_agent.history.file, gpuwatch_dashboards.panels; "
        "print(gpuwatch.__file__, sum(gpuwatch.watch([2, 3]), 0), render() == open(sys.argv[1], encoding='utf-8').read())"
    )
    rules = str(ROOT / "deploy/prometheus/rules/gpuwatch.yml")
    done = subprocess.run(
        [sys.executable, "-c", code, rules], cwd=site, capture_output=True, text=True, timeout=180, check=True
    )
    file, total, same_rules = done.stdout.split()
    assert Path(file).is_relative_to(site) and (total, same_rules) == ("5", "True")
