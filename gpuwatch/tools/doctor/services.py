"""The agent, its collectors, version and history, the socket for hooks, and a Prometheus that scrapes the agent."""

import json
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuwatch.api.client import why
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import size
from gpuwatch.tools.doctor.machine import Machine, Outcome, ok, problem, skipped, warning
from gpuwatch.wire import endpoint

_NO_AGENT = "no agent answers"
_START = "start an agent: gpuwatch up"
_LEAST_BYTES, _ENOUGH_BYTES = 100 << 20, 2 << 30  # by default the history is kept below 2 GiB
_OTHER_FILE = "gpuwatch agent --history FILE, or GPUWATCH_HISTORY=FILE"
_JOB = "gpuwatch"
_RULE = "GpuStarved"
_TOKEN = "set GPUWATCH_TOKEN_FILE to a copy of the file that the agent has as --token-file"
_SCRAPE = f"scrape_configs: [{{job_name: {_JOB}, static_configs: [{{targets: ['HOST:9478']}}]}}], then reload it"


def agent(machine: Machine) -> Outcome:
    """Whether the agent answers and keeps sampling. Without --agent it may be absent."""
    return machine.agent()[1]


def collectors(machine: Machine) -> Outcome:
    """The agent's failing collectors, with their messages."""
    if (status := machine.agent()[0]) is None:
        return skipped(_NO_AGENT)
    listed = status.collectors
    failing = [f"{one.name}: {one.message or 'no reason given'}" for one in listed if one.success is False]
    nothing = [one.name for one in listed if one.success is None]
    if failing:
        remedy = "the message is the collector's; the checks here often explain it (ptrace, driver)"
        return problem("; ".join(failing), remedy)
    without = f"; nothing to measure here: {', '.join(nothing)}" if nothing else ""
    return ok(f"{len(listed) - len(nothing)} of {len(listed)} work{without}")


def agent_version(machine: Machine) -> Outcome:
    """Whether the agent has the same version as this package, which the hooks in this environment use."""
    if (status := machine.agent()[0]) is None:
        return skipped(_NO_AGENT)
    theirs, ours = status.version, machine.gpuwatch_version
    if theirs != ours:
        return warning(
            f"the agent is {theirs}, this package {ours}",
            f"pip install 'gpuwatch-training=={theirs}' here, or update and restart the agent",
        )
    return ok(f"both are {ours}")


def hook_socket(machine: Machine) -> Outcome:
    """The endpoint that a hook of this user would use: whether it exists, is writable, and has a listening agent."""
    if declared := machine.environ.get("GPUWATCH_ENDPOINT", "").strip():
        return _declared(machine, declared)
    sockets = [_socket(directory / endpoint.SOCKET_NAME, machine) for directory in machine.socket_directories]
    if found := [each for each in sockets if each is not None]:
        return next((each for each in found if each.status == "ok"), found[0])
    places = ", ".join(str(directory) for directory in machine.socket_directories)
    return skipped(f"no agent's socket in {places}: a run prints its verdict and is not shown live", _START)


def _socket(path: Path, machine: Machine) -> Outcome | None:
    """Return the outcome for a socket file, by the criteria of `gpuwatch.wire.endpoint.find`; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return problem(f"{path}: {error.strerror}", f"give this user access to the folder {path.parent}")
    whose = f"{path} ({_owner(path)}, {stat.S_IMODE(status.st_mode):04o})"
    if not stat.S_ISSOCK(status.st_mode):
        return problem(f"{whose} is not a socket", f"rm {path}, then restart the agent")
    if status.st_uid not in (0, machine.uid):
        return warning(f"{whose} is another user's, and is ignored", "ask its owner why it is there")
    if not machine.writes(path):
        return problem(
            f"{whose}: permission denied; ask for the group gpuwatch",
            "groupadd --system gpuwatch; usermod -aG gpuwatch USER; log in again; restart the agent",
        )
    if not endpoint.is_listened_to(path):
        return warning(f"{whose}: stale socket, no process listens", f"{_START} (or rm {path})")
    return ok(f"{whose}: an agent listens")


def _declared(machine: Machine, declared: str) -> Outcome:
    try:
        checked = endpoint.checked(declared, "GPUWATCH_ENDPOINT")
    except ConfigError as error:
        return problem(str(error), "unset GPUWATCH_ENDPOINT: a hook then tries the agent's default sockets")
    remedy = f"gpuwatch agent --listen {checked}, or unset GPUWATCH_ENDPOINT"
    if checked.startswith("ipc://"):
        path = Path(checked.removeprefix("ipc://"))
        found = _socket(path, machine)
        if found is None:
            return problem(f"GPUWATCH_ENDPOINT={declared}: there is no {path}", remedy)
        return found if found.status != "warning" else problem(found.found, remedy)
    host, _, port = checked.removeprefix("tcp://").rpartition(":")
    if not machine.connects(host.strip("[]"), int(port)):
        return problem(f"GPUWATCH_ENDPOINT={declared}: no process listens", remedy)
    try:
        token = endpoint.token("GPUWATCH_TOKEN", machine.environ)
    except ConfigError as error:
        return problem(str(error), _TOKEN)
    if token is None or not machine.accepts(checked, token):
        what = "does not accept this token" if token else "needs the agent's token"
        return problem(f"GPUWATCH_ENDPOINT={declared}: what listens there {what}", _TOKEN)
    return ok(f"{checked}: an agent accepts the token")


def _owner(path: Path) -> str:
    try:
        return f"{path.owner()}:{path.group()}"
    except (KeyError, OSError):
        return "unknown owner"


def history(machine: Machine) -> Outcome:
    """The history file of the running agent, else of an agent that this user would start."""
    is_here = endpoint.is_loopback(urlsplit(machine.agent_url).hostname or "")
    status = machine.agent()[0] if is_here else None
    kept = status.history.path if status is not None else None
    path = Path(kept) if kept else machine.history
    if path is None:
        return skipped("no agent answers, and none can be started here", "pip install 'gpuwatch-training[agent]'")
    if status is not None and (failures := status.history.failures):
        return problem(f"{path}: {failures} writes of the agent failed", "is its disk full or read-only? df -h")
    try:
        place = _nearest(path)
    except OSError as error:
        if kept:
            return skipped(f"{path} is written by the agent, and this user may not read it")
        return problem(f"{path}: {error.strerror}", _OTHER_FILE)
    if not machine.writes(place) and not kept:
        return problem(f"{path}: {place} cannot be written", _OTHER_FILE)
    if place != path and not place.is_dir():
        return problem(f"{path}: {place} is a file, not a folder", _OTHER_FILE)
    _, _, free = machine.space(place)
    found = f"{path}, {size(free)} free"
    if free < _LEAST_BYTES:
        return problem(found, f"make room: without it the agent's counters stop advancing; or {_OTHER_FILE}")
    if free < _ENOUGH_BYTES:
        return warning(found, "make room, or keep less: gpuwatch agent --keep-gib 0.5")
    return ok(found)


def _nearest(path: Path) -> Path:
    """Return the file, or the nearest folder above it that exists. Raises: OSError where this user has no access."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _nearest(path.parent)
    return path


def prometheus(machine: Machine) -> Outcome:
    """Whether Prometheus scrapes its targets of the job `gpuwatch`. Source: prometheus.io, /api/v1/targets."""
    targets = _ask_prometheus(machine, "targets?state=active", "activeTargets")
    if isinstance(targets, Outcome):
        return targets
    ours = [target for target in targets if target["labels"].get("job") == _JOB]
    if not ours:
        return problem(f"{machine.prometheus_url} has no target of the job '{_JOB}'", _SCRAPE)
    if down := [target for target in ours if target["health"] == "down"]:
        errors = "; ".join(f"{target['labels'].get('instance')}: {target['lastError']}" for target in down[:3])
        return problem(
            f"{len(down)} of {len(ours)} targets are down: {errors}",
            "is the agent on that address? By default it serves on loopback: gpuwatch agent --http ADDRESS:9478",
        )
    up = sum(target["health"] == "up" for target in ours)
    waiting = f", {len(ours) - up} not scraped yet" if up < len(ours) else ""
    return ok(f"{machine.prometheus_url}: {up} of {len(ours)} targets up{waiting}")


def alert_rules(machine: Machine) -> Outcome:
    """Whether Prometheus has loaded gpuwatch's alert rules and evaluates them. Source: prometheus.io, /api/v1/rules."""
    groups = _ask_prometheus(machine, "rules?type=alert", "groups")
    if isinstance(groups, Outcome):
        return groups
    rules = [rule for group in groups if any(r["name"] == _RULE for r in group["rules"]) for rule in group["rules"]]
    if not rules:
        return warning(
            f"gpuwatch's alerts ({_RULE} …) are not loaded",
            "gpuwatch rules > gpuwatch.yml, name it under rule_files, and reload Prometheus",
        )
    if failing := [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule.get("health") == "err"]:
        return problem("; ".join(failing), "gpuwatch rules > gpuwatch.yml, and reload Prometheus")
    return ok(f"{len(rules)} alerts of gpuwatch are loaded")


def _ask_prometheus(machine: Machine, path: str, field: str) -> Any:
    """Return a field of its API's answer, or the Outcome where none was named or it does not answer."""
    if machine.prometheus_url is None:
        return skipped("no Prometheus was named", "give it with --prometheus URL")
    reason = "no Prometheus API there"
    try:
        answer = machine.fetch(f"{machine.prometheus_url}/api/v1/{path}")
        reason += f" (status {answer.status})"
        return json.loads(answer.body)["data"][field]
    except OSError as error:
        reason = why(error)
    except (ValueError, KeyError, TypeError):
        pass
    return problem(f"{machine.prometheus_url}: {reason}", "curl it from here: address, port, firewall, path prefix")
