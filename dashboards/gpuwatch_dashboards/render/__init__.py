"""Numbers as cards, charts and HTML: no Streamlit call, no I/O."""
