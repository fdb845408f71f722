"""`gpuwatch top`. `pages` makes lines of text out of `reading`'s facts, for the live screen (`app`, Textual) and for `--once`."""
