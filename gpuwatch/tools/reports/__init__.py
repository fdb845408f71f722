"""Reports of finished and running runs: gathered from an agent or a history file, as HTML, Markdown or JSON.

`gather` makes a `RunReport` (`model`), `comparison` compares two; `page` renders both. `display` has the words and colours of all surfaces.
"""
