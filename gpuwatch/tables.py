"""Tables and texts that are kept as YAML, next to the code that uses them."""

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from gpuwatch.errors import ConfigError

NAME = re.compile(r"\$\{(\w+)\}")


def table(package: str, name: str) -> Any:
    """Return a package's YAML file, parsed. Needs PyYAML, of the agent and dashboard extras."""
    return msgspec.yaml.decode((files(package) / name).read_bytes())


def fill(value: Any, texts: Mapping[str, Any]) -> Any:
    """Return a value with each `${name}` replaced by its text, itself filled in. Raises: ConfigError without a text."""

    def one(name: re.Match[str]) -> str:
        if name[1] not in texts:
            raise ConfigError(f"{name[0]} in {name.string!r}: neither a threshold nor a text of the template")
        return str(fill(texts[name[1]], texts))

    if isinstance(value, Mapping):
        return {key: fill(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, texts) for each in value]
    return NAME.sub(one, value) if isinstance(value, str) else value
