"""From a window of facts to findings and a verdict. No I/O, no clock."""
