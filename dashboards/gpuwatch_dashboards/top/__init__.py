"""`gpuwatch top`: `pages` makes lines of text of `reading`'s facts, for `app` (Textual) and `--once`."""
