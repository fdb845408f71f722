"""A week as a letter: what each user's GPUs did, which runs lost most, why, and what to change. From Prometheus, by the recording rules."""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from string import Template
from typing import Any

from gpuwatch.api.client import LONG_TIMEOUT_S, Prometheus, Vector
from gpuwatch.diagnosis.rates import money
from gpuwatch.diagnosis.report import labelled
from gpuwatch.formatting import harmless, percent
from gpuwatch.ledger.states import LOST_KINDS
from gpuwatch.tools.reports.job import NO_LOSS, held_lines

_DAY_S = 86400
_USERS, _RUNS, _LEAST_HOURS = 20, 3, 0.1  # users, runs of each, and what a run loses that is worth a line
_SPENT = "sum by (user, run, kind) (sum_over_time(owner_kind:gpuwatch_gpu_$metric:increase5m{user=~$users}[1d])) > 0"
_FOUND = f"{{run=~$runs,{NO_LOSS}}}[$window]"
_CAUSE = f"topk by (run) (1, sum by (run, cause) (sum_over_time(gpuwatch_finding_evidence_ratio{_FOUND})))"
_ADVICE = f"sum by (run, cause, advice) (count_over_time(gpuwatch_finding_info{_FOUND}))"
_WHY = {"cause": _CAUSE, "advice": f"topk by (run) (1, {_ADVICE} and on (run, cause) {_CAUSE})"}


def digest(prometheus: Prometheus, users: str, days: int, now_s: float) -> dict[str, Any]:
    """Return what the GPUs of the users whose names match a regular expression did in the last days. Raises: SourceError.

    `gpu_hours` and `cost` by kind of all of them (`cost` is empty without a price), and `users` by name, at most 20, who lost most first: each
    the same, and `runs`, the ones that lost most: `lost_hours`, and of their findings the `cause` that took most, with its `advice`.
    """

    def ask(expr: str, at_s: float, **given: str) -> Vector:
        quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in given.items()}
        return prometheus.instant(Template(expr).safe_substitute(quoted, window=f"{days}d"), at_s, LONG_TIMEOUT_S)

    def spent(metric: str) -> Mapping[tuple[str | None, str | None], Counter[str]]:
        """Return the time by kind of each user's run, of each user (None: of all runs), and of all (None, None)."""
        found: defaultdict[tuple[str | None, str | None], Counter[str]] = defaultdict(Counter)
        for day in range(days):  # a site's week is more samples than one query may read
            for labels, value in ask(_SPENT.replace("$metric", metric), now_s - day * _DAY_S, users=users):
                for owner in ((labels["user"], labels.get("run", "")), (labels["user"], None), (None, None)):
                    found[owner].update({labels["kind"]: value})
        return found

    hours, cost = spent("hours"), spent("cost")
    everyone = sorted({user for user, _ in hours if user}, key=lambda user: -lost(hours[user, None]))
    about: dict[Any, dict[str, Any]]
    about = {user: {"gpu_hours": hours[user, None], "cost": cost[user, None]} for user in (None, *everyone)}
    named = everyone[:_USERS]
    for user in named:
        worst = sorted(((lost(kinds), run) for (own, run), kinds in hours.items() if own == user and run), reverse=True)
        about[user]["runs"] = {run: {"lost_hours": of_run} for of_run, run in worst[:_RUNS] if of_run >= _LEAST_HOURS}
    if runs := "|".join(re.escape(run) for user in named for run in about[user]["runs"]):
        why = {of: {each["run"]: each[of] for each, _ in ask(expr, now_s, runs=runs)} for of, expr in _WHY.items()}
        for run, of_run in (item for user in named for item in about[user]["runs"].items()):
            of_run |= {of: by_run[run] for of, by_run in why.items() if run in by_run}
    currency = next((labels["currency"] for labels, _ in ask("site:gpuwatch_currency:info", now_s)), "")
    return {"days": days, **about[None], "currency": currency, "users": {user: about[user] for user in named}}


def lost(kinds: Mapping[str, float]) -> float:
    return sum(kinds.get(kind, 0.0) for kind in LOST_KINDS)


def digest_text(found: Mapping[str, Any], now_s: float) -> str:
    """Return what `digest` returns as plain text."""

    def about(spent: Mapping[str, Any]) -> list[str]:
        hours, cost, currency = spent["gpu_hours"], spent["cost"], found["currency"]
        of_cost = f", {money(lost(cost), currency)}" if cost else ""
        lost_line = f"  lost    {lost(hours):.3g} GPU-hours, {percent(lost(hours) / (hours['all'] or 1.0))}{of_cost}"
        held = {"gpu_hours": hours, "currency": currency} | ({"cost": cost["all"]} if cost else {})
        return [*held_lines(held), lost_line]

    day = time.strftime("%Y-%m-%d", time.localtime(now_s))
    users = found["users"]
    lines = [f"gpuwatch · {found['days']} days to {day} · {len(users)} user{'s' * (len(users) != 1)}", *about(found)]
    for user, spent in users.items():
        lines += ["", user, *(about(spent) if len(users) > 1 else ())]
        for run, of_run in spent["runs"].items():
            cause = f": {of_run['cause']}" if "cause" in of_run else ""
            lines.append(f"  {run} lost {of_run['lost_hours']:.3g} GPU-hours{cause}")
            lines += labelled("do", of_run["advice"], indent=10) if of_run.get("advice") else ()
    return "\n".join(map(harmless, lines))
