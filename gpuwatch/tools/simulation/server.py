"""Serve simulated nodes from one port: `/node/N/metrics`, and `/sd`, which is Prometheus' HTTP service discovery."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from gpuwatch.tools.simulation.page import NodePages
from gpuwatch.tools.simulation.story import Node

TEXT = "text/plain; version=0.0.4; charset=utf-8"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Fleet:
    """An ASGI application. `now_s` gives Unix time, which the simulation follows from `epoch_s` on."""

    def __init__(
        self, nodes: int, gpus: int, seed: int, epoch_s: float, now_s: Callable[[], float], address: str
    ) -> None:
        self._epoch_s = epoch_s
        self._now_s = now_s
        self._nodes = [NodePages(Node(seed, number, gpus), epoch_s) for number in range(nodes)]
        self._targets = json.dumps(
            [
                {
                    "targets": [address],
                    "labels": {"__metrics_path__": f"/node/{pages.node.number}/metrics", "instance": f"{pages.node.name}:9478"},
                }
                for pages in self._nodes
            ]
        ).encode()  # fmt: skip

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        status, kind, body = self.answer(scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return (status, content type, body) for a path."""
        parts = path.strip("/").split("/")
        if parts == ["sd"]:
            return 200, "application/json", self._targets
        if len(parts) == 3 and parts[0] == "node" and parts[2] == "metrics" and parts[1].isdigit():
            number = int(parts[1])
            if number < len(self._nodes):
                body = self._nodes[number].body(self._now_s() - self._epoch_s)
                return (503, TEXT, b"this agent is down\n") if body is None else (200, TEXT, body)
        return 404, TEXT, f"/sd lists the nodes; /node/0/metrics to /node/{len(self._nodes) - 1}/metrics\n".encode()


def serve(fleet: Fleet, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    config = uvicorn.Config(
        fleet, host=host, port=port, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=120,
    )  # fmt: skip
    uvicorn.Server(config).run()
