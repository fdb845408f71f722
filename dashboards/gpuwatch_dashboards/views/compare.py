"""The page "Compare": two or more runs against the first of them, and whether what was predicted came true."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from gpuwatch.api import Run
from gpuwatch_dashboards.render import compare
from gpuwatch_dashboards.render.markup import PAGES
from gpuwatch_dashboards.selection import chosen
from gpuwatch_dashboards.views.site import Site, draw_card, foot, redrawn, remember, top_bar

EVERY_S = 15.0
MOST_RUNS = 6
PARAM = "runs"
_CHOICE = "compared_runs"


def page(site: Site) -> None:
    """Draw the page, now and then every fifteen seconds."""
    redrawn(_compare, site, EVERY_S)


def _compare(site: Site) -> None:
    runs = site.source.kept_runs()
    top_bar(site, chosen(st.query_params))
    firsts = compare.first_ranks(runs)
    if len(firsts) < 2:
        st.html(PAGES.too_few_to_compare(len(firsts)))
        return
    wanted = _choice(firsts)
    if len(wanted) < 2:
        st.html(PAGES.nothing("Choose a second run: the first one is what the others are compared with."))
        return
    base, *others = [site.source.report(run) for run in wanted]
    drawn = site.once.get(
        ("compare", *((r.run, r.generated_s) for r in (base, *others))), lambda: compare.content(base, others)
    )
    for number, outcome in enumerate(drawn.outcomes):
        with st.container(key=f"box-outcome-{number}"):
            st.html(outcome)
    with st.container(key="grid-two"):
        for card in (drawn.speeds, drawn.steps):
            draw_card(card)
    with st.container(key="box-shares"):
        st.html(drawn.shares)
    st.html(foot(site))


def _choice(firsts: Sequence[Run]) -> list[Run]:
    """Draw the choice of runs; return those chosen, the one to compare with first."""
    by_key = {run.run: run for run in firsts}
    if _CHOICE not in st.session_state:
        asked = [key for key in (st.query_params.get(PARAM) or "").split(",") if key in by_key]
        st.session_state[_CHOICE] = asked or [run.run for run in compare.newest_two(firsts)]
    known = [key for key in st.session_state[_CHOICE] if key in by_key]
    if known != st.session_state[_CHOICE]:
        st.session_state[_CHOICE] = known
    names = st.multiselect(
        "Runs to compare; the first is what the others are compared with",
        list(by_key),
        format_func=lambda key: compare.label_of(by_key[key]) if key in by_key else key,
        key=_CHOICE,
        max_selections=MOST_RUNS,
        on_change=lambda: remember(**{PARAM: ",".join(st.session_state[_CHOICE]) or None}),
    )
    return [by_key[key] for key in names]
