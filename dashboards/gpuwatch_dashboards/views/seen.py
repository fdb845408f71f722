"""Whether anybody looks at the page: a hidden tab of a browser asks for nothing, and is up to date as soon as it is shown."""

from __future__ import annotations

import streamlit as st

_JS = """
export default function ({ setStateValue }) {
  let told = false
  const tell = () => {
    if (document.hidden !== told) setStateValue("hidden", (told = document.hidden))
  }
  document.addEventListener("visibilitychange", tell)
  tell()
  return () => document.removeEventListener("visibilitychange", tell)
}
"""
_watched = st.components.v2.component("gpuwatch_seen", js=_JS)


def hidden() -> bool:
    """Return whether the tab is hidden; when that changes, the whole page runs again."""
    said = _watched(key="seen", height=1, default={"hidden": False}, on_hidden_change=lambda: None)
    return bool(said.hidden)
