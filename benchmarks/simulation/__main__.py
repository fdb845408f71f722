"""Serve synthetic nodes to size or try out a Prometheus: `python -m benchmarks.simulation --nodes 100 --port 9477`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from benchmarks.simulation.page import Fleet, serve
from gpuwatch.commands.up import free_port_or_error


def simulate(
    nodes: Annotated[int, typer.Option(help="Number of nodes.", min=1, max=20_000)] = 10,
    gpus: Annotated[int, typer.Option(help="GPUs per node.", min=1, max=16)] = 8,
    port: Annotated[int, typer.Option(help="Port that serves all nodes.", min=1, max=65535)] = 9477,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    seed: Annotated[int, typer.Option(help="The same seed gives the same fleet.")] = 0,
) -> None:
    """Serve /metrics of synthetic nodes, with changing jobs and faults, to size or try out a Prometheus.

    `/sd` lists all nodes, one path each, for Prometheus' HTTP service discovery (`http_sd_configs`).
    """
    free_port_or_error(host, port)
    address = f"{host}:{port}"
    fleet = Fleet(nodes, gpus, seed, time.time(), time.time, address)
    typer.echo(
        f"{nodes} nodes of {gpus} GPUs: http://{address}/sd lists them, http://{address}/node/0/metrics is the first"
    )
    serve(fleet, host, port)


if __name__ == "__main__":
    typer.run(simulate)
