"""The exception tree.

GpuwatchError
├── NoData          a source exists but has no value now: quieter than a failure
├── ProtocolError   a message broke the wire contract
├── ConfigError     an option, a file or the environment is wrong; names what, where and what to do
│   └── SourceError an agent or Prometheus does not answer, or not as agreed
└── MissingExtra    an optional dependency is not installed; names the pip line
"""


class GpuwatchError(Exception):
    """Base of every error that gpuwatch raises on purpose. None of them ever reaches a training loop."""


class NoData(GpuwatchError):
    """A source that has nothing to say on this machine or at this moment. The value is absent, never 0."""


class ProtocolError(GpuwatchError):
    """A message that cannot be used: malformed, too large, or of another protocol version."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One word for the `reason` label of `gpuwatch_messages_rejected_total`."""


class ConfigError(GpuwatchError):
    """Something the user set is wrong. The message says what, where and what to do."""


class SourceError(ConfigError):
    """A server does not answer, or not as agreed: its URL or what runs there is to be put right."""

    def __init__(self, what: str, where: str, remedy: str, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what
        """One sentence that names the URL, e.g. "the agent at http://127.0.0.1:9478 does not answer"."""
        self.where = where
        """The URL."""
        self.remedy = remedy
        """What to do now."""
        self.status = status
        """The HTTP status of a refusal; None when there was no answer."""


class MissingExtra(GpuwatchError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"this part of gpuwatch needs '{module}', which is not installed: pip install 'gpuwatch-training[{extra}]'"
        )


def require(module: str, extra: str) -> None:
    """Raise MissingExtra, with the pip line, where a module is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingExtra(module, extra)
