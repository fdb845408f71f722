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


_KEY = "seen"


def is_hidden() -> bool:
    """Return whether the tab is hidden, as `watch_tab` was told; when that changes, the whole page runs again."""
    return bool(st.session_state.get(_KEY, {}).get("hidden"))


def watch_tab() -> None:
    """Put the watch on the page: after all else, so that nothing that is to be read waits for it."""
    with st.container(key="unseen"):
        _watched(key=_KEY, height=1, default={"hidden": False}, on_hidden_change=lambda: None)
