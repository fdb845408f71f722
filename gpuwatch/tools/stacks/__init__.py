"""Stacks of a training process and its loader workers: py-spy's samples, reduced to the user's own lines."""
