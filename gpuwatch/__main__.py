"""`python -m gpuwatch` is the `gpuwatch` command."""

from gpuwatch.cli import main

main()
