"""`gpuwatch up` (agent and page), `dashboard` (the page), `top` (runs in a terminal); child processes and ports."""

import ctypes
import errno
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from gpuwatch.api.client import fetch, without_password
from gpuwatch.commands.options import AGENT, Agent, History, Http, Listen, PagePort, Prometheus
from gpuwatch.config import HTTP, own_config
from gpuwatch.errors import ConfigError, GpuwatchError, SourceError, require
from gpuwatch.formatting import host_port
from gpuwatch.wire.endpoint import is_loopback, refused

_STOP_WAIT_S = 8.0
_PR_SET_PDEATHSIG = 1
_ONCE = "Print once and exit; the default if stdout is not a terminal."
Child = subprocess.Popen[bytes]


def up(http: Http = HTTP, port: PagePort = 8501, listen: Listen = None, history: History = None) -> None:
    """Start the agent and the live page on this machine; Ctrl-C stops both.

    Example: `gpuwatch up`, then run a `train.py` that contains `for batch in gpuwatch.watch(loader):`
    """
    # Ctrl-C may be pressed as soon as the addresses are there.
    with agent_and_page(http, port, listen or [], history) as (children, agent, page), suppress(KeyboardInterrupt):
        typer.echo(f"page    {page}\nagent   {without_password(agent)}/metrics\nPress Ctrl-C to stop both.")
        if system := refused():
            typer.echo(f"The agent of this machine does not see your runs: {system}", err=True)
        raise typer.Exit(wait_for_end(children))


@contextmanager
def agent_and_page(
    http: str, port: int, listen: list[str], history: Path | None
) -> Iterator[tuple[list[Child], str, str]]:
    """Run agent and page; give (children, the agent's URL, the page's URL) once both answer, and stop both at the end.

    Raises: ConfigError for a busy port, or an agent there; Exit when one ends at its start; MissingExtra.
    """
    require("uvicorn", "all")
    require("streamlit", "all")
    from gpuwatch_dashboards.launch import streamlit_command

    free_port_or_error("127.0.0.1", port)
    if file := os.environ.get("GPUWATCH_API_TOKEN_FILE") or own_config().agent.api_token_file:
        os.environ["GPUWATCH_API_TOKEN_FILE"] = file  # for the page
    elif not is_loopback(http.rpartition(":")[0].strip("[]")):  # there the API needs a token; the page has it too
        os.environ.setdefault("GPUWATCH_API_TOKEN", secrets.token_hex(32))
    agent_url, page_url = own_agent_url(http), f"http://127.0.0.1:{port}"
    with suppress(OSError):
        if fetch(f"{agent_url}/readyz").status == 200:
            shown = f"its page is `gpuwatch dashboard --agent {without_password(agent_url)}`"
            raise ConfigError(f"--http {http}: an agent answers there already; {shown}")
    agent_command = [sys.executable, "-m", "gpuwatch", "agent", "--http", http]
    agent_command += [part for endpoint in listen for part in ("--listen", endpoint)]
    agent_command += ["--history", str(history)] if history is not None else []
    page_command, environment = streamlit_command(port, "127.0.0.1", agent_url, None)
    with running(agent_command) as agent, running(page_command, environment, quiet=True) as page:
        wait_until_answers("agent", agent, f"{agent_url}/readyz")
        wait_until_answers("dashboard", page, f"{page_url}/_stcore/health")
        yield [agent, page], agent_url, page_url


def own_agent_url(http: str) -> str:
    """Return the URL of the agent that is started here, https where the configuration in GPUWATCH_CONFIG has TLS.

    GPUWATCH_AGENT then gives its name, user and password. Raises: ConfigError for users without that.
    """
    if (web := own_config().agent.web_config) is None:
        return f"http://{http}"
    from gpuwatch_agent.access import read_web_config

    tls, users = read_web_config(Path(web))
    url = os.environ.get("GPUWATCH_AGENT", f"http{'s' if tls else ''}://{http}")
    if users and "@" not in url:
        remedy = "set GPUWATCH_AGENT=https://USER:PASSWORD@HOST:PORT so that the page can log in"
        raise ConfigError(f"{web} has users: {remedy}")
    return url.rstrip("/")


def dashboard(
    host: Annotated[str, typer.Option(help="Address to serve the page on.")] = "127.0.0.1",
    port: PagePort = 8501,
    agent: Agent = AGENT,
    prometheus: Prometheus = None,
) -> None:
    """Serve the live page.

    Example: `gpuwatch dashboard --prometheus http://prometheus:9090`
    """
    require("streamlit", "dashboard")
    free_port_or_error(host, port)
    from gpuwatch_dashboards.launch import streamlit_command

    command, environment = streamlit_command(port, host, agent, prometheus)
    with running(command, environment) as page:
        typer.echo(f"gpuwatch dashboard: http://{host_port(host, port)}", err=True)
        raise typer.Exit(wait_for_end([page]))


def top(
    agent: Agent = AGENT,
    prometheus: Prometheus = None,
    once: Annotated[bool, typer.Option("--once", help=_ONCE)] = False,
) -> None:
    """Show all runs and GPUs in the terminal: where their time goes, and what to change.

    Example: `gpuwatch top`, `gpuwatch top --agent http://node-17:9478`, `gpuwatch top --once | head`

    Keys: arrows or j k select, g GPUs, f findings, p panels, ? help, q quit.

    Exit codes: 0; with `--once` 1 if the agent or Prometheus does not answer; 130 after Ctrl-C.
    """
    require("numpy", "dashboard")
    from gpuwatch_dashboards.sources import AgentSource
    from gpuwatch_dashboards.sources.prometheus import PrometheusSource
    from gpuwatch_dashboards.top import Reader
    from gpuwatch_dashboards.top.pages import is_interactive, print_once

    reader = Reader(PrometheusSource(prometheus, agent_url=agent) if prometheus else AgentSource(agent))
    if once or not is_interactive():
        try:
            print_once(reader)
        except SourceError as error:  # exit code 1, not 2: a script may test whether an agent answers
            raise GpuwatchError(str(error)) from error
        return
    require("textual", "dashboard")
    from gpuwatch_dashboards.top.app import watch

    if code := watch(reader):
        raise typer.Exit(code)


@contextmanager
def running(command: Sequence[str], more: Mapping[str, str] = {}, quiet: bool = False) -> Iterator[Child]:
    """Run a process, `more` in its environment: SIGTERM at exit, SIGKILL 8 s later; the kernel ends it if we die."""
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONSAFEPATH": "1", **more},  # no module of the current folder hides one that it imports
        start_new_session=True,  # Ctrl-C in the terminal reaches only us
        stdout=subprocess.DEVNULL if quiet else None,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until_answers(name: str, child: Child, url: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            typer.secho(f"gpuwatch: the {name} exited during startup, see above", fg="red", err=True)
            raise typer.Exit(code if code > 0 else 1)
        with suppress(OSError):
            try:
                if fetch(url).status == 200:
                    return
            except ssl.SSLCertVerificationError as error:
                remedy = "set SSL_CERT_FILE to its CA, and GPUWATCH_AGENT to a host name in the certificate"
                raise ConfigError(f"{without_password(url)}: {error.verify_message}; {remedy}") from error
        time.sleep(0.1)
    raise GpuwatchError(f"the {name} does not answer at {url} after {timeout_s:.0f} s")


def wait_for_end(children: Sequence[Child]) -> int:
    """Wait for Ctrl-C, SIGTERM or the end of any child; return the resulting exit code."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        for child in children:
            if (code := child.poll()) is not None:
                return code if code > 0 else 1
        time.sleep(0.1)
    return 0


def free_port_or_error(host: str, port: int) -> None:
    """Raise ConfigError where the port is taken or the address is not this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(f"--port {port}: {host}:{port} {what}; choose another with --port") from error


def free_port(wanted: int) -> int:
    """Return `wanted` if it is free on loopback, else any free port."""
    for port in (wanted, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
            return int(probe.getsockname()[1])
    return wanted
