"""What is run on a real GPU: the checklist for an issue, and real networks next to the profiler."""
