"""The node agent: takes hook messages, samples the node once a second, serves /metrics and a JSON API."""
