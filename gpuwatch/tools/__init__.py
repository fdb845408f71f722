"""What a user starts by hand: doctor, tune, stacks, reports."""
