"""Reports of finished and running runs: gathered from an agent or a history file, as HTML, Markdown or JSON.

`gather` makes a `RunReport`, `compare` a `Comparison` of two; `page` renders both. `display` has the words and colours of all surfaces.
"""

from gpuwatch.tools.reports.comparison import Broken, Comparison, Gate, broken, compare, parse_gate
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
