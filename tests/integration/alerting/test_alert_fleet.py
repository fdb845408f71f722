"""What a site is sent: 64 starving ranks, 24 idle GPUs of 8 users and a hang of 4 ranks.

Prometheus and Alertmanager are real. The pages are rendered by the agent's exporter from samples that the metric
catalogue has checked.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch.ledger.states import GPU_STATES, RUN_STATES
from gpuwatch.metrics import BY_NAME, Sample
from gpuwatch_agent.exporter import Page
from tests.catalogue import check
from tests.integration.alerting.test_alertmanager import CONFIG, FOLDER
from tests.receivers import webhook
from tests.servers import free_port, start_alertmanager, start_prometheus, wait_for

QUICK = AlertThresholds(
    ledger_window_s=10, starved_window_s=10, starved_min_training_s=4, starved_for_s=3, idle_window_s=20, idle_for_s=3,
    stalled_window_s=10, stalled_for_s=3, hung_for_s=3, busy_for_s=10, busy_window_s=10,
)  # fmt: skip
NODES = [*(f"train{n}" for n in range(8)), "idle0", "idle1", "idle2", "hang0"]


class Site:
    """The nodes' pages. Time passes in all of them; a run can end."""

    def __init__(self) -> None:
        self.begin_s = time.time()
        self.ended_s: float | None = None
        """When the run on the training nodes ended."""

    def page(self, node: str) -> bytes:
        samples = [Sample("gpuwatch_sample_timestamp_seconds", time.time()), *self._of(node)]
        return Page(list(check(iter(samples)))).body(False, False)  # type: ignore[arg-type]

    def _of(self, node: str) -> Iterator[Sample]:
        now_s = time.time()
        for gpu in range(4 if node == "hang0" else 8):
            key = (str(gpu), f"GPU-{node}-{gpu}")
            if node.startswith("idle"):
                yield from self._gpu(key, now_s, {"held_idle": 1.0}, user=f"user{gpu}")
                yield Sample("gpuwatch_gpu_holder_pid", 4000 + gpu, (*key, "jupyter-lab"))
            elif node == "hang0":
                yield from self._rank(key, "hung", gpu, "bob", {"stalled": 1.0}, now_s, steps=0)
            else:
                rank = 8 * int(node[-1]) + gpu
                until_s = min(now_s, self.ended_s or now_s)
                shares = {"input_wait": 0.4, "compute": 0.6}
                yield from self._rank(key, "big", rank, "alice", shares, until_s, steps=10, up=self.ended_s is None)
        if node.startswith("train") and self.ended_s is None:
            yield Sample("gpuwatch_finding_active", 1, ("big", "input_cpu"))
            yield Sample("gpuwatch_finding_evidence_ratio", 0.4, ("big", "input_cpu"))

    def _rank(
        self, gpu: tuple[str, str], run: str, rank: int, user: str, shares: dict[str, float], until_s: float,
        steps: int, up: bool = True,
    ) -> Iterator[Sample]:  # fmt: skip
        key, age_s = (run, str(rank)), until_s - self.begin_s
        for state in RUN_STATES:
            yield Sample("gpuwatch_run_seconds_total", age_s * shares.get(state, 0.0), (*key, state))
        yield Sample("gpuwatch_ledger_watermark_timestamp_seconds", until_s, key)
        yield Sample("gpuwatch_steps_total", int(steps * age_s), key)
        yield Sample("gpuwatch_run_up", float(up), key)
        info = {"name": f"name-{run}", "job_id": "4711", "user": user, "num_workers": "4", "device": "cuda"}
        labels = BY_NAME["gpuwatch_run_info"].labels[2:]
        yield Sample("gpuwatch_run_info", 1, (*key, *(info.get(label, "") for label in labels)))
        yield from self._gpu(gpu, time.time(), shares, run if up else "", str(rank) if up else "", user)

    def _gpu(
        self,
        key: tuple[str, str],
        now_s: float,
        shares: dict[str, float],
        run: str = "",
        rank: str = "",
        user: str = "",
    ) -> Iterator[Sample]:
        for state in GPU_STATES:
            yield Sample("gpuwatch_gpu_seconds_total", (now_s - self.begin_s) * shares.get(state, 0.0), (*key, state))
        yield Sample("gpuwatch_gpu_ledger_watermark_timestamp_seconds", now_s, key)
        yield Sample("gpuwatch_gpu_utilization_ratio", float("stalled" in shares), key)
        yield Sample("gpuwatch_gpu_processes", 1, key)
        yield Sample("gpuwatch_gpu_owner_info", 1, (*key, run, rank, user, "4711", "", "", ""))


@contextmanager
def serving(site: Site) -> Iterator[int]:
    """Serve each node's page at /NODE; give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = site.page(self.path[1:])
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    port = free_port()
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield port
        finally:
            server.shutdown()
            thread.join(10)


def alertmanager_config(folder: Path, slack: str) -> str:
    """Return the shipped configuration with Slack as its receiver and a group_wait of 20 seconds.

    In that time even a busy machine has seen all nodes.
    """
    folder.mkdir(parents=True)
    shutil.copytree(FOLDER / "templates", folder / "templates")
    config = yaml.safe_load(CONFIG.read_text())
    config["route"] |= {"receiver": "slack", "group_wait": "20s"}
    for route in config["route"]["routes"]:
        route["group_wait"] = "20s"
    [receiver] = [each for each in config["receivers"] if each["name"] == "slack"]
    receiver["slack_configs"][0].pop("api_url_file")
    receiver["slack_configs"][0]["api_url"] = slack
    return json.dumps(config)


def prometheus_config(port: int, alertmanager: str) -> str:
    """Return a configuration with one target for each node, named as such."""
    targets = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {"__metrics_path__": f"/{node}", "instance": f"{node}:9478"},
        }
        for node in NODES
    ]
    return json.dumps(
        {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "gpuwatch", "static_configs": targets}],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]},
        }
    )


def test_one_message_for_each_run_and_owner(tmp_path: Path) -> None:
    site = Site()
    with (
        serving(site) as port,
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", alertmanager_config(tmp_path / "am", inbox.url)) as alertmanager,
        start_prometheus(tmp_path / "prom", prometheus_config(port, alertmanager.url), render(QUICK)) as prometheus,
    ):
        wait_for("the ten messages arrive", lambda: len(inbox.accepted) >= 10, 180)
        # An agent that is delayed by a busy machine has one more, in between, which is right.
        stalled = 'count(gpu_kind:gpuwatch_gpu_seconds:share10s{kind="stalled"} > 0.5)'
        wait_for("all GPUs of the run that hangs are known to", lambda: prometheus.value(stalled) == 4, 120)
        time.sleep(12)
        assert firing(prometheus, "GpuBusyNoProgress") == 0  # RunHung is about them
        sent = messages(inbox.accepted)
        site.ended_s = time.time()
        wait_for("the alert ends with its run", lambda: not firing(prometheus, "GpuStarved"), 30)
        assert firing(prometheus, "GpuHeldIdle") == 24
    by_name = {name: [text for title, text in sent if title.partition("] ")[2].startswith(name)] for name in NAMES}
    assert {name: len(texts) for name, texts in by_name.items()} == {"GpuStarved": 1, "GpuHeldIdle": 8, "RunHung": 1}
    assert len(sent) == 10, [title for title, _ in sent]
    assert max(len(title + text) for title, text in sent) < 1500
    [starved] = by_name["GpuStarved"]
    assert "40% of its training time, on 64 of 64 ranks" in starved
    assert "GPUs on 8 nodes: 8 on train0:9478" in starved and "Owner: user alice, job 4711" in starved
    assert "Cause: input_cpu (40%)" in starved and "num_workers is 4 now" in starved
    cost = float(starved.partition("Cost: ")[2].partition(" GPU-hours a day")[0])
    assert 0.9 * 64 * 0.4 * 24 < cost < 1.1 * 64 * 0.4 * 24
    [hung] = by_name["RunHung"]
    assert "none of its 4 ranks makes progress" in hung and "GPU 0, 1, 2, 3 on hang0:9478" in hung
    for text in by_name["GpuHeldIdle"]:
        assert text.count("is held idle by user") == 4 and "(jupyter-lab)" in text  # three GPUs, and the first in full


NAMES = ("GpuStarved", "GpuHeldIdle", "RunHung")


def messages(bodies: Sequence[Any]) -> list[tuple[str, str]]:
    """Return (title, text) of each Slack message."""
    return [(body["attachments"][0]["title"], body["attachments"][0]["text"]) for body in bodies]


def firing(prometheus: Any, name: str) -> int:
    """Return how many GPUs or runs it fires for: a GPU whose page came late is also held without its owner."""
    alerts = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
    return int(prometheus.value(f"count(count by (instance, gpu, run) ({alerts}))") or 0)
