"""Tables and texts that are kept as YAML, beside the code that uses them."""

from importlib.resources import files
from typing import Any


def table(package: str, name: str) -> Any:
    """Return a package's YAML file, parsed. Needs PyYAML, of the agent and dashboard extras."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((files(package) / name).read_text("utf-8"), loader)
