"""The pages: Streamlit, and the Grafana dashboards that are generated from the same panels."""
