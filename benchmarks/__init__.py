"""What gpuwatch costs and how true it is, measured by programs that write the pages of docs/evidence."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
