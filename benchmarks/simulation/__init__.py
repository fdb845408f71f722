"""Synthetic nodes for capacity planning: what each would serve at /metrics, deterministic by a seed."""
