"""Prometheus with the shipped rules against simulated nodes."""
