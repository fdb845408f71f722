"""What touches training: a watched loop, its recorder and its publisher."""
