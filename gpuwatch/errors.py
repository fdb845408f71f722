"""The exception tree.

GpuwatchError
├── NoData          a source has no value here or now: logged quieter than a failure
├── ProtocolError   a message broke the wire contract
├── ConfigError     an option, a file or the environment is wrong; names what, where and what to do
│   └── SourceError an agent or Prometheus does not answer, or not as expected
└── MissingExtra    an optional dependency is not installed; names the pip line

`pass_on` raises again what is not gpuwatch's error: what a user's signal handler raised as it interrupted gpuwatch.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from traceback import walk_tb


class GpuwatchError(Exception):
    """Base of every error that gpuwatch raises on purpose. None of them ever reaches a training loop."""

    __repr__ = Exception.__str__  # its text is a sentence


class NoData(GpuwatchError):
    """A source that has no value on this machine or at this moment. The value is absent, never 0."""


class ProtocolError(GpuwatchError):
    """A message that cannot be used: malformed, too large, or of another protocol version."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # one word for the `reason` label of `gpuwatch_messages_rejected_total`


class ConfigError(GpuwatchError):
    """Something the user set is wrong. The message says what, where and what to do."""


class SourceError(ConfigError):
    """A server does not answer, or not as expected: its URL is wrong, or the server."""

    def __init__(self, what: str, remedy: str, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what  # one sentence that names the URL, e.g. "the agent at http://127.0.0.1:9478 does not answer"
        self.remedy = remedy  # what to do now
        self.status = status  # the HTTP status of a refusal; None when there was no answer


class MissingExtra(GpuwatchError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        remedy = f"pip install 'gpuwatch-training[{extra}]'"
        super().__init__(f"this part of gpuwatch needs '{module}', which is not installed: {remedy}")


def require(module: str, extra: str) -> None:
    """Raise MissingExtra, with the pip line, where a module is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingExtra(module, extra)


@contextmanager
def usable(what: str, remedy: str) -> Iterator[None]:
    """Raise ConfigError, with the reason and the remedy, where a file that the user named cannot be used."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(f"{what}: {reason}; {remedy}") from error


def pass_on(error: BaseException) -> None:
    """Raise the error again if a Python signal handler raised it: it is the user's. Otherwise gpuwatch handles it."""
    if threading.current_thread() is not threading.main_thread():
        return
    # Python passes a handler the frame that it interrupts: its caller's. By now another handler may be set.
    for (caller, _), (called, _) in pairwise(walk_tb(error.__traceback__)):
        names, variadic, _, given = inspect.getargvalues(called)
        if any(argument is caller for argument in (*map(given.get, names), *given.get(variadic or "", ()))):
            raise error
