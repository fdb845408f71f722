"""A panel's question to the numbers: evaluated over an agent's samples, or as PromQL."""
