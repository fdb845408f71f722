"""Recorded timelines of real GPUs, replayed through the real `Watch`, and what their own times say."""
