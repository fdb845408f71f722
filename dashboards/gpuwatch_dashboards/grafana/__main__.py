"""Print, write or check the generated dashboards: `python -m gpuwatch_dashboards.grafana [--write | --check]`."""

from __future__ import annotations

import argparse
import sys

from gpuwatch_dashboards.grafana import CHECKOUT
from gpuwatch_dashboards.grafana.build import DASHBOARDS, text_of


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 when a file is stale, else 0."""
    parser = argparse.ArgumentParser(prog="python -m gpuwatch_dashboards.grafana", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help=f"write the files in {CHECKOUT}")
    choice.add_argument("--check", action="store_true", help="list stale files; status 1 when there is one")
    options = parser.parse_args(arguments)
    stale = 0
    for name in DASHBOARDS:
        path, text = CHECKOUT / name, text_of(name)
        if options.write:
            path.write_text(text, encoding="utf-8")
        elif not options.check:
            sys.stdout.write(text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale: run `python -m gpuwatch_dashboards.grafana --write`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
