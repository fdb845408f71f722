"""`gpuwatch agent` goes on in a fresh interpreter: what it hands over, and what happens where it may not."""

from __future__ import annotations

import logging
import os
import pickle
import sys

import pytest

from gpuwatch.config import AgentSettings, Config, NotifySettings
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch_agent import __main__ as fresh

OPTIONS = Config(
    agent=AgentSettings("127.0.0.1:1", history="/x/history.db"),
    notify=NotifySettings(("json://secret@host",)),
    thresholds=Thresholds(input_share=0.42),
)


def test_options_thresholds_and_log_level_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[object] = []

    before = dict(os.environ)

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert program == sys.executable and arguments[1:4] == ["-m", "gpuwatch_agent", "--options-from"]
        assert "secret" not in " ".join(arguments)
        descriptor = int(arguments[4])
        assert os.get_inheritable(descriptor)
        with os.fdopen(descriptor, "rb") as file:
            handed.extend(pickle.load(file))
        assert environment["PYTHONSAFEPATH"] == "1" and dict(os.environ) == before
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        fresh.go_on_as_agent(OPTIONS)
    assert handed == [OPTIONS, logging.getLogger().getEffectiveLevel()]


def test_where_it_is_forbidden_the_agent_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[object] = []

    def forbidden(*_: object) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr("gpuwatch_agent.main.run_agent", lambda *given: served.extend(given))
    fresh.go_on_as_agent(OPTIONS)
    assert served == [OPTIONS]


def test_by_hand_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuwatch_agent"])
    with pytest.raises(SystemExit, match="2"):
        fresh.main()
    assert "start it as `gpuwatch agent`" in capsys.readouterr().err
