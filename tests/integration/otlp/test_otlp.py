"""A real agent pushes to a real HTTP server: the same second's page, findings, an outage, restarts, refused options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent_process import Agent, Trainer
from tests.receivers import Collector, otlp_collector
from tests.servers import free_port, wait_for

pytest.importorskip("opentelemetry.proto")

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

PAGE = frozenset[tuple[str, str]]
ENVIRONMENT = {**os.environ, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=s3cret", "OTEL_SERVICE_NAME": "gpuwatch"}


def attributes(message: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in message.attributes}


def pushed(collector: Collector, number: int = -1) -> tuple[dict[str, str], dict[tuple[str, PAGE], Any]]:
    """Return the resource of a push, and its points by name and attributes."""
    request = ExportMetricsServiceRequest.FromString(collector.bodies("/v1/metrics")[number])
    (resource,) = request.resource_metrics
    return attributes(resource.resource), {
        (metric.name, frozenset(attributes(point).items())): point
        for metric in resource.scope_metrics[0].metrics
        for point in (*metric.gauge.data_points, *metric.sum.data_points)
    }


def steps(collector: Collector, run: str, number: int = -1) -> Any:
    return pushed(collector, number)[1]["gpuwatch_steps_total", frozenset({("run", run), ("rank", "0")})]


def events(collector: Collector) -> list[tuple[str, dict[str, str]]]:
    return [
        (record.event_name, attributes(record))
        for body in collector.bodies("/v1/logs")
        for record in ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs[0].log_records
    ]


def starving(collector: Collector) -> list[str]:
    return [name for name, about in events(collector) if about["cause"].startswith("input_")]


def options(collector: Collector, every_s: int = 1) -> list[str]:
    return ["--otlp", collector.url.replace("//", "//user:passw0rd@"), "--otlp-every-s", str(every_s)]


def test_the_page_and_a_finding_arrive_over_an_outage_and_a_restart(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        place = Agent(tmp_path, *options(collector), environment=ENVIRONMENT)
        with place as agent, Trainer(agent, data_s=0.05, compute_s=0.01, run="starves") as trainer:
            agent.wait_run("starves", status="running")
            wait_for("the finding is there", lambda: starving(collector), 45)
            wait_for("steps are there", lambda: steps(collector, "starves").as_double > 20, 30)
            resource, there = pushed(collector)
            page = agent.metrics()
            names = {name for name, _ in there}
            assert names - {name for name in names if name.startswith("hw.")} >= {key[0] for key in page}
            assert resource["service.name"] == "gpuwatch"
            assert resource["service.instance.id"].endswith(f":{agent.port}")
            assert collector.posts[-1][1]["api-key"] == "s3cret"
            first, last = steps(collector, "starves", -2), steps(collector, "starves")
            assert first.start_time_unix_nano == last.start_time_unix_nano <= first.time_unix_nano < last.time_unix_nano
            assert page["gpuwatch_otlp_requests_sent_total",] >= 2

            collector.answer = lambda path: (503, {}, b"")  # an outage, over which the agent restarts
            done = steps(collector, "starves").as_double
            wait_for("failures count", lambda: agent.metrics()["gpuwatch_otlp_request_failures_total",] >= 2, 30)
            assert agent.stop() == 0
            agent.start()
            agent.wait_run("starves", status="running")
            collector.answer = lambda path: (200, {}, b"")
            wait_for("it goes on", lambda: steps(collector, "starves").as_double > done + 50, 90)
            assert starving(collector) == ["gpuwatch.finding.begin"]
            trainer.finish()
            trainer.report()
            wait_for("it has ended", lambda: "gpuwatch.finding.end" in starving(collector), 90)
            about = next(about for name, about in events(collector) if name.endswith("end"))
            assert (about["run"], about["rank"]) == ("starves", "0") and about["user"] and about["advice"]
            assert starving(collector) == ["gpuwatch.finding.begin", "gpuwatch.finding.end"]
            assert (
                place.log.read_text().count("rejected or did not answer /v1/metrics: status 503") <= 2
            )  # one of each agent
            assert "Traceback" not in place.log.read_text()
            assert "passw0rd" not in place.log.read_text() and "s3cret" not in place.log.read_text()


def test_a_collector_that_hangs_holds_up_neither_samples_nor_the_end(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        collector.delay_s = 60
        with Agent(tmp_path, *options(collector)) as agent:
            wait_for("it is asked", lambda: collector.posts, 30)

            def sample_s() -> float:
                return agent.metrics()["gpuwatch_sample_timestamp_seconds",]

            begin_s = sample_s()
            wait_for("samples go on", lambda: sample_s() >= begin_s + 4, 20)
            assert agent.get_text("/readyz") == "ok\n"
            assert agent.stop() == 0
            assert "Traceback" not in agent.log.read_text()


def test_nothing_is_pushed_without_the_option(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with Agent(tmp_path, environment=environment) as agent:
            assert not [key for key in agent.metrics() if "otlp" in key[0]]
            maps = Path(f"/proc/{agent.process.pid}/maps").read_text() if agent.process else ""
            assert maps and "google/_upb" not in maps
        assert collector.posts == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("collector:4318", "--otlp collector:4318: give the collector's URL without /v1/metrics"),
        ("http://user:passw0rd@c:4318/v1/metrics", "--otlp http://c:4318/v1/metrics: give the collector's URL"),
    ],
)
def test_a_wrong_url_ends_the_start_with_status_2(tmp_path: Path, url: str, message: str) -> None:
    printed = Agent(tmp_path).refused("--otlp", url)
    assert message in printed
    assert "passw0rd" not in printed


def test_a_configuration_file_may_name_the_collector(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        config = tmp_path / "gpuwatch.toml"
        config.write_text(f'[agent]\notlp = "{collector.url}"\notlp_every_s = 1\n')
        with Agent(tmp_path, "--config", str(config)):
            wait_for("it is pushed to", lambda: len(collector.bodies("/v1/metrics")) >= 3, 30)


def test_without_the_package_the_start_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()  # hides the real one, as if only another part were there
    command = [sys.executable, "-m", "gpuwatch", "agent", "--otlp", "http://127.0.0.1:4318"]
    command += ["--http", f"127.0.0.1:{free_port()}", "--listen", f"ipc://{tmp_path}/hook.sock"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, "--history", str(tmp_path / "history.db")],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 1
    assert "needs 'opentelemetry-proto'" in done.stderr
    assert "pip install 'gpuwatch-training[otlp]'" in done.stderr
