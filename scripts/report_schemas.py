"""Write docs/reference/schemas/: JSON schemas of `gpuwatch report --json` and `compare --json`, from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from gpuwatch.tools.reports import comparison, model
from gpuwatch.tools.reports.comparison import Comparison
from gpuwatch.tools.reports.model import RunReport

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas (JSON Schema 2020-12) by file name."""
    found = {}
    for name, kind in ((model.SCHEMA, RunReport), (comparison.SCHEMA, Comparison)):
        schema = msgspec.json.schema(kind)
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["title"] = name
        schema["$defs"][kind.__name__]["properties"]["schema"]["const"] = name
        found[f"{name.replace('/', '-')}.json"] = schema
    return found


def texts() -> dict[str, str]:
    return {name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n" for name, schema in schemas().items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in texts().items():
        (FOLDER / file).write_text(text)
