"""Reports and comparisons of runs, gathered from an agent or a history file, as HTML, Markdown or JSON."""
