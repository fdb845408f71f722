import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from gpuwatch.api.client import Client, Prometheus, RunSource
from gpuwatch.commands.options import AGENT, Agent, ConfigFile, Json, Run
from gpuwatch.config import read_config
from gpuwatch.errors import ConfigError, SourceError, require, usable
from gpuwatch.formatting import as_json, file_name, harmless
from gpuwatch.hook.identity import sendable
from gpuwatch.tools.reports.comparison import Result, broken, parse_gate
from gpuwatch.tools.reports.comparison import compare as compare_runs
from gpuwatch.tools.reports.gather import gather, last_two
from gpuwatch.tools.reports.ledgers import digest as last_days
from gpuwatch.tools.reports.ledgers import digest_text, job_text, joined, of_runs
from gpuwatch.tools.reports.model import RunReport, from_json

HistoryFile = Annotated[Path | None, typer.Option(help="Read this history file instead of querying an agent.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; - for stdout.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Write Markdown.")]
_JOB = "Print the ledger of the job with this id, e.g. slurm:4711(_2), over all its attempts on this node."
_JOINED = "With --job: cover all nodes, by the recording rules in this Prometheus, instead of querying an agent."
_AFTER = "Run to compare: id, name, `last`, or a report's JSON file. Without it A is compared with the previous run of its name."
_LIMIT = "Exit with 1 if a state takes more than this share, e.g. input_wait=0.1; repeatable."
_LIMIT_OF_B = "Exit with 1 if B is slower than A by more than this, e.g. slower=0.05, or exceeds a limit; repeatable."


def report(
    run: Run = "last",
    agent: Agent = AGENT,
    history: HistoryFile = None,
    markdown: Markdown = False,
    json: Json = False,
    output: Output = None,
    config: ConfigFile = None,
    job: Annotated[str | None, typer.Option(help=_JOB)] = None,
    prometheus: Annotated[str | None, typer.Option(help=_JOINED, envvar="GPUWATCH_PROMETHEUS")] = None,
    fail_on: Annotated[list[str] | None, typer.Option(help=_LIMIT)] = None,
) -> None:
    """Write a report of one run: where its time went, why, and what to change.

    Example: `gpuwatch report last`, `gpuwatch report resnet50-a --json --fail-on input_wait=0.1`

    The report is one HTML file without scripts, by default `gpuwatch-NAME.html`; Markdown and JSON go to stdout.
    `--history FILE` works without a running agent. `--fail-on step_s=0.05` limits the mean step time. Exit codes:
    0 done, 1 a limit of `--fail-on` is exceeded, 2 wrong usage or no such run.
    """
    gates = [parse_gate(text) for text in fail_on or ()]
    if job is not None:
        if history is not None or markdown or gates:
            raise ConfigError("--job prints text, or JSON with --json: leave out --history, --markdown and --fail-on")
        ledger = _job(job, agent, prometheus)
        _write(as_json(ledger) if json else job_text(ledger), output)
        return
    found = _load_run(lambda: _open_source(agent, history), run, config)
    _finish(found, markdown, json, output, found.name, broken(found, gates))


def compare(
    a: Annotated[str, typer.Argument(help="Baseline run: id, name, or the JSON file of a report.")],
    b: Annotated[str | None, typer.Argument(help=_AFTER)] = None,
    agent: Agent = AGENT,
    history: HistoryFile = None,
    markdown: Markdown = False,
    json: Json = False,
    output: Output = None,
    config: ConfigFile = None,
    fail_on: Annotated[list[str] | None, typer.Option(help=_LIMIT_OF_B)] = None,
) -> None:
    """Compare two runs: states, step time with a confidence interval, predicted and achieved speedup.

    Example: `gpuwatch compare resnet50-a resnet50-b`, `gpuwatch compare resnet50`,
    `gpuwatch compare baseline.json last --fail-on slower=0.05`

    `baseline.json` is the output of `gpuwatch report RUN --json`. B is slower only if the change is statistically
    significant. Exit codes: 0 done, 1 a limit of `--fail-on` is exceeded, 2 wrong usage or no such run.
    """
    gates = [parse_gate(text, of_two=True) for text in fail_on or ()]
    source = cache(lambda: _open_source(agent, history))
    if b in (None, a):
        if a.endswith(".json"):
            raise ConfigError(f"{a}: a report's file is compared with a second run, e.g. gpuwatch compare {a} last")
        a, b = last_two(source(), a)
    found = compare_runs(_load_run(source, a, config), _load_run(source, b, config))
    before, after = found.runs
    _finish(found, markdown, json, output, f"{after.name} against {before.name}", broken(found.b, gates, found))


def digest(
    prometheus: Annotated[str, typer.Option(help="URL of the Prometheus.", envvar="GPUWATCH_PROMETHEUS")],
    user: Annotated[str, typer.Option(help="Regular expression for the users, e.g. 'alice|bob' for a team.")] = ".+",
    days: Annotated[int, typer.Option(help="Number of days to summarise.", min=1, max=90)] = 7,
    notify: Annotated[list[str] | None, typer.Option(help="Apprise URL to send the summary to; repeatable.")] = None,
    json: Json = False,
) -> None:
    """Summarise a week of a user, a team or the site: GPU-hours, how much was lost, the worst runs, why, and what to
    change.

    Example: `gpuwatch digest --prometheus http://prometheus:9090 --user alice --notify mailto://…`

    Meant for cron. Needs the recording rules of `gpuwatch rules`. Exit codes: 0 done, 1 a notification was not
    delivered, 2 wrong usage or no such user.
    """
    source, now_s = Prometheus(prometheus), time.time()
    found = last_days(source, user, days, now_s)
    if not found["users"]:
        what = f"no GPU-hours of users {user!r} in {days} days"
        raise ConfigError(f"{source.where} has {what}; load the rules of `gpuwatch rules`")
    text = digest_text(found, now_s)
    typer.echo(as_json(found) if json else text)
    if notify:
        require("prometheus_client", "agent")
        from gpuwatch_agent.notify import apprise_senders

        title, _, body = text.partition("\n")
        if not all([send(title, body, False) for send in apprise_senders(notify).values()]):
            typer.secho("gpuwatch: a notification was not delivered", fg="red", err=True)
            raise typer.Exit(1)


def _open_source(agent: str, history: Path | None) -> RunSource:
    if history is None:
        remedy = "start one with `gpuwatch up`, give --agent URL, or read its file with --history FILE"
        return Client(agent, remedy).caught_up()
    require("prometheus_client", "agent")
    from gpuwatch_agent.history.reader import HistoryReader

    return HistoryReader.checked(history)


def _load_run(source: Callable[[], RunSource], wanted: str, config: Path | None) -> RunReport:
    """Return a run's report, from a report's JSON file or the source, which is opened then. Raises: ConfigError."""
    if wanted.endswith(".json"):
        with usable(wanted, f"make it with gpuwatch report RUN --json -o {wanted}"):
            return from_json(Path(wanted).read_bytes(), wanted)
    return gather(source(), wanted, time.time(), None if config is None else read_config(config).prices)


def _finish(found: Result, markdown: bool, json: bool, output: Path | None, name: str, failed: list[str]) -> None:
    """Write the result, and end with 1 when a limit is broken. A page without `--output` gets a name, which is printed.
    Raises: ConfigError."""
    if markdown and json:
        raise ConfigError("--markdown and --json: give one of them; a report is written once")
    if json:
        text = as_json(found)
    else:
        require("jinja2", "agent")
        from gpuwatch.tools.reports.page import as_html, as_markdown

        text = as_markdown(found, failed) if markdown else as_html(found, failed)
    _write(text, output or (None if markdown or json else Path(f"gpuwatch-{file_name(name)}.html")))
    for each in failed:
        typer.secho(harmless(f"gpuwatch: {name}: {each}"), fg="red", err=True)
    if failed:
        raise typer.Exit(1)


def _write(text: str, path: Path | None) -> None:
    """Write the text to a file, whose name is printed, or to stdout: None, or "-". Raises: ConfigError."""
    if path is None or str(path) == "-":
        typer.echo(text, nl=not text.endswith("\n"))
        return
    with usable(f"--output {path}", "choose a file that you may write to"):
        path.write_text(text, encoding="utf-8")
    typer.echo(str(path))


def _array_task(name: str) -> list[str]:
    """Return the job id of a task of a job array, such as 4711_2, as Slurm's commands know it; none if they do not."""
    if re.fullmatch(r"\d+_\d+", name):
        for command in (["squeue", "-hj", name, "-tall", "-o%A"], ["sacct", "-nXPj", name, "-oJobIDRaw"]):
            with suppress(OSError, subprocess.SubprocessError):
                found = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
                if found and found[-1].isdigit():
                    return found[-1:]
    return []


def _job(name: str, agent: str, prometheus: str | None) -> dict[str, Any]:
    """Return a job's ledger, of all nodes where a Prometheus is given. "slurm:4711" is the job 4711, 4711_2 a task of
    an array. Raises: ConfigError."""
    own = sendable(name.strip().removeprefix("slurm:"))  # as messages have it
    names = [sendable(name.strip()), own, *_array_task(own)]
    if prometheus is not None:
        site = Prometheus(prometheus)
        whole = next((job for each in names if (job := joined(site, each, time.time())) is not None), None)
        if whole is None:
            raise ConfigError(f"--job {name}: {site.where} has no series of it; load the rules of `gpuwatch rules`")
        return whole
    source = Client(agent, "give --agent URL").caught_up()
    jobs = {job.job: job for job in source.jobs()}
    found = next((jobs[each] for each in names if each in jobs), None)
    if found is None:
        none = "none; a job needs a scheduler's id, GPUWATCH_JOB, or a resumed run"
        raise ConfigError(f"--job {name}: no such job on this node; known: {', '.join([*jobs][:10]) or none}")
    with suppress(SourceError):  # the history cannot be read now
        return asdict(found) | of_runs(run for run in source.runs(kept=True) if run.run in found.runs)
    return asdict(found)
