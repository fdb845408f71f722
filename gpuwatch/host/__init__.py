"""The readers of /proc, control groups and /dev/shm that the hook and the agent share."""
