import time
from typing import Annotated

import typer

from gpuwatch.api.client import Prometheus
from gpuwatch.commands.options import Json
from gpuwatch.errors import ConfigError, require
from gpuwatch.formatting import as_json
from gpuwatch.tools.reports.ledgers import digest as last_days
from gpuwatch.tools.reports.ledgers import digest_text


def digest(
    prometheus: Annotated[str, typer.Option(help="URL of the Prometheus.", envvar="GPUWATCH_PROMETHEUS")],
    user: Annotated[str, typer.Option(help="Regular expression for the users, e.g. 'alice|bob' for a team.")] = ".+",
    days: Annotated[int, typer.Option(help="How far back.", min=1, max=90)] = 7,
    notify: Annotated[list[str] | None, typer.Option(help="Send it to this Apprise URL too; repeatable.")] = None,
    json: Json = False,
) -> None:
    """Summarise a week of a user, a team or the site: GPU-hours, how much was lost, the worst runs, why, and what to change.

    Example: `gpuwatch digest --prometheus http://prometheus:9090 --user alice --notify mailto://…`

    Meant for cron. Needs the recording rules of `gpuwatch rules`. Exit codes: 0 done, 1 a notification was not delivered, 2 wrong usage or no such user.
    """
    source, now_s = Prometheus(prometheus), time.time()
    found = last_days(source, user, days, now_s)
    if not found["users"]:
        raise ConfigError(
            f"{source.where} has no GPU-hours of users {user!r} in {days} days; load the rules of `gpuwatch rules`"
        )
    text = digest_text(found, now_s)
    typer.echo(as_json(found) if json else text)
    if notify:
        require("prometheus_client", "agent")
        from gpuwatch_agent.notify import apprise_senders

        title, _, body = text.partition("\n")
        if not all([send(title, body, False) for send in apprise_senders(notify).values()]):
            typer.secho("gpuwatch: a notification was not delivered", fg="red", err=True)
            raise typer.Exit(1)
