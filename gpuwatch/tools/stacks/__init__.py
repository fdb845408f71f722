"""Stacks of a training process and its loader workers: py-spy's samples, reduced to the user's own lines.

`spy` runs py-spy and reads what it wrote; `records` is the result, and its text.
"""
