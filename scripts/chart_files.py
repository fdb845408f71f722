"""Write what the Helm chart carries of other sources: the alert rules, and the Grafana dashboards. `make golden` runs it.

A chart cannot reach files outside its folder, and links out of it are refused by some that install charts.
"""

from __future__ import annotations

from pathlib import Path

from gpuwatch.alert_rules import render

ROOT = Path(__file__).parents[1]
FILES = ROOT / "deploy/helm/gpuwatch/files"


def wanted() -> dict[Path, str]:
    """Return the text of every file that the chart's folder `files` should have, and no other."""
    texts = {FILES / "rules.yml": render()}
    for dashboard in sorted((ROOT / "dashboards/grafana").glob("*.json")):
        texts[FILES / "dashboards" / dashboard.name] = dashboard.read_text()
    return texts


def main() -> None:
    texts = wanted()
    for path in FILES.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
