"""How the Streamlit app is started."""

import sys
from pathlib import Path

from gpuwatch.config import HTTP
from gpuwatch.tables import table

AGENT_URL, PROMETHEUS_URL = "GPUWATCH_AGENT_URL", "GPUWATCH_PROMETHEUS_URL"
"""Environment variables: where the app's numbers come from; Prometheus wins when both are set."""
DEFAULT_AGENT_URL = f"http://{HTTP}"


def streamlit_command(
    port: int, host: str = "127.0.0.1", agent_url: str = DEFAULT_AGENT_URL, prometheus_url: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the additional environment that start the pages, with streamlit.yml's options."""
    options = {"server.port": port, "server.address": host, **table("gpuwatch_dashboards", "streamlit.yml")}
    app = Path(__file__).with_name("app.py")
    argv = [sys.executable, "-m", "streamlit", "run", str(app), *(f"--{key}={value}" for key, value in options.items())]
    environment = {AGENT_URL: agent_url}
    if prometheus_url:
        environment[PROMETHEUS_URL] = prometheus_url
    return argv, environment
