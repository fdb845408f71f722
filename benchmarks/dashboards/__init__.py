"""What the pages cost, Grafana's queries, and the pictures of the docs."""
