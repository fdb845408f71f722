"""Print docs/reference/commands.md: every command with its help and options, from the command line itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from textwrap import fill
from typing import Any

import typer
from typer.main import get_command

from gpuwatch.cli import build

HEAD = """# Commands

This page is written from the help of the commands by `make golden`. Exit codes of all commands: 0 done, 1 failed, 2
wrong usage or configuration, 130 after Ctrl-C. `gpuwatch --version` prints the version, and `gpuwatch -v COMMAND` logs
more.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(_sections(get_command(build(typer)), "gpuwatch"))


def _sections(group: Any, name: str) -> Iterator[str]:
    for each, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _sections(command, f"{name} {each}")
        else:
            yield _section(command, f"{name} {each}")


def _section(command: Any, name: str) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join([name, "[OPTIONS]", *(_argument(each) for each in arguments)])
    text = "\n\n".join(_wrapped(each) for each in command.help.split("\n\n"))
    rows = [_row(each) for each in command.params if each.name != "help"]
    return f"\n## `{name}`\n\n```\n{usage}\n```\n\n{text}\n\n| | | default |\n|---|---|---|\n" + "".join(rows)


def _wrapped(paragraph: str) -> str:
    text = re.sub(
        "`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(paragraph.split())
    )  # code stays on a line
    return fill(text, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _argument(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in parameter.opts if is_option) or f"`{_argument(parameter)}`"
    text = parameter.help + (f" Or `{parameter.envvar}`." if parameter.envvar else "")
    default = getattr(parameter.default, "value", parameter.default)
    shown = f"`{default}`" if isinstance(default, str | int | float) and default not in (False, "") else ""
    text = text.replace("|", r"\|")  # else it begins another cell
    return f"| {names} | {text} | {shown} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
