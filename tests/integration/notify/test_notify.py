"""The agent notifies a webhook by itself: one that fails, hangs and comes back, over restarts of the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import agent, hook_environment, training
from tests.receivers import Inbox, webhook
from tests.servers import free_port, wait_for

pytest.importorskip("apprise")


def quick_config(directory: Path, *urls: str) -> dict[str, str]:
    """Return an environment whose agent notifies these after 3 s of starving."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "gpuwatch.toml"
    listed = ", ".join(f'"{url}"' for url in urls)
    path.write_text(
        f"[alerts]\nstarved_for_s = 3\nkeep_firing_for_s = 600\ntelemetry_for_s = 500\n[notify]\nurls = [{listed}]\n"
    )
    return {**os.environ, "GPUWATCH_CONFIG": str(path)}


def json_url(inbox: Inbox) -> str:
    return f"json://127.0.0.1:{inbox.port}/alerts?cto=2&rto=2"


def starved(inbox: Inbox) -> list[dict[str, Any]]:
    return [each for each in inbox.accepted if "GpuStarved" in each["title"]]


@pytest.mark.alone  # it depends on deadlines of the product
def test_a_webhook_that_fails_and_hangs_is_reported_in_the_end_and_only_once_over_a_restart(tmp_path: Path) -> None:
    answers = iter([504])
    place = tmp_path / "agent"
    with webhook() as inbox:
        inbox.delay_s = 5  # longer than it waits
        inbox.answer = lambda: next(answers, 200)
        environment = quick_config(place, json_url(inbox))
        with training(hook_environment(place, GPUWATCH_RUN="starving"), "--seconds", "60"):
            with agent(place, environment) as node:
                wait_for("it is tried", lambda: inbox.posts, 45)
                inbox.delay_s = 0
                wait_for("it is delivered", lambda: starved(inbox), 45)
                failed = "gpuwatch_notification_failures_total"
                series = node.get("/api/v1/series", metric=failed)["series"]
                assert series[0]["points"][-1][1] >= 1
            assert len(inbox.posts) >= 2
            with agent(place, environment) as node:
                wait_for(
                    "the restarted agent has found it again",
                    lambda: [f for f in node.get("/api/v1/findings")["findings"] if f["cause"].startswith("input_")],
                    30,
                )
                subprocess.run(["sleep", "6"], check=True)  # three of its turns
    assert len(starved(inbox)) == 1
    (message,) = starved(inbox)
    assert message["title"].startswith("[warning] GpuStarved on ")
    assert "run " in message["message"] and "Do: " in message["message"]


def test_what_could_not_be_delivered_is_delivered_by_the_next_agent(tmp_path: Path) -> None:
    port = free_port()  # no server listens there yet
    place = tmp_path / "agent"
    inbox = Inbox(port=port)
    environment = quick_config(place, json_url(inbox))
    state = place / "history.db.notify.json"
    with (
        agent(place, environment),
        training(hook_environment(place, GPUWATCH_RUN="starving"), "--seconds", "60"),
    ):
        wait_for("it waits to be delivered", lambda: state.exists() and "[warning] GpuStarved" in state.read_text(), 45)
    assert inbox.accepted == []
    with webhook(inbox, port), agent(place, environment):
        wait_for("it is delivered", lambda: starved(inbox), 45)
    assert len(starved(inbox)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--notify", "nosuch://secret-token"], "--notify: Apprise does not support nosuch://"),
        (["--config", "{dir}/no.toml"], "no.toml: No such file"),
        (["--config", "{dir}/bad.toml"], "[agent] htp is not a key; did you mean http?"),
    ],
)
def test_what_is_wrong_is_said_at_the_start_with_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.toml").write_text("[agent]\nhtp = ':9478'\n")
    command = [sys.executable, "-m", "gpuwatch", "agent", "--http", f"127.0.0.1:{free_port()}"]
    command += ["--listen", f"ipc://{tmp_path}/hook.sock", "--history", str(tmp_path / "history.db")]
    command += [each.format(dir=tmp_path) for each in arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert message in done.stderr
    assert "secret-token" not in done.stderr
