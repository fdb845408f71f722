"""The states of a GPU-second and their arithmetic. No I/O, no clock."""
