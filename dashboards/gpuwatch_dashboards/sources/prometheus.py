"""Numbers from Prometheus (or any store with its HTTP API), by the metrics that agents export.

A site's runs and GPUs are rebuilt from these: what the agents themselves answer as structs.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from string import Template

from msgspec.structs import replace

from gpuwatch.api import Finding, Gpu, Recent, Run, Series
from gpuwatch.api.client import TIMEOUT_S, Client, Get, Labels, Params, Prometheus, Vector
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import BY_CAUSE, in_order
from gpuwatch.diagnosis.window import StepColumns, Window
from gpuwatch.tables import table
from gpuwatch_dashboards.launch import DEFAULT_AGENT_URL
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.query import INSTANCE, Line, Match, Node, Query, Scope, Span, by_number, filled, render

Seconds = Mapping[str, float]  # by state, or by phase
Key = tuple[str, str]
RUN, GPU = ("run", "rank"), ("gpu", "UUID")  # the labels of a key
WATERMARK = "gpuwatch_ledger_watermark_timestamp_seconds"
LOOKBACK = "6h"  # runs that were active within this time are listed
MISSED = "5m"  # for so long the ranks of a node that does not answer are shown with the others of their run
MOST_RUNS = 100
QUERIES = table("gpuwatch_dashboards.sources", "scraped.yml")
GAUGES = ("utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts")
SITE_TIMEOUT_S = 15.0  # for queries about a whole site over weeks
ENDED_HOLD_S = 30.0  # ended runs are asked for again after so long, and at once when a run is no longer served
INTERVAL_HOLD_S = 300.0  # how often Prometheus scrapes is asked for again after so long
SCRAPES_PER_WINDOW = 4  # a rate over fewer scrapes is empty whenever one of them is missed


class ScrapedRun(Run, frozen=True):
    """A run as its node's agent exported it."""

    instance: str | None = None


class PrometheusSource:
    """A Prometheus that scrapes agents, as a source. It has no evidence of findings, and of steps only a histogram."""

    def __init__(
        self,
        url: str,
        get: Get | None = None,
        least_interval_s: float = 15.0,
        now: Callable[[], float] = time.time,
        agent_url: str = DEFAULT_AGENT_URL,
    ) -> None:
        self._api = Prometheus(url, get)
        self._least_interval_s, self._interval = least_interval_s, (0.0, least_interval_s)
        self._now = now
        self._ended: dict[tuple[str | None, str | None], tuple[float, set[str], list[ScrapedRun]]] = {}
        # its scheme, user and password are those of all agents
        self._agent_at = cache(lambda where: Client(re.sub(r"[^/@]+/*$", where, agent_url)))
        self.label = f"Prometheus at {self._api.url}"

    def runs(self, node: str | None = None, run: str | None = None, kept: bool = False) -> Sequence[Run]:
        now_s, current = self._now(), self._names(node, False)
        until_s, served, ended = self._ended.get((node, run), (now_s, set(), []))
        if now_s >= until_s or (len(current) < MOST_RUNS and served - {*current}):
            names = [*([run] if run else ()), *self._names(node, True)]
            names = [name for name in dict.fromkeys(names) if name not in current][: max(1, MOST_RUNS - len(current))]
            ended = [*self._scraped(names, True)]
            self._ended = {key: value for key, value in self._ended.items() if value[0] > now_s}
            self._ended[node, run] = now_s + ENDED_HOLD_S, {*current}, ended
        found = [*self._scraped({*current}, False)]
        found += [one for one in ended if one.run not in current]
        return sorted(found, key=lambda one: (-round(one.watermark_s), one.run, one.rank))

    def _names(self, node: str | None, ended: bool) -> list[str]:
        """Return the runs of a node's MOST_RUNS ranks (None: a site's), now or (`ended`) in LOOKBACK; latest first."""
        own = WATERMARK if node is None else f"{WATERMARK}{{{Match(INSTANCE, '=', node)}}}"
        if ended:  # of a site by the rules' series, which is one for each run: all ranks' own would take seconds
            own = f"last_over_time({f'run:{WATERMARK}:max' if node is None else own}[{LOOKBACK}])"
        found = sorted(self.instant(f"topk({MOST_RUNS}, {own})"), key=lambda series: -series[1])
        return [labels["run"] for labels, _ in found]

    def _scraped(self, names: Collection[str], ended: bool) -> Iterator[ScrapedRun]:
        """Yield the runs of these names as they are now, or how those ended that were there within the LOOKBACK."""
        if not names:
            return
        condition = Match("run", "=~", "|".join(re.escape(name) for name in sorted(names)))
        given = {"runs": condition, "window": f"{self._window_s:g}s", "back": LOOKBACK if ended else MISSED}

        def ask(expr: str) -> Vector:
            return self.instant(Template(expr).substitute(given))

        def values(group: str) -> dict[str, dict[Key, float]]:
            return {
                name: {_key(labels, RUN): value for labels, value in ask(expr) if abs(value) < float("inf")}
                for name, expr in QUERIES[group].items()
            }

        def seconds_by(label: str) -> dict[str, dict[Key, dict[str, float]]]:
            found: dict[str, dict[Key, dict[str, float]]] = {}
            for name, expr in QUERIES[label].items():
                found[name] = {}
                for labels, seconds in ask(expr):
                    if seconds > 0.0:
                        found[name].setdefault(_key(labels, RUN), {})[labels.get(label, "unknown")] = seconds
            return found

        infos = {_key(labels, RUN): labels for labels, _ in ask(QUERIES["info"])}
        findings = _findings(ask(QUERIES["evidence"]), ask(QUERIES["findings"]))
        ranks, recents, jobs = values("rank"), values("recent"), values("job")
        states, phases = seconds_by("state"), seconds_by("phase")
        for key, labels in infos.items():
            rank = int(key[1])
            of_rank = _of_rank(findings.get(key[0], ()), rank, ranks["late_ratio"].get(key))
            whole, now = states["whole"].get(key, {}), states["recent"].get(key, {})
            known = {name: of.get(key) for name, of in recents.items()}
            recent = Recent(duration_s=self._window_s, states=now, **known)
            of_job = {name: of[key[0], ""] for name, of in jobs.items() if (key[0], "") in of}
            named = phases["recent" if now else "whole"].get(key, {})
            stalled_s = whole.get("stalled") if any(finding.cause == "stalled" for finding in of_rank) else None
            window = replace(_window(now, whole, phases["steps"].get(key, {}), named, labels), stalled_s=stalled_s)
            watermark_s = ranks["watermark_s"].get(key, self._now())
            yield ScrapedRun(
                run=key[0],
                rank=rank,
                name=labels.get("name") or key[0],
                status="running" if ranks["up"].get(key) == 1 else "gone",
                started_s=watermark_s - sum(whole.values()),
                watermark_s=watermark_s,
                last_message_s=watermark_s,
                host=labels.get(INSTANCE, ""),
                user=labels.get("user", ""),
                device=labels.get("device", ""),
                timeline=labels.get("timeline", ""),
                world_size=int(labels.get("world_size", 1)),
                steps=int(ranks["steps"].get(key, 0)),
                states=whole,
                phases=phases["whole"].get(key, {}),
                attempts=int(of_job.get("attempts", 1)),
                goodput_ratio=of_job.get("goodput_ratio"),
                goodput_is_exact="numbered" in of_job,
                recent=recent,
                verdict=give_verdict(window, of_rank) if window.states_s else None,
                findings=of_rank,
                instance=labels.get(INSTANCE),
            )

    def node(self, run: Run | None, node: str | None = None) -> Node:
        """Return the named node, or the run's; without either only Prometheus's own name is known."""
        name = node or (run.instance if run is not None else None)
        if name is None:
            return Node(self.label, ())
        return Node(name, (), instance=name, gpus=self._gpus(name))

    def _gpus(self, instance: str) -> tuple[Gpu, ...] | None:
        """Return a node's GPUs, each with its longest state of the window; None: not known whether it has any."""
        where = f"{{{Match(INSTANCE, '=', instance)}}}"
        longest = f"topk by (gpu, UUID) (1, increase(gpuwatch_gpu_seconds_total{where}[{self._window_s:g}s]) > 0)"
        infos, owners, states = (
            {_key(labels, GPU): labels for labels, _ in self.instant(expr)}
            for expr in (f"gpuwatch_gpu_info{where}", f"gpuwatch_gpu_owner_info{where}", longest)
        )
        gauges = {
            name: {_key(of, GPU): value for of, value in self.instant(f"gpuwatch_gpu_{name}{where}")} for name in GAUGES
        }
        keys = {*infos, *states, *(key for values in gauges.values() for key in values)}
        if not keys:
            seen = self.instant(f"gpuwatch_gpus_seen{where}")
            return () if seen and seen[0][1] == 0 else None
        found = (
            Gpu(
                key[0],
                key[1],
                name=infos.get(key, {}).get("model", ""),
                state=states.get(key, {}).get("state"),
                run=owners.get(key, {}).get("run") or None,
                owner=_owner(owners.get(key, {})),
                energy_joules={},
                **{name: values.get(key) for name, values in gauges.items()},
            )
            for key in keys
        )
        return tuple(sorted(found, key=by_number))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        step_s, window, scope = *self._resolution(span), _literal(scope)
        return [
            [
                Series({**dict.fromkeys(query.by, ""), **series.labels}, series.points)  # Prometheus drops empty labels
                for series in self.range(render(query, scope, window), span, step_s, TIMEOUT_S)
            ]
            for query in queries
        ]

    def answers(self, panel: Panel, scope: Scope, span: Span) -> list[list[Series]]:
        """Return the values of each curve of a panel: lines over the span, of a stat or table the values at its end."""
        step_s, window, scope = *self._resolution(span), _literal(scope)
        found = []
        for curve in panel.curves:
            expr = filled(curve.promql, scope, span, window) if curve.promql else render(curve.query, scope, window)
            if panel.kind in ("lines", "stack"):
                found.append(self.range(expr, span, step_s))
            else:
                values = self.instant(expr, span.end_s, SITE_TIMEOUT_S)
                found.append([Series(labels, ((span.end_s, _finite(value)),)) for labels, value in values])
        return found

    def currency(self) -> str:
        """Return the currency of the rules' prices; empty without a price."""
        return next((labels.get("currency", "") for labels, _ in self.instant("site:gpuwatch_currency:info")), "")

    def agent_of(self, run: Run) -> Client:
        """Return the agent of the run's node: at the address that it exports, as the chart's do, or at `instance`."""
        own = self.instant(f"gpuwatch_build_info{{{Match(INSTANCE, '=', run.instance or '')}}}")
        return self._agent_at(next((labels["address"] for labels, _ in own if "address" in labels), run.instance or ""))

    def instant(self, expr: str, time_s: float | None = None, timeout_s: float = TIMEOUT_S) -> Vector:
        """Return (labels, value) of each series of an expression, now or at a time."""
        return self._api.instant(expr, self._now() if time_s is None else time_s, timeout_s)

    def range(self, expr: str, span: Span, step_s: float, timeout_s: float = SITE_TIMEOUT_S) -> list[Series]:
        """Return the lines of an expression, with all their labels."""
        # multiples of the step: the same times at every refresh, so that lines do not jitter
        start_s = span.start_s // step_s * step_s
        params: Params = {"query": expr, "start": start_s, "end": span.end_s, "step": step_s}
        found = self._api.query("query_range", params, timeout_s)
        lines = ((r.metric, Line.of(tuple((t, _finite(float(v))) for t, v in r.values))) for r in found)
        return [Series(labels, line.points(1.5 * step_s)) for labels, line in lines]

    @property
    def _scrape_interval_s(self) -> float:
        """The seconds between two scrapes as most agents' samples have them, in steps of 5; at least the least."""
        until_s, interval_s = self._interval
        if self._now() >= until_s:
            found = self.instant(QUERIES["interval"], timeout_s=SITE_TIMEOUT_S)  # empty: no agent has two samples
            interval_s = max(self._least_interval_s, 5.0 * round(found[0][1] / 5.0)) if found else interval_s
            self._interval = self._now() + (INTERVAL_HOLD_S if found else ENDED_HOLD_S), interval_s
        return interval_s

    @property
    def _window_s(self) -> float:
        return SCRAPES_PER_WINDOW * self._scrape_interval_s

    def _resolution(self, span: Span) -> tuple[float, str]:
        """Return the seconds between two points of a line, and the range of rates."""
        step_s = max(self._scrape_interval_s, (span.end_s - span.start_s) / max(1, span.points - 1))
        return step_s, f"{max(self._window_s, step_s):.0f}s"


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _key(labels: Labels, names: Key) -> Key:
    return labels.get(names[0], ""), labels.get(names[1], "")


def _findings(active: Vector, briefs: Vector) -> dict[str, tuple[Finding, ...]]:
    """Return active findings by run: each root, then its consequences. Exported are causes, shares and their advice."""
    found: dict[str, list[Finding]] = {}
    advised = {(labels.get("run"), labels.get("cause")): labels.get("advice") for labels, _ in briefs}
    for labels, ratio in active:
        run, cause = labels.get("run", ""), labels.get("cause", "")
        change, is_well = (rule.change, rule.all_is_well) if (rule := BY_CAUSE.get(cause)) else ("", False)
        advice = advised.get((run, cause)) or f"{change[:1].upper()}{change[1:]}"
        finding = Finding(
            cause=cause,
            severity="info" if is_well else "warning",
            title=cause.replace("_", " "),
            ratio=ratio,
            evidence=(),
            advice=f"{advice}{'. ' if advice else ''}The evidence is on the node's own page "
            "(gpuwatch dashboard), not in Prometheus.",
        )
        found.setdefault(run, []).append(finding)
    return {run: tuple(in_order(of_run)) for run, of_run in found.items()}


def _of_rank(findings: Sequence[Finding], rank: int, late_ratio: float | None) -> tuple[Finding, ...]:
    """Return a rank's findings. A straggler is late by `late_ratio` of a step; None: another rank is the straggler."""
    own = (finding for finding in findings if finding.cause != "straggler" or late_ratio is not None)
    return tuple(replace(f, rank=rank, ratio=late_ratio) if f.cause == "straggler" else f for f in own)


def _window(recent_s: Seconds, whole_s: Seconds, phases_s: Seconds, declared_s: Seconds, info: Labels) -> Window:
    """Return what a verdict is about: seconds by state of the last minute, or of the whole run once it is over.

    Single steps are not exported: the sum of each phase stands for them.
    """
    states_s = recent_s or whole_s
    data_wait, transfer, compute = ((phases_s.get(phase, 0.0),) for phase in ("data_wait", "transfer", "compute"))
    return Window(
        duration_s=sum(states_s.values()),
        states_s=states_s,
        declared_s=declared_s,
        timeline=info.get("timeline", "host"),
        device=info.get("device", "cpu"),
        steps=StepColumns(data_wait, transfer, compute, (False,)) if phases_s or not recent_s else StepColumns(),
    )


def _owner(labels: Labels) -> str | None:
    parts = [labels.get("user", ""), f"job {labels['job_id']}" if labels.get("job_id") else ""]
    return ", ".join(part for part in parts if part) or None


def _literal(scope: Scope) -> Scope:
    """Return a scope whose node's name is a regular expression: an IPv6 address has brackets."""
    literal = scope.instance and re.sub(r"([][])", r"\\\1", scope.instance)
    return Scope(scope.run, scope.rank, literal, scope.gpu)
