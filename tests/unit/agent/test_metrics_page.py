"""/metrics from fixed books, compared with tests/golden/metrics.txt; UPDATE_GOLDEN=1 rewrites it."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpuwatch.api.client import Reply
from gpuwatch.errors import NoData
from gpuwatch.ledger.states import GPU_STATES, RUN_STATES
from gpuwatch.metrics import BY_NAME, CATALOGUE, Sample
from gpuwatch_agent.collectors import Collect, build
from gpuwatch_agent.collectors.dcgm import DcgmCollector
from gpuwatch_agent.collectors.drivers import GpuDevice, Timing
from gpuwatch_agent.collectors.node import Roots
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.exporter import FORMATS, Page, finding_samples, gpu_samples, run_samples
from gpuwatch_agent.gpus import GpuLedgers, GpuReading
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s
from tests.unit.agent.test_finding_tracker import FINDING

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"
FIXTURES = Path(__file__).parents[2] / "fixtures"


class NoNvml(DcgmCollector):
    """An exporter on a node whose driver the agent cannot use."""

    def start(self) -> Iterator[GpuDevice | str]:
        raise NoData("no driver")


def node_collectors() -> list[Collect]:
    """Return the collectors of the fixture node, those that would look at this machine left out."""
    roots = Roots(procfs=FIXTURES / "node" / "proc", sysfs=FIXTURES / "node" / "sys", shm=FIXTURES)
    page = (FIXTURES / "dcgm" / "metrics.txt").read_bytes()
    gpus = NoNvml("http://node:9400", Timing(deadline_s=30), lambda *_: Reply(200, page))
    return [collect for name, collect in build(roots, gpus).items() if name not in ("shm", "agent_process")]


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    """Return samples of a GPU and the run on it, a finding, the fixture node and a recorded dcgm-exporter.

    There is also one sample of everything else in the catalogue.
    """
    table = ProcessTable(tmp_path)
    hook = FakeHook()
    run = Run("run-a", 0, BOOT)
    run.user, run.worker_totals = "alice", {"cpu_s": 12.5}
    hook.spend("startup", 1500 * MS)
    gpus = GpuLedgers()
    for _ in range(9):
        hook.step()
    hook.step(data_ns=400 * MS, compute_ns=100 * MS)
    for message in (hook.hello(name='resnet "50"\nα'), hook.message()):
        run.apply(message, hook.at_ns, wall_s(hook.at_ns))
    for at_ns in (hook.ledger.start_ns, hook.at_ns):
        gpus.advance([GpuReading("0", "GPU-1", (4711,), 0.9)], {4711: run}, at_ns)
    hook.spend("eval", 250 * MS)
    run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
    gpus.advance([GpuReading("0", "GPU-1", (4711,), 0.9)], {4711: run}, hook.at_ns)
    findings = FindingTracker()
    for at_ns in (0, 4 * S):
        findings.update("run-a", 0, [FINDING], at_ns, 0.0)
    found: list[Sample] = [*run_samples(run, int(wall_s(0) * S)), *WorkerWatch(table).samples(run)]
    found += gpu_samples(gpus.accounts["GPU-1"], table, int(wall_s(0) * S))
    found += finding_samples(findings, [run])
    found += [sample for collect in node_collectors() for sample in collect()]
    present = {sample.metric for sample in found}
    for metric in CATALOGUE:
        if metric.name not in present:
            value = 1.0 if metric.kind == "info" else zlib.crc32(metric.name.encode()) % 1000 + 0.5
            found.append(Sample(metric.name, value, tuple(f"{label}-x" for label in metric.labels)))
    return found


def test_page_is_as_it_was(samples: list[Sample]) -> None:
    text = Page(samples).body(False, False).decode()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "is it meant? `make golden` writes it again"


def test_page_is_the_catalogue_and_nothing_else(samples: list[Sample]) -> None:
    text = Page(samples).body(False, False).decode()
    assert re.findall(r"^# TYPE (\S+) ", text, re.M) == [metric.name for metric in CATALOGUE]


def test_both_formats_say_the_same(samples: list[Sample]) -> None:
    page = Page(samples)

    def read(families) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    text = read(parse_text(page.body(False, False).decode()))
    assert text == read(parse_open_metrics(page.body(True, False).decode()))
    assert len(text) == sum(not line.startswith("#") for line in GOLDEN.read_text().splitlines()), "run `make golden`"
    assert text["gpuwatch_run_info", frozenset(_info_labels().items())] == 1


def _info_labels() -> dict[str, str]:
    labels = {"run": "run-a", "rank": "0", "name": 'resnet "50"\nα', "job_id": "job-7", "user": "alice"}
    labels |= dict.fromkeys(("job_step", "container_id", "pod_uid"), "")
    labels |= dict.fromkeys(("workload_namespace", "workload_pod", "workload_container"), "")
    return labels | {"timeline": "host", "device": "cpu", "world_size": "1", "num_workers": "0", "version": "0.1.0"}


@pytest.mark.parametrize("open_metrics", [False, True])
def test_compressed_page_is_the_page(samples: list[Sample], open_metrics: bool) -> None:
    page = Page(samples)
    assert gzip.decompress(page.body(open_metrics, True)) == page.body(open_metrics, False)
    assert ("openmetrics" in FORMATS[open_metrics].CONTENT_TYPE_LATEST) is open_metrics


def test_all_states_are_there_from_the_first_scrape_and_sum_up(samples: list[Sample]) -> None:
    values = {(s.metric, s.labels): s.value for s in samples if isinstance(s, Sample)}
    run = {state: values["gpuwatch_run_seconds_total", ("run-a", "0", state)] for state in RUN_STATES}
    assert {state: value for state, value in run.items() if value} == {
        "startup": 1.5,
        "input_wait": 0.94,
        "compute": 0.46,
        "eval": 0.25,
    }
    assert f"by state: {', '.join(GPU_STATES)}." in BY_NAME["gpuwatch_gpu_seconds_total"].help
    gpu = {state: values["gpuwatch_gpu_seconds_total", ("0", "GPU-1", state)] for state in GPU_STATES}
    assert set(gpu) == set(GPU_STATES)
    assert sum(gpu.values()) == pytest.approx(3.15)
