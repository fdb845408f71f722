"""The page "Live": one run's verdict, where its time goes, what to do about it, and the node's GPUs. Redraws itself."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st

from gpuwatch.api import Run
from gpuwatch_dashboards import selection
from gpuwatch_dashboards.panels import BY_KEY, GPU_STATES, GROUPS, Panel, live_panels
from gpuwatch_dashboards.query import Node, Scope, Span
from gpuwatch_dashboards.render import cards
from gpuwatch_dashboards.render.cards import PAGES, Card
from gpuwatch_dashboards.views import site as parts
from gpuwatch_dashboards.views.site import Site

EVERY_S = 2.0
ALL_GPUS = "all"
LEAST_HOLD_S, MOST_HOLD_S = 1.0, 30.0
"""Charts are redrawn when their stretch of time moves; those of a fixed one after half a minute at most."""
TOP, TOP_HEIGHT_PX = BY_KEY["ledger"], 300
TABLE_POINTS = 12  # of the GPUs' states, for the mean over the time shown
SMALL_POINTS = 160  # a small chart is some 400 px wide: more points than this fall on each other
MORE_HOLD_S = 15.0
_MORE = "more_panels"


@dataclass(frozen=True)
class _Shown:
    """What the page is about, and over which stretch of time."""

    runs: Sequence[Run]
    run: Run | None
    node: Node
    gpu: str | None  # index of the GPU that the charts are narrowed to; None: all of them
    span: Span

    @property
    def scope(self) -> Scope:
        if self.run is None:
            return Scope(instance=self.node.instance)
        return Scope(self.run.run, str(self.run.rank), self.run.instance)

    @property
    def small(self) -> Span:
        return replace(self.span, points=min(self.span.points, SMALL_POINTS))

    @property
    def hold_s(self) -> float:
        return min(MOST_HOLD_S, max(LEAST_HOLD_S, (self.span.end_s - self.span.start_s) / self.span.points))


def page(site: Site) -> None:
    params, stretch = st.query_params, selection.stretch_of(st.query_params)
    asked = params.get("node")
    runs = selection.in_order(site.source.runs(asked, params.get("run")))
    # of a run that spans nodes, the ranks of the named node
    here = [run for run in runs if asked in (None, run.instance)] or runs
    run = parts.chosen_run(here)
    node = site.source.node(run, asked)
    if run is None and not node.gpus:
        st.html(PAGES.no_runs(node) + parts.foot(site, node))
        return
    with st.container(key="choices", horizontal=True, vertical_alignment="center"):
        if run is not None:
            parts.run_box(here, run)
        window = parts.choice("Time range", list(selection.WINDOWS_S), "window", selection.DEFAULT_WINDOW, "window")
        if stretch is not None:
            st.button("Back to now", on_click=parts.go_to)
    now_s = float(int(time.time()))
    gpu = next((each.gpu for each in node.gpus or () if each.gpu == params.get("gpu")), None)
    span = selection.span_between(*stretch) if stretch else selection.span_of(run, selection.WINDOWS_S[window], now_s)
    if stretch is None and (run is None or run.status == "running"):
        span = selection.settled(span)
    shown = _Shown(runs, run, node, gpu, span)
    # in this order: what is drawn is on its way to the reader while the next part is fetched and made
    if run is not None:
        st.container(key="verdict").html(cards.verdict(run))
    else:
        st.html(PAGES.no_runs(node, short=True))
    _top(site, shown, now_s)
    _rest(site, shown)
    _more(site, shown)
    st.html(parts.foot(site, node, run))


def _top(site: Site, shown: _Shown, now_s: float) -> None:
    run, node, source = shown.run, shown.node, site.source

    def ledger() -> Card:
        """Return where the run's time goes: the one chart that is drawn before all others."""
        [(panel, values)] = source.answers(selection.run_panels(run, [TOP]), shown.scope, shown.span)
        return cards.card(panel, values, shown.span, TOP_HEIGHT_PX, zoom=True)

    found = (*cards.findings_of(shown.runs, run), *node.findings)
    with st.container(key="grid-top"):
        if run is not None:
            parts.draw_card(source.once.get(("ledger", shown.scope, shown.span), ledger, shown.hold_s))
        head = PAGES.findings_head(run is not None and bool(selection.concluded(run)))
        parts.box("findings", head + cards.findings(found, now_s, run is None or run.status == "running"))
    if run is None:
        return
    here = [each for each in shown.runs if each.instance == run.instance]
    if runs := cards.run_table(here, run):
        parts.box("runs", PAGES.panel_head(f"Runs on {node.host}", "Which one needs attention?") + runs)
    if ranks := cards.rank_table(cards.ranks_of(here, run), run):
        parts.box("ranks", PAGES.panel_head("Ranks", "Which rank loses most, and do the others wait for it?") + ranks)


def _at_once(group: str) -> list[Panel]:
    """Return the charts of a group that are drawn without "More panels"."""
    return [panel for panel in live_panels(group) if not panel.more and panel.kind != "stat" and panel.key != TOP.key]


def _rest(site: Site, shown: _Shown) -> None:
    """Draw the table and charts of the GPUs (of one if one is chosen), and all other charts."""
    gpus, of_node = shown.node.gpus, replace(shown.scope, run=None, rank=None)
    if gpus:
        span = replace(shown.span, points=TABLE_POINTS)
        key = ("states", of_node, span)
        [states] = site.source.once.get(key, lambda: site.source.evaluate([GPU_STATES], of_node, span), shown.hold_s)
        head = PAGES.panel_head(f"GPUs of {shown.node.host}", "What does each do now, and where did its time go?")
        parts.box("gpus", head + cards.gpu_table(gpus, states, shown.runs))
        if len(gpus) > 1:
            names = {ALL_GPUS: "All GPUs", **{each.gpu: f"GPU {each.gpu}" for each in gpus}}
            parts.choice("GPUs in the charts below", [*names], "gpu", ALL_GPUS, "gpu_choice", names.__getitem__)
        parts.draw_panels(site, "gpu", _at_once("gpu"), replace(of_node, gpu=shown.gpu), shown.small, shown.hold_s)
    others = [*(_at_once("run") if shown.run is not None else []), *_at_once("node"), *_at_once("agent")]
    parts.draw_panels(site, "charts", selection.run_panels(shown.run, others), shown.scope, shown.small, shown.hold_s)


def _more(site: Site, shown: _Shown) -> None:
    """Draw, when asked for, the other panels of all groups: details, and what only Prometheus can answer."""

    def changed() -> None:
        parts.remember(more="1" if st.session_state[_MORE] else None)

    if not st.toggle("More panels", st.query_params.get("more") == "1", key=_MORE, on_change=changed):
        return
    there = {"run": shown.run is not None, "gpu": bool(shown.node.gpus), "node": True, "agent": True}
    for group in (name for name, is_there in there.items() if is_there):
        drawn = {TOP.key, *(panel.key for panel in _at_once(group))}
        others = selection.run_panels(shown.run, [panel for panel in GROUPS[group] if panel.key not in drawn])
        scope = shown.scope if group == "run" else replace(shown.scope, run=None, rank=None, gpu=shown.gpu)
        parts.draw_panels(site, f"more-{group}", others, scope, shown.small, MORE_HOLD_S)
