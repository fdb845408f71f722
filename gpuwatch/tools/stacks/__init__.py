"""Where a training process and its loader workers stand: py-spy's samples, boiled down to the user's own lines.

`spy` runs py-spy, `profile` reads what it wrote, `records` is what comes of it, `words` says it.
"""

from gpuwatch.tools.stacks.records import HotLine, ProcessStacks, Stacks

__all__ = ["HotLine", "ProcessStacks", "Stacks"]
