"""A panel's query as PromQL."""

from __future__ import annotations

import re

from gpuwatch.metrics import BY_NAME
from gpuwatch_dashboards.model import Scope, Span
from gpuwatch_dashboards.query.evaluate import Match, Query

INSTANCE = "instance"
"""Prometheus's label of a node's agent. Kept where a metric says nothing of a run, so that nodes never add up."""


def render(query: Query, scope: Scope, window: str, function: str = "rate") -> str:
    """Return the query as one PromQL expression; `window` is the range of rates, e.g. "1m" or "$__rate_interval".

    `function` is what is taken of counters: rate, or increase.
    """
    text = _sum(query, scope, window, function)
    if query.over is None:
        return text
    matching = ", ".join(_by(query.over))
    return f"{text} / on ({matching}) group_left () ({_sum(query.over, scope, window, function)} > 0)"


def _sum(query: Query, scope: Scope, window: str, function: str = "rate") -> str:
    selector = f"{query.metric}{{{', '.join(_matchers(query, scope))}}}"
    values = f"{function}({selector}[{window}])" if query.is_rate else selector
    by = _by(query)
    together = "max" if query.greatest else "sum"
    return f"{together} by ({', '.join(by)}) ({values})" if by else f"{together}({values})"


def of_a_run(metric: str) -> bool:
    return "run" in BY_NAME[metric].labels


def _by(query: Query) -> tuple[str, ...]:
    return query.by if of_a_run(query.metric) else (INSTANCE, *query.by)


def scope_matches(metric: str, scope: Scope) -> list[Match]:
    """Return the conditions that keep a metric to the scope. Rank, instance and GPU are regular expressions."""
    labels = BY_NAME[metric].labels
    matches = []
    if "run" in labels:
        if scope.run is not None:
            matches.append(Match("run", "=", scope.run))
        if "rank" in labels and scope.rank is not None:
            matches.append(Match("rank", "=~", scope.rank))
    elif scope.instance is not None:
        matches.append(Match(INSTANCE, "=~", scope.instance))
    if "gpu" in labels and scope.gpu is not None:
        matches.append(Match("gpu", "=~", scope.gpu))
    return matches


def _matchers(query: Query, scope: Scope) -> list[str]:
    return [selector(match) for match in (*scope_matches(query.metric, scope), *query.where)]


def filled(promql: str, scope: Scope, span: Span, window: str) -> str:
    """Return PromQL with Grafana's variables replaced by the scope's values; what the scope leaves open matches anything."""
    texts = {name: quoted(getattr(scope, name) or ".*") for name in ("run", "rank", "instance", "gpu")}
    texts |= {"__rate_interval": window, "__range": f"{max(1.0, span.end_s - span.start_s):.0f}s"}
    # pages have no choice of user and job, and do not know the name of the scrape job
    found = re.sub(r"\$(\w+)", lambda name: texts.get(name[1], ".*"), promql)
    return found.replace('job="gpuwatch"', 'job=~".*gpuwatch.*"')


def selector(match: Match) -> str:
    """Return one label condition in PromQL's syntax, its value quoted."""
    return f'{match.label}{match.op}"{quoted(match.value)}"'


def quoted(value: str) -> str:
    """Return a text as it is written between PromQL's double quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
