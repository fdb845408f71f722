"""A job of a real Slurm, two nodes of one agent each, with the scripts of deploy/slurm as they are shipped."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuwatch_agent.gpus.allocations import read_folder
from tests.integration.agent_process import Agent
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.programs import ROOT
from tests.servers import require, wait_for
from tests.slurm import NODES, Slurm, epilog_line, start_slurm

TRAINING = """
import time, gpuwatch
end = time.monotonic() + 300
with gpuwatch.Watch(quiet=True) as w:
    while time.monotonic() < end:
        with w.step():
            time.sleep(0.02)
"""
SHORT = "import time, gpuwatch; [time.sleep(1) for _ in gpuwatch.Watch(quiet=True).steps(range(5))]"
"""Long enough for its last message to arrive: a program that ends at once has 0.3 s, too little on a busy machine."""
RESUMES = """
import os, sys, time
import gpuwatch
attempt = int(os.environ.get("SLURM_RESTART_COUNT", 0))
first, until = ((0, 50), (40, 70), (60, 90))[attempt]
name = f"{sys.argv[1]}/{os.environ['SLURM_PROCID']}"
began = time.time()
with gpuwatch.Watch(quiet=True) as w:
    open(f"{name}-begin-{attempt}", "w").write(f"{began} {time.time()}")
    for _ in w.steps(range(first, until), start=first):
        time.sleep(0.02)
    if attempt < 2:
        time.sleep(120)  # until it is requeued
    ended = time.time()
open(f"{name}-end", "w").write(f"{ended} {time.time()}")
"""
_SITE = """#!/bin/sh
# Each node of the test has an agent of its own, which on a real one is in the default place.
{first}
GPUWATCH_RUN_DIR={directory}/$SLURMD_NODENAME exec {script}
"""
_AT_END = """
export PYTHONPATH={root}:{root}/agent
export GPUWATCH_AGENT=$(cat {directory}/$SLURMD_NODENAME/url)
{line}
"""


@dataclass(frozen=True)
class Site:
    slurm: Slurm
    agents: Mapping[str, Agent]
    log: Path
    """What the epilogs print."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    require("slurmctld")
    directory = Path(tempfile.mkdtemp(prefix="gpuwatch-"))  # a socket's path is short, and others may look into it
    directory.chmod(0o755)
    try:
        scripts = {}
        for name in ("prolog", "epilog", "task_prolog"):
            scripts[name] = directory / f"{name}.sh"
            at_end = _AT_END.format(root=ROOT, directory=directory, line=epilog_line(directory / "jobs.log"))
            first = at_end if name == "epilog" else ""
            script = ROOT / f"deploy/slurm/{name}.sh"
            scripts[name].write_text(_SITE.format(directory=directory, script=script, first=first))
            scripts[name].chmod(0o755)
        with contextlib.ExitStack() as stack:
            agents = {}
            for node in NODES:
                (directory / node).mkdir()
                nvml = FakeNvml(directory / node)
                nvml.write([FakeGpu(uuid=f"GPU-{n}", minor=n, utilization_percent=0, processes=()) for n in range(2)])
                folder = str(directory / node / "allocations")
                agent = Agent(directory / node, "--allocations", folder, environment=nvml.environment())
                agents[node] = stack.enter_context(agent)
                (directory / node / "url").write_text(agent.url)
            settings = {"Prolog": scripts["prolog"], "Epilog": scripts["epilog"], "TaskProlog": scripts["task_prolog"]}
            settings["SchedulerParameters"] = "sched_interval=1"
            yield Site(stack.enter_context(start_slurm(directory, **settings)), agents, directory / "jobs.log")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_a_step_on_two_nodes_is_one_run_with_its_job(site: Site) -> None:
    """Nothing in the job's environment says so: the scripts and Slurm do."""
    job = site.slurm.start("srun", "-N2", "-n2", "--job-name=train", sys.executable, "-c", TRAINING)
    try:
        first = wait_for("rank 0's agent knows the run", lambda: _run(site.agents["n1"]), 40)
        second = wait_for("rank 1's agent knows the run", lambda: _run(site.agents["n2"]), 40)
        number = site.slurm.run("squeue", "-h", "-o", "%A", "--name=train").strip()
        assert first["run"] == second["run"] == f"slurm-{number}.0"
        assert (first["rank"], second["rank"]) == (0, 1)
        assert first["world_size"] == second["world_size"] == 2
        for node, agent in site.agents.items():
            run = wait_for("its owner is known", lambda agent=agent: (_run(agent) or {}).get("owner"), 10)
            assert (run["job"], run["step"]) == (number, "0"), node
            wait_for("its job is on the page", lambda agent=agent: _job_on_page(agent) == number, 10)
        site.slurm.run("scancel", number)
        for agent in site.agents.values():
            agent.wait_run(first["run"], 20, status="lost")
    finally:
        job.kill()
        job.communicate(timeout=60)


def test_each_step_of_a_batch_job_is_a_run(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    ask = "from gpuwatch.hook.identity import identify; who = identify(); print(who.run, who.job)"
    script.write_text(f"#!/bin/sh\nfor step in 0 1; do srun {sys.executable} -c '{ask}'; done\n")
    out = tmp_path / "out"
    number = site.slurm.run("sbatch", "--parsable", "--wait", "-o", str(out), "-e", "/dev/null", str(script)).strip()
    assert out.read_text().splitlines() == [f"slurm-{number}.0 {number}", f"slurm-{number}.1 {number}"]


def test_a_task_of_an_array_is_found_by_the_id_that_squeue_shows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec srun {sys.executable} -c '{SHORT}'\n")
    array = site.slurm.run("sbatch", "--parsable", "--wait", "--array=1-2", "-w", "n1", "-o", "/dev/null", str(script))
    own = site.slurm.run("squeue", "-h", "-tall", "-j", f"{array.strip()}_2", "-o", "%A").strip()
    for name, value in site.slurm.env.items():
        monkeypatch.setenv(name, value)
    report = [sys.executable, "-m", "gpuwatch", "report", "--agent", site.agents["n1"].url, "--job"]

    def reported(name: str) -> str:
        done = subprocess.run([*report, f"slurm:{name}"], capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr)  # not yet: the agent takes what a job has sent a moment later
        return done.stdout

    found = [wait_for("the report", functools.partial(reported, name), 20) for name in (f"{array.strip()}_2", own)]
    assert found[0] == found[1] and found[0].startswith(f"gpuwatch · job {own} · ")
    unknown = subprocess.run([*report, "999999_2"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "no such job" in " ".join(unknown.stderr.split())


def test_what_a_user_has_set_stays(site: Site) -> None:
    output = site.slurm.run("srun", "env", env={"GPUWATCH_RUN": "mine", "GPUWATCH_ENDPOINT": "ipc:///run/mine.sock"})
    assert {"GPUWATCH_RUN=mine", "GPUWATCH_ENDPOINT=ipc:///run/mine.sock"} <= set(output.splitlines())


def test_a_job_that_a_requeued_jobs_step_submits_is_a_run_of_its_own(site: Site, tmp_path: Path) -> None:
    """It has the step's environment, with the run that the TaskProlog named there."""
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text('#!/bin/sh\necho "batch ${GPUWATCH_RUN-none}"\nsrun sh -c \'echo "step ${GPUWATCH_RUN-none}"\'\n')
    submit = ("sbatch", "--parsable", "--wait", "-o", str(out), str(script))
    site.slurm.run(*submit, env={"GPUWATCH_RUN": "slurm-1.0-attempt-2"})
    assert out.read_text().splitlines() == ["batch none", "step none"]


def test_gpus_that_a_job_has_and_does_not_use(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("Slurm's GPUs of this test are device files, which take root")
    job = site.slurm.start("srun", "-w", "n2", "--gres=gpu:1", "--job-name=idle", "sleep", "120")
    agent = site.agents["n2"]

    def states() -> list[str]:
        return sorted(gpu["state"] for gpu in agent.get("/api/v1/status")["gpus"])

    try:
        wait_for("one GPU is allocated", lambda: states() == ["allocated_unused", "free"], 60)
        number = site.slurm.run("squeue", "-h", "-o", "%A", "--name=idle").strip()
        jobs = {key[6] for key in agent.metrics() if key[0] == "gpuwatch_gpu_owner_info"}
        assert jobs == {number, ""}
        site.slurm.run("scancel", number)
        wait_for("both are free", lambda: states() == ["free", "free"], 60)
    finally:
        job.kill()
        job.communicate(timeout=60)


def test_two_requeues_are_three_attempts_of_one_job(site: Site, tmp_path: Path) -> None:
    script, program = tmp_path / "job.sh", tmp_path / "train.py"
    program.write_text(RESUMES)
    # On a real cluster the socket that the script gets from its own node's TaskProlog has the same path on all nodes.
    script.write_text(f"#!/bin/sh\nunset GPUWATCH_ENDPOINT\nexec srun {sys.executable} {program} {tmp_path}\n")
    number = site.slurm.run("sbatch", "--parsable", "-N2", "-n2", "--requeue", "-o", "/dev/null", str(script)).strip()

    def job(node: str) -> dict[str, Any]:
        return next((each for each in site.agents[node].get("/api/v1/jobs")["jobs"] if each["job"] == number), {})

    def arrived(steps: int) -> bool:
        return all(job(node).get("steps") == steps for node in NODES)

    for steps in (50, 80):
        wait_for(f"both ranks made {steps} steps", lambda steps=steps: arrived(steps), 60)
        site.slurm.run("scontrol", "requeue", number)
        wait_for("it waits", lambda: "PENDING" in site.slurm.run("squeue", "-h", "-o", "%T", "-j", number), 40)
        site.slurm.run("scontrol", "update", f"job={number}", "StartTime=now+2")  # by itself it waits two minutes
    for rank, node in enumerate(NODES):
        wait_for("it has ended", lambda node=node: job(node)["status"] == "ended", 60)
        found = job(node)
        assert (found["attempts"], found["interruptions"]) == (3, 2)
        assert (found["steps"], found["redone_steps"], found["lost_steps"]) == (110, 20, 0)
        assert found["runs"] == [f"slurm-{number}.0", *(f"slurm-{number}.0-attempt-{again}" for again in (2, 3))]
        begin, end = ([*map(float, (tmp_path / f"{rank}-{name}").read_text().split())] for name in ("begin-0", "end"))
        least_s, most_s = end[0] - begin[1], end[1] - begin[0]  # within the Watches, and around them
        assert 0.998 * least_s <= sum(found["states"].values()) <= 1.002 * most_s
    last = re.compile(rf"^gpuwatch · job {number} · .*, 3 attempts, 2 interrupted$", re.MULTILINE)
    wait_for("both epilogs print it", lambda: len(last.findall(site.log.read_text())) == 2, 40)


def test_a_user_may_write_to_the_socket_while_a_job_of_theirs_runs(site: Site) -> None:
    require("setfacl")
    if os.geteuid() != 0:
        pytest.skip("a job of another user takes root")
    user = pwd.getpwnam("games")
    agent = site.agents["n1"]
    as_user = ("srun", "-w", "n1", f"--uid={user.pw_uid}", f"--gid={user.pw_gid}")
    look = 'test -w "${GPUWATCH_ENDPOINT#ipc://}" && id -u'

    def has_entry() -> bool:
        return f"user:{user.pw_name}:rw" in _acl(agent.directory / "hook.sock") + _acl(agent.directory)

    assert not has_entry()
    assert site.slurm.run(*as_user, "sh", "-c", f"sleep 0.5; {look}").strip() == str(user.pw_uid)
    wait_for("it is taken back", lambda: not has_entry(), 20)


def test_the_last_job_of_a_user_takes_the_access_with_it(tmp_path: Path) -> None:
    require("setfacl")
    path = tmp_path / "hook.sock"

    def script(name: str, job: int) -> tuple[bool, bool]:
        """Run it for a job; return whether the user may write to the socket, and to one made later."""
        env = {**os.environ, "GPUWATCH_RUN_DIR": str(tmp_path), "SLURM_JOB_UID": "4711", "SLURM_JOB_ID": str(job)}
        done = subprocess.run([ROOT / f"deploy/slurm/{name}.sh"], env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        acl = _acl(tmp_path)
        assert ("default:group::rw-" in acl) == ("default:user:4711:rw-" in acl) or name == "epilog"
        return "user:4711:rw" in _acl(path), "default:user:4711:rw-" in acl

    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        assert script("prolog", 1) == (True, True)
        assert script("prolog", 2) == (True, True)
        assert script("epilog", 1) == (True, True)
        assert script("epilog", 2) == (False, False)
        assert script("epilog", 2) == (False, False)


@pytest.mark.parametrize(
    ("gpus", "cuda", "expected"),
    [("0,3", "0,1", ("0", "3")), ("2,5", "MIG-5c1b,MIG-77aa", ("MIG-5c1b", "MIG-77aa")), ("0", None, ("0",))],
)
def test_prolog_names_the_jobs_gpus_and_mig_instances(
    tmp_path: Path, gpus: str, cuda: str | None, expected: tuple[str, ...]
) -> None:
    env = {**os.environ, "GPUWATCH_RUN_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": gpus}
    env |= {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    env |= {"SLURM_JOB_USER": "DOMAIN\\bob", "SLURM_JOB_ACCOUNT": 'vision "2"'}
    subprocess.run([ROOT / "deploy/slurm/prolog.sh"], env=env, check=True, timeout=60)
    (found,) = read_folder(tmp_path / "allocations")
    assert (found.gpus, found.owner.job) == (expected, "7")
    assert (found.owner.user, found.owner.account) == ("DOMAIN\\bob", 'vision "2"')


def _run(agent: Agent) -> dict[str, object] | None:
    runs = agent.get("/api/v1/runs")["runs"]
    return next((run for run in runs if run["status"] == "running"), None)


def _job_on_page(agent: Agent) -> str | None:
    jobs = {key[4] for key in agent.metrics() if key[0] == "gpuwatch_run_info"}
    return jobs.pop() if len(jobs) == 1 else None


def _acl(path: Path) -> str:
    return subprocess.run(["getfacl", "-p", str(path)], capture_output=True, text=True, check=True).stdout
