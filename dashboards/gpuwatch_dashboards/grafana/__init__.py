"""The Grafana dashboards: built from the list of panels, kept as JSON in dashboards/grafana/, pushed by `gpuwatch grafana`.

Building needs grafana-foundation-sdk (in the `dev` extra); using the files needs nothing.
"""
