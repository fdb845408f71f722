"""The verdict as HTML: in a notebook, and as the page that is attached to a run in an experiment tracker. No script, no network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gpuwatch.formatting import percent
from gpuwatch.tools.reports.display import STATES

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report

_SHOWN = 0.001  # shares below it have no place in the bar, as in the text


def fragment(report: Report) -> str:
    """Return a bar of the states and the verdict's text, in the colours of the page that it is in."""
    shown = [(STATES[state], share) for state, share in report.shares.items() if share >= _SHOWN and state in STATES]
    bar = "".join(
        f'<i title="{escape(state.name)} {percent(share)}" '
        f'style="display:inline-block;height:100%;width:{100 * share:.2f}%;background:{state.colour}"></i>'
        for state, share in shown
    )
    key = " ".join(
        f'<span style="white-space:nowrap;margin-right:1em">'
        f'<i style="display:inline-block;width:.8em;height:.8em;background:{state.colour}"></i> '
        f"{escape(state.name)} {percent(share)}</span>"
        for state, share in shown
    )
    return (
        '<div class="gpuwatch" style="max-width:60em">'
        f'<div style="height:1.2em;white-space:nowrap;overflow:hidden;font-size:1em;line-height:0">{bar}</div>'
        f"<div>{key}</div>"
        f'<pre style="white-space:pre-wrap">{escape(str(report))}</pre></div>'
    )


def page(report: Report) -> str:
    """Return the same as a file."""
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><meta name="viewport" content="width=device-width">'
    return f"<!doctype html><html lang=en><head>{head}<title>{escape(report.name)} · gpuwatch</title></head><body>{fragment(report)}</body></html>"
