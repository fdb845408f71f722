"""The agent: start, serve, stop."""

from __future__ import annotations

import contextlib
import itertools
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from gpuwatch.config import StackSettings
from gpuwatch.errors import ConfigError
from gpuwatch.host.proc import boot_id
from gpuwatch.tools.stacks.spy import find_py_spy
from gpuwatch.wire.endpoint import checked, default_listen
from gpuwatch.wire.sockets import ZmqReceiver
from gpuwatch_agent.history import History
from gpuwatch_agent.http import BoundedProtocol, OncePerMinute, make_app
from gpuwatch_agent.notify import Notifier
from gpuwatch_agent.options import Options, default_history
from gpuwatch_agent.processes.stacks import StackWatch
from gpuwatch_agent.receiver import Receiver
from gpuwatch_agent.sampler import Sampler

logger = logging.getLogger(__name__)


def run_agent(options: Options, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the agent's URL once it answers.

    Raises: ConfigError for a busy port, a socket that cannot be bound, a history that cannot be written.
    """
    with contextlib.ExitStack() as stack:
        server_socket = stack.enter_context(bind_http(options.http))
        history_path = options.history or default_history()
        history = History(
            history_path, options.keep_days * 86400, int(options.keep_gib * 2**30), options.full_hours * 3600
        )
        stack.callback(history.close)
        endpoints = [checked(endpoint, "--listen") for endpoint in options.listen] or [default_listen()]
        receiver = Receiver(ZmqReceiver(endpoints))
        sampler = Sampler(
            receiver, history, options.roots, boot_id(options.roots.procfs), options.choice, options.thresholds
        )
        if options.notify.urls:
            notifier = _notifier(options, sampler, history_path)
            sampler.extra_samples = notifier.samples
            notifier.start()
            stack.callback(notifier.stop)
        sampler.prices = options.prices
        if options.stacks.automatic:
            sampler.stacks = _stack_watch(options.stacks, history_path)
        receiver.start()
        stack.callback(receiver.stop)
        sampler.start()
        stack.callback(sampler.stop)
        _check_hourly(history, stack)
        app = make_app(
            lambda: sampler.snapshot,
            history,
            socket.gethostname(),
            receiver.endpoints,
            options.prices,
            lambda: {"Sampler": time.monotonic() - sampler.ticked_s, "Receiver": time.monotonic() - receiver.polled_s},
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_bounded_protocol(),
                backlog=32,  # asyncio accepts so many before the first of them is counted
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(OncePerMinute())
        host, port = server_socket.getsockname()[:2]
        logger.info("agent: http://%s:%s/metrics, hooks at %s", host, port, ", ".join(receiver.endpoints))
        ready(f"http://{host}:{port}")
        _end_on_signals(server)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[server_socket])


def _bounded_protocol() -> type[BoundedProtocol]:
    """Return the HTTP protocol, whose connections take a quarter of the file descriptors at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    BoundedProtocol.most = max(4, min(BoundedProtocol.most, soft // 4))
    return BoundedProtocol


def _check_hourly(history: History, stack: contextlib.ExitStack) -> None:
    """Check the history's pages ten minutes after the start, and every hour from then on, in a thread."""
    stop, waits = threading.Event(), itertools.chain([600.0], itertools.repeat(3600.0))

    def check() -> None:
        while not stop.wait(next(waits)):
            history.check()

    threading.Thread(target=check, name="history check", daemon=True).start()
    stack.callback(stop.set)


def _notifier(options: Options, sampler: Sampler, history: Path) -> Notifier:
    """Return the notifier; its state file is in the history's folder."""
    path = history.with_name(history.name + ".notify.json")
    return Notifier(lambda: sampler.snapshot, options.notify, options.alerts, socket.gethostname(), path)


def _stack_watch(settings: StackSettings, history: Path) -> StackWatch:
    """Return the stack capture; flame graphs go to the history's folder by default. Raises: MissingExtra without py-spy."""
    find_py_spy()
    return StackWatch(settings, Path(settings.folder) if settings.folder else history.with_name("stacks"))


def _end_on_signals(server: uvicorn.Server) -> None:
    """Let SIGINT and SIGTERM stop the server only: uvicorn raises them again afterwards, and the agent's shutdown must still run."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def bind_http(address: str) -> socket.socket:
    """Return a socket bound to HOST:PORT. Raises: ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http {address}: give HOST:PORT, e.g. 127.0.0.1:9478")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_socket = socket.socket(family, socket.SOCK_STREAM)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((host.strip("[]"), int(port)))
    except (OSError, UnicodeError) as error:
        server_socket.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--http {address}: {reason}; is an agent running already? Choose another port with --http HOST:PORT"
        ) from error
    return server_socket
