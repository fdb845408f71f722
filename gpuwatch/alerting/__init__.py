"""The Prometheus rules: templates (`recording.yml`, `alerts.yml`), the thresholds in them, and what fills them in."""
