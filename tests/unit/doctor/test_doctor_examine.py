"""The registry, the report, and what happens to a check that crashes or hangs."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest

from gpuwatch.tools import doctor as report
from gpuwatch.tools.doctor import CHECKS, examine
from gpuwatch.tools.doctor.machine import Machine, Outcome, in_background, ok
from gpuwatch.tools.doctor.software import KNOWN
from tests.programs import ROOT

MakeMachine = Callable[..., Machine]
DOCS = ROOT / "docs/guides/doctor.md"
SAMPLE = [
    Outcome("ok", "3.11.7", None, "Software", "python"),
    Outcome("problem", "the driver is not loaded", "modprobe nvidia", "GPU", "driver"),
    Outcome("skipped", "there is no driver", None, "GPU", "visible GPUs"),
]


def test_nothing_is_wrong_with_a_healthy_machine(machine: MakeMachine) -> None:
    checks = examine(machine(), deadline_s=60)
    assert [check for check in checks if check.status in ("problem", "warning")] == []
    assert [(check.group, check.name) for check in checks] == [(group, name) for group, name, _ in CHECKS]
    assert {check.name for check in checks if check.status == "skipped"} == {
        "ptrace",
        "agent",
        "collectors",
        "version",
        "hook socket",
        "targets",
        "alert rules",
    }


def test_what_is_wrong_has_a_remedy(machine: MakeMachine, tmp_path: Path) -> None:
    bare = machine(procfs=tmp_path / "none", sysfs=tmp_path / "none", versions={}, disk=(1, 1), limit=(16, 16))
    checks = examine(bare, deadline_s=60)
    wrong = [check for check in checks if check.status in ("problem", "warning")]
    assert len(wrong) > 8
    assert [check.name for check in wrong if not check.remedy] == []
    assert all("\n" not in check.found for check in checks)


def test_a_check_that_crashes_is_a_result_and_stops_no_other(machine: MakeMachine) -> None:
    def crashes(host: Machine) -> Outcome:
        raise KeyError("cpu")

    checks = examine(machine(), [("a", "crashes", crashes), ("a", "works", lambda host: ok("fine"))], 60)
    assert [(check.name, check.status) for check in checks] == [("crashes", "warning"), ("works", "ok")]
    assert "KeyError: 'cpu'" in checks[0].found


def test_checks_that_hang_are_given_up_on_together(machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    end, waited, usual = threading.Event(), list[float](), report.wait

    def wait(futures: Any, seconds: float) -> None:
        waited.append(seconds)
        usual(futures, seconds)
        futures[-1].result(60)  # of the check that works, which may have had no core until now

    def hangs(host: Machine) -> Outcome:
        end.wait(60)
        return ok("at last")

    monkeypatch.setattr(report, "wait", wait)
    try:
        checks = examine(machine(), [("a", str(n), hangs) for n in range(5)] + [("a", "ok", lambda _: ok("fine"))], 0.3)
    finally:
        end.set()
    assert [check.status for check in checks] == ["problem"] * 5 + ["ok"]
    assert checks[0].found == "no result within 0.3 s"
    assert waited == [0.3], "once, for all of them"


def test_what_checks_share_is_read_once_and_a_failure_reaches_each_of_them() -> None:
    counted = iter(range(10))
    read = in_background(lambda: next(counted)).result
    assert [read(), read(), next(counted)] == [0, 0, 1]
    fails = in_background(lambda: {}["cpu"]).result
    for _ in range(2):
        with pytest.raises(KeyError, match="cpu"):
            fails()


def test_names_are_unique_and_groups_hold_together() -> None:
    names = [name for _, name, _ in CHECKS]
    groups = [group for group, _, _ in CHECKS]
    assert len(set(names)) == len(names) >= 24
    assert len([1 for before, group in zip(["", *groups], groups, strict=False) if before != group]) == len(set(groups))


def test_plain_text_has_one_unwrapped_line_a_check() -> None:
    assert report.as_text(SAMPLE, "title") == (
        "title\n\nSoftware\n"
        "ok       python        3.11.7\n\nGPU\n"
        "problem  driver        the driver is not loaded\n"
        "                       -> modprobe nvidia\n"
        "skipped  visible GPUs  there is no driver\n\n"
        "problem: 1, warning: 0, ok: 1, skipped: 1"
    )


def test_a_terminal_gets_wrapped_lines_in_colour() -> None:
    long = "a word and another " * 5
    checks = [Outcome("ok", long, None, "g", "one"), Outcome("problem", long, "act " * 20, "g", "two")]
    coloured = report.as_text(checks, "title", 60)
    text = re.sub(r"\x1b\[\d+m", "", coloured)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[3].startswith("ok       one  a word") and lines[4].startswith(" " * 14 + "and another")
    assert text.count("another") == 10 and text.count("act") == 20
    assert "\x1b[32mok\x1b[0m  " in coloured and "\x1b[31m\x1b[1mproblem\x1b[0m  two" in coloured


def test_json_is_as_documented() -> None:
    document = json.loads(report.as_json(SAMPLE, "0.1.0", "node-17"))
    block = re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block
    documented = json.loads(block[1])
    assert documented.keys() == document.keys()
    assert documented["counts"].keys() == document["counts"].keys()
    assert sum(documented["counts"].values()) == len(CHECKS)
    assert documented["checks"][0].keys() == document["checks"][0].keys()
    assert document["counts"] == {"problem": 1, "warning": 0, "ok": 1, "skipped": 1}
    assert document["checks"][1]["remedy"] == "modprobe nvidia" and document["checks"][0]["remedy"] is None


def documented_tables() -> str:
    """Return the two tables of docs/guides/doctor.md as the code has them."""
    lines = ["| group | check | what it checks |", "|---|---|---|"]
    for group, name, look in CHECKS:
        first = " ".join((look.__doc__ or "").split("\n\n")[0].split()).partition(" Source:")[0]
        lines.append(f"| {group} | {name} | {first} |")
    variables = "gpuwatch reads these variables: " + ", ".join(f"`{name}`" for name in KNOWN) + "."
    return "\n".join(lines) + "\n\n" + fill(variables, 120)


def test_golden_docs_list_every_check() -> None:
    begin, end = "<!-- checks -->\n", "\n<!-- end -->"
    before, _, rest = DOCS.read_text().partition(begin)
    now, _, after = rest.partition(end)
    assert after, "docs/guides/doctor.md lacks its marks"
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(before + begin + documented_tables() + end + after)
    else:
        assert now == documented_tables(), "UPDATE_GOLDEN=1 pytest tests/unit/doctor writes it"


def test_every_variable_that_the_code_reads_is_known() -> None:
    sources = [*ROOT.glob("gpuwatch/**/*.py"), *ROOT.glob("agent/**/*.py"), *ROOT.glob("dashboards/**/*.py")]
    sources += ROOT.glob("docker-compose*.yml")
    read = {
        name
        for path in sources
        if "doctor" not in path.parts
        for name in re.findall(r"[\"'{](GPUWATCH_[A-Z_]+)", path.read_text())
    }
    assert read - KNOWN.keys() == set()
    assert len(read) > 10


@pytest.mark.parametrize(("group", "name", "look"), CHECKS, ids=[name for _, name, _ in CHECKS])
def test_no_check_crashes_where_there_is_nothing_at_all(
    machine: MakeMachine, tmp_path: Path, group: str, name: str, look: Callable[[Machine], Outcome]
) -> None:
    nothing = tmp_path / "none"
    bare = machine(
        procfs=nothing, sysfs=nothing, dev=nothing, shm=nothing, versions={}, requirements=lambda: [], history=None
    )
    assert look(bare).status in ("ok", "warning", "problem", "skipped")
