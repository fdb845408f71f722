"""Would a hook that starts now, as this user, find its agent: the same looks as `gpuwatch.wire.endpoint.find`, with reasons."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
from pathlib import Path

from gpuwatch.errors import ConfigError
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings
from gpuwatch.wire import endpoint

_START = "start an agent: gpuwatch up"
_CONNECT_S = 0.5


def hook_socket(around: Surroundings) -> Outcome:
    """The endpoint that a hook would use: does it exist, may this user write to it, does somebody listen."""
    if declared := around.environ.get("GPUWATCH_ENDPOINT", "").strip():
        return _declared(around, declared)
    passed_over = []
    for directory in around.socket_directories:
        path = directory / endpoint.SOCKET_NAME
        found = look(path, around)
        if found is None:
            continue
        if found.status == "ok":
            return found
        passed_over.append(found)
    if passed_over:
        return passed_over[0]
    places = ", ".join(str(directory) for directory in around.socket_directories)
    return skipped(f"no agent's socket in {places}: a run prints its verdict and is not shown live", _START)


def look(path: Path, around: Surroundings) -> Outcome | None:
    """Return what is to be said of a socket's file; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return problem(f"{path}: {error.strerror}", f"let this user into the folder {path.parent}")
    whose = f"{path} ({_user(status.st_uid)}:{_group(status.st_gid)}, {stat.S_IMODE(status.st_mode):04o})"
    if not stat.S_ISSOCK(status.st_mode):
        return problem(f"{whose} is not a socket", f"rm {path}, then restart the agent")
    if status.st_uid not in (0, around.uid):
        return warning(f"{whose} is another user's: passed over", f"ask {_user(status.st_uid)} why it is there")
    if not _may_write(status, around):
        return problem(
            f"{whose}: {_user(around.uid)} may not write to it",
            "groupadd --system gpuwatch; usermod -aG gpuwatch USER; log in again; restart the agent",
        )
    if not endpoint.is_listened_to(path):
        return warning(f"{whose}: nobody listens, a dead agent left it", f"{_START} (or rm {path})")
    return ok(f"{whose}: an agent listens")


def _declared(around: Surroundings, declared: str) -> Outcome:
    try:
        checked = endpoint.checked(declared, "GPUWATCH_ENDPOINT")
    except ConfigError as error:
        return problem(str(error), "unset GPUWATCH_ENDPOINT: the agent's usual places are then looked at")
    remedy = f"gpuwatch agent --listen {checked}, or unset GPUWATCH_ENDPOINT"
    if checked.startswith("ipc://"):
        path = Path(checked.removeprefix("ipc://"))
        found = look(path, around)
        if found is None:
            return problem(f"GPUWATCH_ENDPOINT={declared}: there is no {path}", remedy)
        return found if found.status != "warning" else problem(found.found, remedy)
    host, _, port = checked.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        return problem(f"GPUWATCH_ENDPOINT={declared}: {error.strerror or error}", remedy)
    return ok(f"{checked}: somebody listens")


def _may_write(status: os.stat_result, around: Surroundings) -> bool:
    """Return what the mode says. Source: path_resolution(7): the first class that fits decides, root may always."""
    if around.uid == 0:
        return True
    if status.st_uid == around.uid:
        return bool(status.st_mode & stat.S_IWUSR)
    if status.st_gid in around.groups:
        return bool(status.st_mode & stat.S_IWGRP)
    return bool(status.st_mode & stat.S_IWOTH)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
