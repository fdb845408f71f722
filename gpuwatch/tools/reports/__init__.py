"""Reports of finished and running runs: gathered from an agent or a history file, rendered as HTML, Markdown or JSON.

`gather` makes a `RunReport`, `compare` sets two of them side by side; `page`, `markdown` and `model` say it in three forms.
"""

from gpuwatch.tools.reports.comparing import Comparison, compare
from gpuwatch.tools.reports.gates import Broken, Gate, broken, parse_gate
from gpuwatch.tools.reports.gather import gather
from gpuwatch.tools.reports.model import RunReport, as_json, from_json

__all__ = [
    "Broken",
    "Comparison",
    "Gate",
    "RunReport",
    "as_json",
    "broken",
    "compare",
    "from_json",
    "gather",
    "parse_gate",
]
