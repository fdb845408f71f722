"""What all pages share: where numbers come from, links between the pages that keep the selection, and errors."""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import streamlit as st
from markupsafe import Markup

from gpuwatch.api import Run
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.panels import Panel
from gpuwatch_dashboards.query import Node, Scope, Span
from gpuwatch_dashboards.render.cards import PAGES, Card, card, figures
from gpuwatch_dashboards.render.charts import picked
from gpuwatch_dashboards.selection import key_of, select
from gpuwatch_dashboards.sources import SharedSource

CLOSER, CLOSEST_S = 8.0, 0.5  # a click shows an eighth of the time that was shown, and no less than half a second
AGAIN_S = 3.0  # a source that is away is asked again so soon, however seldom the page is drawn
_WANTED, _SHOWN, _LABELS, _ZOOMS, _AWAY, _TAB = "wanted_run", "shown_run", "labels", "zooms", "away", "seen"
LINK_PARAMS: Mapping[str, tuple[str, ...]] = {
    "live": ("node", "run", "rank", "window", "gpu", "from", "to", "more"),
    "run": ("node", "run", "rank", "from", "to"),
}
"""By page: which part of the selection a link to it carries."""


_tab = st.components.v2.component("gpuwatch_seen", js=Path(__file__).parents[1].joinpath("tab.js").read_text())
"""Sets `hidden` while the browser's tab is hidden and asks for nothing; the whole page runs again when that changes."""


@dataclass(frozen=True)
class Site:
    """Shared by all viewers, except `pages`, which Streamlit wants made for each."""

    source: SharedSource
    pages: Mapping[str, Any]


def draw_page(site: Site, body: Callable[[Site], None], every_s: float) -> None:
    """Draw a page now and, where it is seen, every `every_s`; with a message while its source is away."""
    was_away, is_hidden = bool(st.session_state.get(_AWAY)), st.session_state.get(_TAB, {}).get("hidden", False)

    def draw() -> None:
        is_away = False
        top = st.container(key="top", horizontal=True, vertical_alignment="center")
        top.html('<div class="gw-brand">gpuwatch</div>', width="content")
        try:
            body(site)
        except SourceError as error:  # at any point: what is drawn already stays above the message
            is_away = True
            st.html(PAGES.away(error))
        finally:
            with top:
                _links(site)
        if is_away != was_away and every_s > AGAIN_S:
            st.session_state[_AWAY] = is_away
            st.rerun()

    st.fragment(draw, run_every=None if is_hidden else min(every_s, AGAIN_S) if was_away else every_s)()
    with st.container(key="unseen"):  # after all else, so that no content waits for it
        _tab(key=_TAB, height=1, default={"hidden": False}, on_hidden_change=lambda: None)


def _links(site: Site) -> None:
    """Draw the links to the other pages; they carry what is selected, and the run that is shown."""
    run, _, rank = st.session_state.get(_SHOWN, "").rpartition("/")
    shown = {"run": run, "rank": rank} if run and st.query_params.get("run", run) == run else {}
    params = {**shown, **st.query_params.to_dict()}
    for key, page in site.pages.items():
        kept = {name: params[name] for name in LINK_PARAMS.get(key, ()) if name in params}
        st.page_link(page, label=page.title.removeprefix("gpuwatch "), query_params=kept or None)


def box(key: str, html: str) -> None:
    st.container(key=f"box-{key}").html(html)


def draw_cards(key: str, cards: Iterable[Card]) -> None:
    with st.container(key=key):
        for each in cards:
            draw_card(each)


def chosen_run(runs: Sequence[Run]) -> Run | None:
    """Return the run that the link names, else the one on the page while it runs, else the newest running."""
    run = select(runs, st.session_state.get(_SHOWN), st.query_params.get("run"), st.query_params.get("rank"))
    if run is not None:
        st.session_state[_SHOWN] = key_of(run)
    return run


def label_of(run: Run, rank: str = "") -> str:
    """Return a run's label: unique, and the same from then on, as Streamlit knows a choice by this text alone."""
    given: dict[str, str] = st.session_state.setdefault(_LABELS, {})
    if (key := f"{run.run}{rank}") not in given:
        label = f"{run.name or run.run}{rank} · {clock(run.started_s, '%d %b %H:%M:%S')}"
        given[key] = f"{label} · {run.run}" if label in given.values() else label
    return given[key]


def run_box(runs: Sequence[Run], run: Run) -> None:
    """Draw the choice of a run, when there is one, with a note when the link names one that is not known."""
    if len(runs) > 1:
        names = {key_of(each): label_of(each, f" · rank {each.rank}" if each.world_size > 1 else "") for each in runs}
        key = f"{_WANTED}-{key_of(run)}"  # a new box for another run, as in `choice` without a value in the session's state

        def chosen() -> None:
            """Put the choice into the address: a link to it, and what the next refresh goes by."""
            name, _, of_rank = st.session_state[key].rpartition("/")
            remember(run=name, rank=of_rank)
            go_to()  # the stretch was another run's

        st.selectbox(
            "Run",
            list(names),
            list(names).index(key_of(run)),
            format_func=lambda key: names.get(key, key),
            key=key,
            on_change=chosen,
            label_visibility="collapsed",
            width=420,
        )
    asked = st.query_params.get("run")
    if asked and asked not in (run.run, run.name):
        st.caption(f"The run in this link ({asked}) is not known here; this is another one.")


def remember(**params: str | None) -> None:
    """Put parts of the selection into the address; None takes one out."""
    selected = {**st.query_params.to_dict(), **params}
    st.query_params.from_dict({name: text for name, text in selected.items() if text is not None})


def go_to(start_s: float | None = None, end_s: float | None = None) -> None:
    """Put a stretch of time into the address; None: all of it."""
    remember(**{name: f"{at:.3f}" if at is not None else None for name, at in (("from", start_s), ("to", end_s))})


def choice(
    label: str, options: Sequence[str], param: str, default: str, key: str, name: Callable[[str], str] = str
) -> str:
    """Draw a choice that the address keeps as `param`; return the option. A choice of time ends one of a stretch."""
    asked = st.query_params.get(param)
    # not by the session's state: a value put there is sent to the browser once, and a quick refresh replaces it unseen
    show: dict[str, Any] = {"default": asked if asked in options else default, "required": True, "format_func": name}

    def changed() -> None:
        remember(**{param: st.session_state[key]})
        if param == "window":
            go_to()

    show |= {"label_visibility": "collapsed", "on_change": changed}
    return st.segmented_control(label, list(options), key=key, **show) or default


_CHART = inspect.signature(st.echarts_chart).parameters
"""This Streamlit's chart options. The last one for Python 3.10 has neither `alt` nor clicks: there the buttons zoom."""


def draw_card(card: Card) -> None:
    """Draw a card; where it has a stretch of time, a click on its chart zooms in at the moment under the pointer."""
    with st.container(key=card.key):
        st.html(card.head)
        if card.option is None:
            return
        start_s, end_s = card.stretch or (0.0, 0.0)
        # a new chart after each zoom: nothing is selected in it yet
        key = f"chart-{card.key}-{st.session_state.get(_ZOOMS, 0)}"

        def clicked() -> None:
            st.session_state[_ZOOMS] = st.session_state.get(_ZOOMS, 0) + 1
            for group in st.session_state[key].selection.selected:
                middle_s = picked(group["data_indices"][0], start_s, end_s)
                half_s = max(CLOSEST_S, (end_s - start_s) / CLOSER) / 2
                remember(window=None)
                go_to(middle_s - half_s, middle_s + half_s)

        more: dict[str, Any] = {"alt": card.spoken, **({"on_select": clicked} if card.stretch else {})}
        more = {name: value for name, value in more.items() if name in _CHART}
        st.echarts_chart({"animation": False, **card.option}, key=key, height=card.height_px, **more)


def draw_panels(site: Site, name: str, panels: Sequence[Panel], scope: Scope, span: Span, hold_s: float) -> None:
    """Draw panels of any kind: the stats as a line of figures, under it charts and tables on a grid."""

    def made() -> tuple[str, list[Card]]:
        titled = [replace(panel, title=panel.title.replace("$gpu", scope.gpu or "all")) for panel in panels]
        of_all, ranks = [panel for panel in titled if panel.all_ranks], replace(scope, rank=None)
        found = site.source.answers(of_all, ranks, span) if of_all else []
        found += site.source.answers([panel for panel in titled if not panel.all_ranks], scope, span)
        currency = site.source.currency()
        charts = [card(*each, span, currency=currency) for each in found if each[0].kind != "stat"]
        return figures(found, currency), charts

    key = ("panels", name, tuple(panel.key for panel in panels), scope, span)
    stats, cards = site.source.once.get(key, made, hold_s)
    if stats:
        box(name, stats)
    if cards:
        draw_cards(f"grid-{name}", cards)


def clock(time_s: float, form: str = "%H:%M:%S") -> str:
    """Return a Unix time in the reader's zone, e.g. "14:05:09"; browsers give the offset's opposite."""
    zone = timezone(timedelta(minutes=-(st.context.timezone_offset or 0)))
    return datetime.fromtimestamp(time_s, zone).strftime(form)


def foot(site: Site, node: Node | None = None, run: Run | None = None) -> Markup:
    """Return the small print, with the time in the reader's own zone."""
    return PAGES.foot(site.source.label, clock(time.time()), node, run)
