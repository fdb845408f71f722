"""Write the dashboards' files in a checkout: `python -m gpuwatch_dashboards.grafana --write`."""

from __future__ import annotations

import argparse

from gpuwatch_dashboards.grafana import CHECKOUT
from gpuwatch_dashboards.grafana.build import DASHBOARDS, text_of

parser = argparse.ArgumentParser(prog="python -m gpuwatch_dashboards.grafana", description=__doc__)
parser.add_argument("--write", action="store_true", required=True, help=f"write the files in {CHECKOUT}")
parser.parse_args()
for name in DASHBOARDS:
    (CHECKOUT / name).write_text(text_of(name), encoding="utf-8")
