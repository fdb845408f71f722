"""Injected time next to reported time: scenarios in real time, each in a process of its own."""
