"""How the Streamlit app is started."""

import sys
from pathlib import Path

AGENT_URL, PROMETHEUS_URL = "GPUWATCH_AGENT_URL", "GPUWATCH_PROMETHEUS_URL"
"""Environment variables: where the app's numbers come from; Prometheus wins when both are set."""
DEFAULT_AGENT_URL = "http://127.0.0.1:9478"


def streamlit_command(
    port: int, host: str = "127.0.0.1", agent_url: str = DEFAULT_AGENT_URL, prometheus_url: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the additional environment that start the pages.

    Headless, without usage statistics, file watcher, welcome text or developer menu.
    """
    options = {
        "server.port": str(port),
        "server.address": host,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "runner.postScriptGC": "false",  # a full collection at every refresh took as long as all the rest
        "browser.gatherUsageStats": "false",
        "theme.light.primaryColor": "#1F6FA8",
        "theme.dark.primaryColor": "#56B4E9",
        "client.toolbarMode": "minimal",
        "client.showSidebarNavigation": "false",
        "logger.hideWelcomeMessage": "true",
        "logger.level": "warning",
        "global.developmentMode": "false",
    }
    app = Path(__file__).with_name("app.py")
    argv = [sys.executable, "-m", "streamlit", "run", str(app), *(f"--{key}={value}" for key, value in options.items())]
    environment = {AGENT_URL: agent_url}
    if prometheus_url:
        environment[PROMETHEUS_URL] = prometheus_url
    return argv, environment
