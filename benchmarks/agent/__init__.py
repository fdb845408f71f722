"""What the agent costs: CPU time, memory, scrapes, history, and an hour of a changing load."""
