"""A job is killed and goes on at its checkpoint, with real processes and a real agent.

Its ledger closes, and its redone steps are exact.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch.api import Steps
from gpuwatch.api.client import Client
from gpuwatch_dashboards.render.cards import PAGES
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from tests.integration.agent_process import PATIENT, Agent
from tests.integration.recorded_fleet import Series, write_blocks
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.programs import ROOT, agent, hook_environment
from tests.servers import Server, prometheus_config, start_prometheus, wait_for
from tests.slurm import epilog_line

PROGRAM = (
    PATIENT
    + """
import sys, time
import gpuwatch

def batches(count):
    for _ in range(count):
        time.sleep(0.03)
        yield 0

first, count = int(sys.argv[1]), int(sys.argv[2])
with gpuwatch.Watch(quiet=True) as w:
    print(time.time(), flush=True)
    for _ in w.steps(batches(count), start=first):
        time.sleep(0.02)
        print(time.time(), flush=True)
    if len(sys.argv) > 3:
        time.sleep(600)  # to be killed
"""
)

RANK = """
import os, sys, time
import gpuwatch

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
reduce = lambda: None
if "gloo" in sys.argv:
    import torch
    # A store of its own for each attempt: with torchrun's a rank may find the address of the last attempt's.
    store = f"file://{sys.argv[1]}/store-{attempt}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    reduce = lambda: torch.distributed.all_reduce(torch.ones(1))
    reduce()
first, until = ((0, 30), (20, 50))[attempt]
open(f"{sys.argv[1]}/{rank}-begin-{attempt}", "w").write(str(time.time()))
with gpuwatch.Watch(quiet=True) as w:
    open(f"{sys.argv[1]}/{rank}-opened-{attempt}", "w").write(str(time.time()))
    for _ in w.steps(range(first, until), start=first):
        time.sleep(0.02)
        reduce()
    open(f"{sys.argv[1]}/{rank}-trained", "w").write(str(time.time()))
    if attempt == 0:
        if rank == "1":
            while not os.path.exists(f"{sys.argv[1]}/fail"):
                time.sleep(0.05)
            os._exit(1)
        reduce()  # rank 0 waits for rank 1, and fails with it
        time.sleep(60)
open(f"{sys.argv[1]}/{rank}-end", "w").write(str(time.time()))
"""


REWINDS = """
import sys, time
import gpuwatch

with gpuwatch.Watch(quiet=True) as w:
    for start, until in ((0, 30), (20, 35), (30, 45)):  # at step 30 it goes back to 20, and at 35 to 30
        if start:
            with w.phase("checkpoint_load"):
                time.sleep(0.1)
        for number, _ in enumerate(w.steps(iter(range(100)), start=start), start + 1):
            time.sleep(0.01)
            if number == until:
                break
"""


def job_of(server: Server) -> dict[str, Any]:
    jobs = server.get("/api/v1/jobs")["jobs"]
    if not jobs:
        raise FileNotFoundError("no job yet")  # for `wait_for`
    (job,) = jobs
    return dict(job)


def test_a_process_that_goes_back_to_a_checkpoint_by_itself(tmp_path: Path) -> None:
    environment = hook_environment(tmp_path, GPUWATCH_RUN="resumed", GPUWATCH_JOB="")
    command = [sys.executable, "-c", PATIENT + REWINDS]
    with agent(tmp_path) as node:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        job = job_of(node)
    assert (job["attempts"], job["interruptions"], job["steps"]) == (1, 0, 30 + 15 + 15)
    assert (job["redone_steps"], job["lost_steps"], job["numbers"]) == (15, 0, [0, 45])


def test_a_killed_job_that_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    environment = hook_environment(tmp_path, GPUWATCH_RUN="resumed", GPUWATCH_JOB="llm-7")
    with agent(tmp_path) as node:
        first = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "0", "60", "hang"], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert first.stdout is not None
        times = [float(first.stdout.readline()) for _ in range(61)]
        wait_for("60 steps arrived", lambda: job_of(node)["steps"] == 60, 20)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        wait_for("it is lost", lambda: job_of(node)["status"] == "lost", 20)
        heard_s = job_of(node)["last_message_s"]
        time.sleep(2)
        resumed = time.time()
        second = subprocess.run(
            [sys.executable, "-c", PROGRAM, "40", "50"], env=environment, check=True, capture_output=True, text=True
        )
        end = time.time()
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        job = job_of(node)
        run = node.get("/api/v1/runs")["runs"][0]
        report = [sys.executable, "-m", "gpuwatch", "report", "--agent", node.url, "--job"]
        text = subprocess.run([*report, "llm-7"], check=True, capture_output=True, text=True).stdout
        unknown = subprocess.run([*report, "other"], capture_output=True, text=True)
        wrote = subprocess.run([*report, "llm-7", "-o", str(tmp_path / "job.txt")], check=True, capture_output=True)
        gated = subprocess.run([*report, "llm-7", "--fail-on", "input_wait=0.01"], capture_output=True, text=True)

    assert wrote.stdout.decode() == f"{tmp_path}/job.txt\n" and (tmp_path / "job.txt").read_text() == text.rstrip("\n")
    assert gated.returncode == 2 and "leave out" in gated.stderr and not gated.stdout  # a limit that nothing checks
    assert (job["job"], job["attempts"], job["interruptions"]) == ("llm-7", 2, 1)
    assert (job["steps"], job["redone_steps"]) == (110, 20)
    assert "steps   110, of which 20 redone" in text
    assert unknown.returncode == 2 and "known: llm-7" in " ".join(unknown.stderr.split())
    states = job["states"]
    assert sum(states.values()) == pytest.approx(job["last_message_s"] - job["started_s"], rel=0.002)
    again = [float(line) for line in second.stdout.split()]
    # By the programs' own clock: up to the last batch asked for, and to the process's end, which a busy machine delays.
    assert 0.998 * (again[-1] - times[0]) - 0.1 < sum(states.values()) < 1.002 * (end - times[0]) + 0.1
    assert resumed - heard_s - 0.1 < states["down"] < again[0] - heard_s + 0.1  # the second process begins in between
    assert 0 < states["restart"] < end - resumed
    assert states["redone"] == pytest.approx(again[20] - again[0], abs=0.3)  # it is split by steps within a message
    assert states["compute"] < run["states"]["compute"]


TRAINER = """
import os, sys, time, torch
import transformers as hf
from gpuwatch.integrations.transformers import GpuWatchCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.005)
        return {"x": torch.ones(4), "labels": torch.zeros(1)}

class Kill(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 7 and "first" in sys.argv:
            time.sleep(5)
            os.kill(os.getpid(), 9)

options = {"gradient_accumulation_steps": 2, "max_steps": 12, "save_steps": 4, "save_strategy": "steps"}
options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2}
trainer = hf.Trainer(
    Model(), hf.TrainingArguments(sys.argv[1], **options), train_dataset=Data(), callbacks=[GpuWatchCallback(quiet=True), Kill()]
)
trainer.train(resume_from_checkpoint="first" not in sys.argv)
"""


def test_hugging_face_s_trainer_is_killed_and_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    """Saved at 4, killed in its seventh step, resumed with nothing declared: two optimizer steps are done again."""
    pytest.importorskip("transformers")
    environment = hook_environment(tmp_path, GPUWATCH_JOB="hf", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", PATIENT + TRAINER, str(tmp_path / "out")]
    with agent(tmp_path) as node:
        killed = subprocess.run([*command, "first"], env=environment, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        wait_for("it is lost", lambda: job_of(node)["status"] == "lost", 20)
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        job = job_of(node)
    assert (job["attempts"], job["interruptions"], job["numbers"]) == (2, 1, [0, 12])
    assert (job["steps"], job["redone_steps"], job["lost_steps"]) == (14, 2, 0)
    assert sum(job["states"].values()) == pytest.approx(job["last_message_s"] - job["started_s"], rel=0.002)
    assert {"imports", "checkpoint_load", "startup"} <= {*job["restart"]} and job["states"]["redone"] > 2 * 4 * 0.005


def test_a_job_in_two_slurm_jobs_has_the_gpus_of_its_runs(tmp_path: Path) -> None:
    """GPUWATCH_JOB joins what Slurm calls 4711 and 4712: its runs are named, and the card has what they held."""
    config = tmp_path / "gpuwatch.toml"
    config.write_text('[prices]\ngpu_hour = 3600.0\ncurrency = "EUR"\n')  # a second is a euro
    nvml = FakeNvml(tmp_path)
    nvml.write([FakeGpu(uuid="GPU-0")])
    with Agent(tmp_path, "--config", str(config), environment=nvml.environment()) as node:
        for number, first in ((4711, 0), (4712, 30)):
            slurm = {"SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0", "GPUWATCH_JOB": "llm-7"}
            command = [sys.executable, "-c", PROGRAM, str(first), "40", "hang"]
            process = subprocess.Popen(
                command, env=hook_environment(tmp_path, **slurm), stdout=subprocess.PIPE, text=True
            )
            nvml.write([FakeGpu(uuid="GPU-0", utilization_percent=50, processes=((process.pid, 1 << 30),))])
            run = f"slurm-{number}.0"
            wait_for("its GPU", lambda run=run: (node.run(run) or {}).get("gpus"), 30)  # type: ignore[misc]
            served = node.metrics()
            assert ("gpuwatch_job_start_timestamp_seconds", "llm-7", run) in served
            assert any(each[0] == "gpuwatch_run_info" and str(number) in each for each in served)  # its job_id
            process.kill()
            process.communicate()
            wait_for("it is lost", lambda run=run: (node.run(run) or {})["status"] == "lost", 20)  # type: ignore[misc]
        report = [sys.executable, "-m", "gpuwatch", "report", "--agent", node.url, "--job", "llm-7"]
        text = subprocess.run(report, check=True, capture_output=True, text=True).stdout
        card = json.loads(subprocess.run([*report, "--json"], check=True, capture_output=True, text=True).stdout)
        runs = [node.run(f"slurm-{number}.0") or {} for number in (4711, 4712)]
    alive_s = sum(sum(run["states"].values()) for run in runs)
    assert card["runs"] == ["slurm-4711.0", "slurm-4712.0"] and card["redone_steps"] == 10
    assert card["gpu_hours"]["all"] * 3600 == pytest.approx(alive_s) and card["cost"] == pytest.approx(alive_s)
    assert "GPU-hours: " in text and f"  cost    {alive_s:.2f} EUR\n" in text


@pytest.mark.parametrize("backend", ["none", "gloo"])
def test_ranks_that_torchrun_restarts_are_two_attempts_of_one_job(tmp_path: Path, backend: str) -> None:
    """They are joined by the run id alone. If they import no torch, torchrun's environment tells them apart."""
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text(PATIENT + RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-id=llm-8"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=1", "--monitor-interval=0.1"]
    with agent(tmp_path) as node:
        command = [*torchrun, str(program), str(tmp_path), backend]
        launcher = subprocess.Popen(command, env=hook_environment(tmp_path))
        wait_for("the first attempt's steps arrived", lambda: job_of(node)["steps"] == 30, 40)
        time.sleep(1.5)
        (tmp_path / "fail").touch()
        assert launcher.wait(180) == 0
        # Not the job alone: with rank 1's end it has ended, until a message of rank 0's second process is read.
        wait_for(
            "both have ended", lambda: {run["status"] for run in node.get("/api/v1/runs")["runs"]} == {"ended"}, 20
        )
        job = job_of(node)
        assert job["status"] == "ended"
    assert (job["job"], job["runs"], job["attempts"], job["interruptions"]) == ("llm-8", ["elastic-llm-8"], 2, 1)
    assert (job["steps"], job["redone_steps"], job["lost_steps"]) == (60, 10, 0)
    begin_s, opened_s, trained_s, end_s = (
        float((tmp_path / f"0-{name}").read_text()) for name in ("begin-0", "opened-0", "trained", "end")
    )
    # The lowest rank's time: its Watch opens between the first two, and closes between the last two.
    assert 0.998 * (trained_s - opened_s) < sum(job["states"].values()) < 1.002 * (end_s - begin_s)


@pytest.mark.alone
def test_an_attempt_on_another_node_is_joined_by_prometheus(tmp_path: Path) -> None:
    """Node a has the first and third attempt, and counts the second as `down`; b knows nothing before the second."""
    rules = subprocess.run(
        [sys.executable, "-m", "gpuwatch", "rules"], check=True, capture_output=True, text=True
    ).stdout
    with agent(tmp_path / "a") as a, agent(tmp_path / "b") as b:
        config = prometheus_config({"a": a.url, "b": b.url})
        config = re.sub(r'("targets": \["[^"]+"\])', r'\1, "labels": {"job": "gpuwatch"}', config)
        with start_prometheus(tmp_path / "prometheus", config, rules) as prometheus:
            times: list[str] = []
            for node, first, count, steps in ((a, 0, 50, 50), (b, 30, 40, 40), (a, 60, 20, 70)):
                environment = hook_environment(
                    tmp_path / ("a" if node is a else "b"), GPUWATCH_RUN="moved", GPUWATCH_JOB="llm-9"
                )
                last = [] if steps == 70 else ["hang"]
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(first), str(count), *last],
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert process.stdout is not None
                times += [process.stdout.readline() for _ in range(count + 1)]
                wait_for("its steps arrived", lambda node=node, steps=steps: job_of(node)["steps"] == steps, 20)
                time.sleep(1.2) if last else process.wait()
                process.kill()
                times += process.communicate()[0].split()

            def value(name: str) -> float | None:
                found = prometheus.get("/api/v1/query", query=f'{name}{{job_id="llm-9"}}')["data"]["result"]
                return float(found[0]["value"][1]) if found else None

            wait_for("both parts are joined", lambda: value("job_id:gpuwatch_job_redone_elsewhere:steps") == 30, 20)
            truth_s = float(times[-1]) - float(times[0])
            exactly = pytest.approx(truth_s, rel=0.002, abs=0.03)  # s: two clocks, read one after the other
            wait_for("its end is recorded", lambda: value("job_id:gpuwatch_job:seconds") == exactly, 10)
            wall_s, down_s, goodput = (
                value(f"job_id:gpuwatch_job{each}") for each in (":seconds", "_down:seconds", "_goodput:ratio")
            )
            [moved] = PrometheusSource(prometheus.url).runs()
            [of_agent] = (run for run in Client(a.url).runs() if run.run == "moved")
            of_a, of_b = (job_of(node)["states"] for node in (a, b))
            report = [sys.executable, "-m", "gpuwatch", "report", "--prometheus", prometheus.url, "--job"]
            text, found = (
                subprocess.run([*report, *more], check=True, capture_output=True, text=True).stdout
                for more in (["llm-9"], ["slurm:llm-9", "--json"])
            )
            unknown = subprocess.run([*report, "other"], capture_output=True, text=True)
    job = json.loads(found)
    heads = [PAGES.run_head(each, Steps(), False) for each in (moved, of_agent)]
    assert "goodput of its job in 3 attempts" in heads[0] and "goodput of its job in 2 attempts" in heads[1]
    assert moved.goodput_ratio == pytest.approx(goodput, rel=0.02) and moved.goodput_is_exact
    assert "at most: goodput of its" in PAGES.run_head(replace(moved, goodput_is_exact=False), Steps(), False)
    assert (job["job"], job["attempts"], job["nodes"], job["steps"]) == ("llm-9", 3, 2, 80)
    assert job["redone_elsewhere_steps"] == 30 and job["goodput_ratio"] == goodput
    assert job["wall_s"] == pytest.approx(wall_s)
    assert sum(job["states"].values()) == pytest.approx(wall_s, abs=0.005)  # s: without states of less than 1 ms
    assert job["states"]["down"] == pytest.approx(down_s, abs=0.05)
    assert job["states"]["compute"] == pytest.approx(goodput * wall_s)
    new_s = sum(seconds for of in (of_a, of_b) for state, seconds in of.items() if state not in ("down", "restart"))
    assert job["states"]["redone"] == pytest.approx(new_s * 30 / 110, abs=0.05)
    assert (job["gpu_hours"], job["energy_joules"]) == ({}, {}) and "cost" not in job  # no GPU: not known, and not 0
    assert re.match(
        r"gpuwatch · job llm-9 · \d+\.\d s, 3 attempts, 2 nodes\n  goodput \d+%: spent on new steps\n", text
    )
    assert "  steps   80, plus 30 repeated on another node\n" in text and "GPU-hours" not in text
    assert unknown.returncode == 2 and "has no series of it" in " ".join(unknown.stderr.split())
    assert wall_s is not None and down_s is not None
    alive_s = sum(of_a.values()) - of_a["down"] + sum(of_b.values())
    assert (
        down_s == pytest.approx(wall_s - alive_s, abs=0.05) and 2 < down_s < of_a["down"] - 2
    )  # which has b's attempt
    assert goodput == pytest.approx((of_a["compute"] + of_b["compute"]) * (1 - 30 / 110) / wall_s, rel=0.01)


@pytest.mark.parametrize(
    ("ago_s", "name", "scheduler_s"),
    [(0, "4711", "4711"), (172_800, "4711", "4711"), (0, "llm-7", "4711"), (0, "train@1002", "train")],
)
def test_the_card_of_a_job_that_ended_has_its_gpus_energy_cost_and_causes(
    tmp_path: Path, ago_s: int, name: str, scheduler_s: str
) -> None:
    """Two hours on two nodes, recorded every five minutes in Prometheus's store, and read as of the job's end."""
    of, held, series = {"job": "gpuwatch", "job_id": name}, {"job_id": scheduler_s, "run": "slurm-4711.0"}, Series()

    def add(name: str, value: float, **labels: str) -> None:
        series[name, tuple(sorted(labels.items()))] = value

    for node, compute_s, redone_s in (("n1", 3000, 0), ("n2", 2400, 600)):
        add("instance_job_id:gpuwatch_job_end:timestamp", time.time() - ago_s - 60, instance=node, **of)
        add("instance_job_id:gpuwatch_job_repeated:last", redone_s + 375 * (node == "n1"), instance=node, **of)
        add("gpuwatch_job_attempts_total", 1, instance=node, **of)
        for state, seconds in (("compute", compute_s), ("redone", redone_s), ("input_wait", 600)):
            add("gpuwatch_job_seconds_total", seconds, instance=node, state=state, **of)
    for which, number in (("first", 0), ("next", 9000)):
        add(f"instance_job_id:gpuwatch_job_{which}_step:last", number, instance="n2", **of)
    add("job_id:gpuwatch_job:seconds", 7500, **of)
    add("job_id:gpuwatch_job_redone_elsewhere:share", 0, **of)
    add("job_id:gpuwatch_job_goodput:ratio", 0.7, **of)
    unused, other = {"job_id": scheduler_s}, {"job_id": scheduler_s, "run": "of another job there"}
    for owner, *hours in ((held, 0.12, 0.10, 0.02, 0.0), (unused, 0.04, 0, 0, 0.04), (other, 1.0, 1.0, 0, 0)):
        if owner == unused and name != scheduler_s:
            hours, owner = [0.04, 0, 0, 0.04], {**unused, "run": "slurm-4711.0", "instance": "n2"}
        for kind, each in zip(("all", "useful", "starved", "idle"), hours, strict=True):
            add("owner_kind:gpuwatch_gpu_hours:increase", each, kind=kind, **owner)
            add("owner_kind:gpuwatch_gpu_cost:increase", 2.5 * each, kind=kind, **owner)
    for kind, joules in (("working", 1.728e5), ("waiting", 1.152e5)):
        add("owner_kind:gpuwatch_gpu_energy_joules:increase", joules, kind=kind, **held)
        add("owner_kind:gpuwatch_gpu_energy_joules:increase", 9e9, kind=kind, **other)
    add("site:gpuwatch_currency:info", 1, currency="EUR")
    add("gpuwatch_job_start_timestamp_seconds", 1, run="slurm-4711.0", **of)
    for cause, ratio in (("input_disk", 0.2), ("checkpoint_interval", 0.1), ("memory_creep", 0)):
        add("gpuwatch_finding_evidence_ratio", ratio, run="slurm-4711.0", cause=cause)
    add("gpuwatch_finding_evidence_ratio", 0.9, run="another", cause="stalled")
    write_blocks(series, 2, tmp_path / "data", ahead_s=600, ago_s=ago_s)
    with start_prometheus(tmp_path, prometheus_config({})) as prometheus:
        report = [sys.executable, "-m", "gpuwatch", "report", "--job", name.replace("4711", "slurm:4711")]
        environment = {**os.environ, "GPUWATCH_PROMETHEUS": prometheus.url}
        text = subprocess.run(report, env=environment, check=True, capture_output=True, text=True).stdout
    assert f"```\n{text.replace(name, '4711')}```" in (ROOT / "docs/concepts/jobs.md").read_text()
    assert text.splitlines() == [
        f"gpuwatch · job {name} · 2h 05m, 2 attempts, 2 nodes",
        "  goodput 70%: spent on new steps",
        "  where   compute 70%  input_wait 13%  redone 8.0%  lost 5.0%  down 4.0%",
        "  GPUs    4 GPU-hours: useful 62%  idle 25%  starved 12%",
        "  energy  2.00 kWh, 40% of it waiting",
        "  cost    10.00 EUR",
        "  why     input_disk, checkpoint_interval; gpuwatch report slurm-4711.0 on its node has the evidence",
    ]


def test_the_line_for_slurm_s_epilog_prints_the_job_and_never_fails_nor_hangs(tmp_path: Path) -> None:
    log = tmp_path / "jobs.log"
    line = epilog_line(log)

    def run(agent_url: str) -> str:
        environment = {**os.environ, "SLURM_JOB_ID": "4711", "GPUWATCH_AGENT": agent_url}
        subprocess.run(["sh", "-e", "-c", f"{line}\ntrue"], env=environment, check=True, timeout=60)
        return log.read_text()

    with agent(tmp_path) as node:
        environment = hook_environment(tmp_path, SLURM_JOB_ID="4711")
        assert run(node.url) == ""  # no such job yet
        subprocess.run([sys.executable, "-c", PROGRAM, "0", "20"], env=environment, check=True, stdout=subprocess.PIPE)
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        card = wait_for("the job's card", lambda: run(node.url), 60)  # the line itself gives up after some seconds
    assert re.match(r"gpuwatch · job 4711 · \d.*, 1 attempt, 0 interrupted\n  goodput \d+%", card)
    assert run(node.url) == card  # the agent is gone
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert run(f"http://127.0.0.1:{silent.getsockname()[1]}") == card
