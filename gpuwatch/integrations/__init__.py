"""One file per framework, which measures its trainings by a `Watch`. Raises: MissingFramework if it is not installed.

Nothing here is imported by `import gpuwatch`.
"""

from gpuwatch.errors import MissingExtra


class MissingFramework(MissingExtra, ImportError):
    """An integration was imported where its framework is not installed."""

    def __init__(self, integration: str, package: str) -> None:
        Exception.__init__(
            self,
            f"gpuwatch.integrations.{integration} needs '{package}', which is not installed: pip install {package}",
        )
