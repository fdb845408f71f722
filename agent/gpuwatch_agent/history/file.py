"""The history file: its schema, its lock, opening and checking it, renaming a damaged one."""

import logging
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpuwatch.errors import ConfigError
from gpuwatch.wire.sockets import lock_beside

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 4
_SCHEMA = Path(__file__).with_name("schema.sql").read_text("utf-8")


def default_history() -> Path:
    """Return the default history file: below XDG_STATE_HOME, for root in /var/lib/gpuwatch."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "gpuwatch" / "history.db"
    if os.getuid() == 0:
        return Path("/var/lib/gpuwatch/history.db")
    return Path.home() / ".local" / "state" / "gpuwatch" / "history.db"


def lock_history(path: Path) -> IO[str]:
    """Return the open lock file of the agent that writes the history. Raises: ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"--history {path} is a folder, or no regular file; name one, e.g. {path / 'history.db'}")
    with suppress(OSError), path.open("rb") as file:  # the caller that opens it reports such errors
        is_database = file.read(16) in (b"", b"SQLite format 3\0")
        if not is_database and path.name != default_history().name:  # a damaged one of that name is renamed
            raise ConfigError(f"--history {path} is not a history; name another file, or one that does not exist yet")
    return lock_beside(path, f"--history {path}")


def open_history(path: Path) -> sqlite3.Connection:
    """Open or create the file; one that is damaged or of an older schema is renamed with a warning, and replaced.

    Raises: ConfigError where it cannot be written, or is no history that this version knows.
    """
    try:
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            set_aside(path, error)
            return _open(path)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"--history {path}: {error}; choose a file that you may write to") from error


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the file's content is at fault, rather than the disk or the rights."""
    signs = ("malformed", "not a database", "corrupt", "old schema", "no such table", "decode to UTF-8")
    return isinstance(error, sqlite3.DatabaseError) and any(sign in str(error) for sign in signs)


def set_aside(path: Path, reason: object) -> None:
    """Rename a file that cannot be used. Raises: OSError."""
    aside = path.with_name(f"{path.name}.damaged-{time.time():.0f}")
    logger.warning("history %s cannot be used (%s): renamed to %s, a new one is created", path, reason, aside.name)
    for suffix in ("", "-wal", "-shm"):
        if (part := path.with_name(path.name + suffix)).exists():
            part.rename(aside.with_name(aside.name + suffix))


def connect_readonly(path: Path, timeout_s: float = 2.0) -> sqlite3.Connection:
    """Return a connection that only reads, whatever characters the path has. Raises: sqlite3.Error."""
    if path.exists() and not path.is_file():  # to open a FIFO would wait for its writer
        raise sqlite3.DatabaseError("not a database: it is no regular file")
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=timeout_s)


def _open(path: Path) -> sqlite3.Connection:
    path.touch(0o600)  # SQLite gives its other two files the same mode
    with suppress(OSError):  # another user's
        path.chmod(0o600)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
    try:
        connection.executescript("PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"--history {path} was written by a newer gpuwatch (schema {version}, this one reads {SCHEMA_VERSION}): "
                "update gpuwatch, or choose another file"
            )
        if version == 0:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise ConfigError(f"--history {path} is another program's database; choose another file")
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version < SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"an old schema: {version}, this gpuwatch writes {SCHEMA_VERSION}")
        for table in ("layout", "run", "gpu"):  # small, and read in full: damage in them shows here
            connection.execute(f"SELECT * FROM {table}").fetchall()
        connection.execute("BEGIN IMMEDIATE")  # fails here, not at the first commit, where it cannot be written
        connection.execute("ROLLBACK")
        # From now on only the writer's thread waits: for a backup, or a shell.
        connection.execute("PRAGMA busy_timeout=60000")
    except BaseException:
        connection.close()
        raise
    return connection
