"""The `gpuwatch` command: one file per subcommand in `gpuwatch.commands`, and the only place that catches errors.

Exit codes: 0 done, 1 a failure while running, 2 wrong usage or configuration (the message names the remedy).
"""

import logging
import sys
from typing import Any

from gpuwatch.errors import ConfigError, GpuwatchError, MissingExtra
from gpuwatch.formatting import harmless


def main() -> None:
    try:
        import typer
    except ImportError:
        least = dict(up="all", demo="all", dashboard="dashboard", top="dashboard", grafana="dashboard")
        extra = least.get("".join(sys.argv[1:2]), "agent")
        print(f"gpuwatch: {MissingExtra('typer', extra)}", file=sys.stderr)
        sys.exit(2)
    try:
        build(typer)(prog_name="gpuwatch")
    except GpuwatchError as error:
        typer.secho("\n".join(map(harmless, f"gpuwatch: {error}".splitlines())), fg="red", err=True)
        sys.exit(2 if isinstance(error, ConfigError | MissingExtra) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def build(typer: Any) -> Any:
    """Return the Typer application. `typer` is the module, which a bare installation lacks, and so its types."""
    from gpuwatch import __version__
    from gpuwatch.commands import COMMANDS
    from gpuwatch.commands.run import run

    app = typer.Typer(
        help="Where every GPU-second of a training job goes, live, and what to change.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    for command in COMMANDS:
        if isinstance(command, typer.Typer):  # a command with subcommands
            app.add_typer(command)
        else:
            # What follows the name of a program that is to be run are its own options.
            app.command(context_settings={"allow_interspersed_args": command is not run})(command)

    @app.callback(invoke_without_command=True)  # type: ignore[untyped-decorator]
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
        verbose: bool = typer.Option(False, "--verbose", "-v", help="Log more on stderr."),
    ) -> None:
        if version:
            print(__version__)
            raise typer.Exit
        level = logging.INFO if verbose else logging.WARNING
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    return app
