"""The agent: start, serve, stop."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import uvicorn

from gpuwatch.config import Config
from gpuwatch.errors import ConfigError, MissingExtra
from gpuwatch.formatting import host_port
from gpuwatch.host.proc import boot_id, node_name
from gpuwatch.tools.stacks.spy import find_py_spy
from gpuwatch.wire.endpoint import checked, default_listen, is_tcp
from gpuwatch.wire.sockets import ZmqReceiver
from gpuwatch_agent.access import Access, kept_token
from gpuwatch_agent.deadline import Rarely
from gpuwatch_agent.history import History
from gpuwatch_agent.history.file import default_history
from gpuwatch_agent.http import WEDGED_S, BoundedProtocol, Listener, make_app
from gpuwatch_agent.notify import Notifier
from gpuwatch_agent.processes.stacks import StackWatch
from gpuwatch_agent.receiver import Receiver
from gpuwatch_agent.sampler import Sampler

logger = logging.getLogger(__name__)


def run_agent(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises: ConfigError for an unusable port, socket or history; MissingExtra."""
    own = config.agent
    _bound_connections()
    with contextlib.ExitStack() as stack:
        server_socket = stack.enter_context(bind_http(own.http))
        access = Access(own, server_socket)
        path = Path(own.history) if own.history else default_history()
        history = History(path, own.keep_days * 86400, int(own.keep_gib * 2**30), own.full_hours * 3600)
        endpoints = [checked(endpoint, "--listen") for endpoint in own.listen] or [default_listen()]
        token = kept_token("GPUWATCH_TOKEN", own.token_file) if any(map(is_tcp, endpoints)) else None
        receiver = Receiver(ZmqReceiver(endpoints, token))
        sampler = Sampler(receiver, history, config, boot_id(Path(own.procfs)))
        stack.callback(sampler.writer.close)
        if config.notify.urls:
            state = path.with_name(path.name + ".notify.json")
            notifier = Notifier(lambda: sampler.snapshot, config, node_name(), state)
            sampler.extra_samples.append(notifier.samples)
            notifier.start()
            stack.callback(notifier.stop)
        if own.otlp:
            try:
                from gpuwatch_agent.otlp import OtlpPusher
            except ImportError:
                raise MissingExtra("opentelemetry-proto", "otlp") from None
            port, state = server_socket.getsockname()[1], path.with_name(path.name + ".otlp.json")
            pusher = OtlpPusher(own.otlp, own.otlp_every_s, lambda: sampler.snapshot, node_name(), port, state)
            sampler.extra_samples.append(pusher.samples)
            pusher.start()
            stack.callback(pusher.stop)
        if config.stacks.automatic:
            find_py_spy()
            folder = Path(config.stacks.folder) if config.stacks.folder else path.with_name("stacks")
            sampler.stacks = StackWatch(config.stacks, folder)
        receiver.start()
        stack.callback(receiver.stop)
        sampler.start()
        stack.callback(sampler.stop)

        def idle_s() -> dict[str, float]:
            return {"Sampler": time.monotonic() - sampler.ticked_s, "Receiver": time.monotonic() - receiver.polled_s}

        async def alive() -> None:
            access.refresh()
            if max(idle_s().values()) <= WEDGED_S:
                notify_systemd("WATCHDOG=1")

        app = make_app(lambda: sampler.snapshot, history, node_name(), tuple(endpoints), config.prices, idle_s)
        settings = uvicorn.Config(
            access.guard(app),
            http=BoundedProtocol,
            loop="asyncio",
            backlog=32,  # asyncio accepts so many before the first of them is counted
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            callback_notify=alive,
            timeout_notify=5,
        )
        settings.load()
        settings.ssl = access.context
        server = _Server(settings)
        may_log = Rarely(60.0)  # a client's mistakes are no flood in the log
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(lambda record: may_log(str(record.msg)))
        url = f"http{'s' if access.context else ''}://{host_port(*server_socket.getsockname()[:2])}"
        logger.info("agent: %s/metrics, hooks at %s", url, ", ".join(endpoints))
        print(f"gpuwatch agent: {url}/metrics", file=sys.stderr, flush=True)
        gc.freeze()  # what was imported is not searched for garbage again and again
        gc.set_threshold(20_000, 20)  # nor is a second's samples, of which nothing is in cycles
        notify_systemd("READY=1")
        # uvicorn raises both again afterwards, when the agent's shutdown must still run
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[server_socket])


class _Server(uvicorn.Server):
    """uvicorn's, which asks twice a second whether it is to end instead of ten times: that took 0.2% of a core."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.5)
            self.last_notified = min(self.last_notified, time.time())  # a clock that is set back, e.g. by NTP


def notify_systemd(state: str) -> None:
    """Notify systemd, where it has started the agent. Source: sd_notify(3)."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.sendto(state.encode(), f"\0{path[1:]}" if path.startswith("@") else path)


def _bound_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    BoundedProtocol.most = max(4, min(BoundedProtocol.most, soft // 4))


def bind_http(address: str) -> socket.socket:
    """Return a socket bound to HOST:PORT. Raises: ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http {address}: give HOST:PORT, e.g. 127.0.0.1:9478")
    try:
        with contextlib.ExitStack() as stack:
            server_socket = stack.enter_context(Listener(socket.AF_INET6 if ":" in host else socket.AF_INET))
            server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server_socket.bind((host.strip("[]"), int(port)))
            stack.pop_all()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--http {address}: {reason}; give an address of this machine and a free port (is an agent running already?)"
        ) from error
    return server_socket
