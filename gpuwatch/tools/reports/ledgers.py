"""A job's ledger, of one node by its agent or of all nodes; a week of users, a team or the site: as records and text.

What is of several nodes comes from Prometheus, by the recording rules.
"""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from string import Template
from typing import Any

from gpuwatch import api
from gpuwatch.alerting.render import template
from gpuwatch.api.client import LONG_TIMEOUT_S, Prometheus, Vector
from gpuwatch.diagnosis.rates import money, total_cost
from gpuwatch.diagnosis.report import explained, labelled, shares_text
from gpuwatch.diagnosis.rules import RULES
from gpuwatch.formatting import duration, harmless, percent
from gpuwatch.ledger.states import LOST_KINDS, shares
from gpuwatch.tools.reports.display import energy

_KINDS = {"compute": "useful", "input_wait": "starved", "stalled": "stalled"}
_WELL = "|".join(rule.cause for rule in RULES if rule.all_is_well)
_AFTER_S = 600  # after a job's end, its last GPU-hours are recorded by then


def joined(prometheus: Prometheus, name: str, now_s: float) -> dict[str, Any] | None:
    """Return what is known of the job, at its end or now; None if Prometheus does not know it. Raises: SourceError."""
    given = {"of": f"job_id={json.dumps(name, ensure_ascii=False)}", "window": "30d", "well": _WELL}
    queries = template("ledgers.yml")["job"]

    def ask(expr: str, by: str = "", **more: str) -> dict[str, float]:
        found = prometheus.instant(Template(expr).substitute(given, **more), now_s, LONG_TIMEOUT_S)
        return {labels.get(by, ""): value for labels, value in found}

    now_s = min([now_s, *(end_s + _AFTER_S for end_s in ask(queries["end"]).values())])
    if not (wall := ask(queries["numbers"]["wall_s"])):
        return None
    given["window"] = f"{wall[''] + _AFTER_S:.0f}s"
    runs = sorted(ask(queries["by"]["run"], "run")) or [name]
    given["runs"] = json.dumps("|".join(map(re.escape, runs)), ensure_ascii=False)[1:-1]
    numbers = {key: found[""] for key, expr in queries["numbers"].items() if (found := ask(expr))}
    states, causes, currency = (ask(queries["by"][label], label) for label in ("state", "cause", "currency"))
    hours, joules, cost = (ask(queries["kind"], "kind", metric=of) for of in ("hours", "energy_joules", "cost"))
    gpus = {"gpu_hours": hours, "energy_joules": joules, **({"cost": cost["all"]} if cost else {})}
    about = {"currency": next(iter(currency), ""), "causes": sorted(causes, key=lambda cause: -causes[cause])}
    return {"job": name, **numbers, "states": _closed(states, numbers), **gpus, **about, "runs": runs}


def _closed(counted: Mapping[str, float], numbers: Mapping[str, float]) -> dict[str, float]:
    """Return all nodes' states, which sum to the wall clock. Part of the new steps' time was done again elsewhere."""
    wall_s, share = numbers["wall_s"], numbers.get("redone_elsewhere_ratio", 0.0)
    compute_s = numbers.get("goodput_ratio", 0.0) * wall_s
    again = {state: counted.get(state, 0.0) for state in ("restart", "redone")}
    other = {state: seconds for state, seconds in counted.items() if state not in (*again, "down", "compute")}
    lost_s = max(0.0, numbers.get("repeated_s", 0.0) - sum(again.values()))
    once_s = max(0.0, counted.get("compute", 0.0) + sum(other.values()) - lost_s)
    scale = max(0.0, once_s * (1 - share) - compute_s) / (sum(other.values()) or 1.0)
    again["redone"] += once_s * share
    states = {"compute": compute_s, "lost": lost_s, **again}
    states |= {state: seconds * scale for state, seconds in other.items()}
    states["down"] = max(0.0, wall_s - sum(states.values()))
    return {state: seconds for state, seconds in states.items() if seconds > 1e-3}


def held_lines(held: Mapping[str, Any]) -> list[str]:
    """Return the lines about what was held: see `of_runs`."""
    hours, joules = {"all": 0.0, **held.get("gpu_hours", {})}, held.get("energy_joules")
    kinds = sorted(((spent, kind) for kind, spent in hours.items() if kind != "all" and spent), reverse=True)
    shares = "  ".join(f"{kind} {percent(spent / (hours['all'] or 1.0))}" for spent, kind in kinds)
    return [
        *([f"  GPUs    {hours['all']:.3g} GPU-hours: {shares}"] if hours["all"] else ()),
        *([f"  energy  {energy(joules)}"] if joules else ()),
        *([f"  cost    {money(held['cost'], held['currency'])}"] if "cost" in held else ()),
    ]


def of_runs(runs: Iterable[api.Run]) -> dict[str, Any]:
    """Return these ranks' known `gpu_hours`, `energy_joules` by state, `cost` and `currency`, as in `joined`."""
    ranks = list(runs)
    held = [(rank, rank.gpu_share * len(rank.gpus) / 3600) for rank in ranks]
    spent = [(_KINDS.get(state), s * gpus) for rank, gpus in held for state, s in rank.states.items()]
    hours = {kind: sum(h for own, h in spent if kind in ("all", own)) for kind in ("all", *_KINDS.values())}
    used = [item for rank in ranks for item in rank.energy_joules.items()]
    joules = {state: sum(each for own, each in used if own == state) for state, _ in used}
    cost = total_cost([rank.cost for rank in ranks if rank.cost is not None])
    about = {} if cost is None else {"cost": cost.total, "currency": cost.currency}
    return {"gpu_hours": hours if hours["all"] else {}, "energy_joules": joules, **about}


def job_text(job: Mapping[str, Any]) -> str:
    """Return a job's ledger as text: that of `joined`, or of one node the fields of an `api.Job` and of `of_runs`."""
    known = ((each, job[f"{each}s"]) for each in ("attempt", "node") if f"{each}s" in job)
    parts = [duration(job.get("wall_s") or sum(job["states"].values()))]
    parts += [f"{count:.0f} {each}{'s' * (count != 1)}" for each, count in known]
    parts += [f"{job['interruptions']} interrupted"] if "interruptions" in job else []
    is_joined, goodput_ratio = "causes" in job, job.get("goodput_ratio")
    has_numbers = job.get("steps" if is_joined else "redone_steps") is not None
    most = "" if has_numbers or job.get("attempts", 1) == 1 else "at most "
    goodput = f"{most}{percent(goodput_ratio)}: spent on new steps" if goodput_ratio is not None else "not known"
    lines = [f"gpuwatch · job {job['job']} · {', '.join(parts)}", f"  goodput {goodput}"]
    lines.append(f"  where   {shares_text(shares(job['states']))}")
    if not is_joined:
        redone = f"{job['redone_steps']:,}" if has_numbers else "an unknown number"
        lost = f", {job['lost_steps']:,} lost" if job["lost_steps"] else ""
        lines.append(f"  steps   {job['steps']:,}, of which {redone} redone{lost}")
    elif (elsewhere := job.get("redone_elsewhere_steps")) is not None and has_numbers:
        again = f", plus {elsewhere:,.0f} repeated on another node" if elsewhere else ""
        lines.append(f"  steps   {job['steps']:,.0f}{again}")
    lines += held_lines(job)
    if restart := sorted(job.get("restart", {}).items(), key=lambda item: -item[1]):
        lines.append("  restart " + "  ".join(f"{part} {duration(seconds)}" for part, seconds in restart))
    for found in job.get("findings", ()):
        lines += explained(found, indent=10)
    if causes := job.get("causes"):
        evidence = f"gpuwatch report {job['runs'][-1]} on its node has the evidence"
        lines.append(f"  why     {', '.join(causes)}; {evidence}")
    if not is_joined and not has_numbers:
        how = "give the global step, by watch(loader, start=…) or Watch(step=…): redone steps are then counted"
        lines += labelled("do", how, indent=10)
    return "\n".join(map(harmless, lines))


_DAY_S = 86400
_USERS, _RUNS, _LEAST_HOURS = 20, 3, 0.1  # users, runs of each, and what a run loses that is worth a line


def digest(prometheus: Prometheus, users: str, days: int, now_s: float) -> dict[str, Any]:
    """Return what the GPUs of users whose names match a regular expression did in the last days. Raises: SourceError.

    `gpu_hours` and `cost` by kind of all of them (`cost` is empty without a price), and `users` by name, at most 20,
    who lost most first: each the same, and the `runs` that lost most: `lost_hours`, the main `cause`, its `advice`.
    """
    queries = template("ledgers.yml")["digest"]

    def ask(expr: str, at_s: float, **given: str) -> Vector:
        quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in given.items()}
        expr = Template(expr).substitute(quoted, window=f"{days}d", well=_WELL)
        return prometheus.instant(expr, at_s, LONG_TIMEOUT_S)

    def spent(metric: str) -> Mapping[tuple[str | None, str | None], Counter[str]]:
        """Return the time by kind of each user's run, of each user (None: of all runs), and of all (None, None)."""
        found: defaultdict[tuple[str | None, str | None], Counter[str]] = defaultdict(Counter)
        for day in range(days):
            for labels, value in ask(queries["day"], now_s - day * _DAY_S, metric=metric, users=users):
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
        for of, expr in queries["why"].items():
            by_run = {each["run"]: each[of] for each, _ in ask(expr, now_s, runs=runs)}
            for run, of_run in (item for user in named for item in about[user]["runs"].items()):
                of_run |= {of: by_run[run]} if run in by_run else {}
    currency = next((labels["currency"] for labels, _ in ask(queries["currency"], now_s)), "")
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
