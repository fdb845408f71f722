#!/bin/sh
# Runs the tests in two parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
#   1. those that may share the machine: mostly they wait, so three files at a time, also on two cores;
#   2. those that measure time, marked `alone`: one after the other.
# Ends with pytest's status: 0 when all passed, 5 when no test was found in either part.
set -u

python=$1
shift

"$python" -m pytest --part shared -n 3 --dist loadfile --no-loadscope-reorder "$@"
shared=$?
# Interrupted, or asked for what pytest does not know: the second part would say the same again.
[ "$shared" -eq 2 ] || [ "$shared" -eq 4 ] && exit "$shared"

"$python" -m pytest --part alone "$@"
alone=$?

# 5: no test was chosen, which is as it should be for one of the parts.
[ "$shared" -eq 5 ] && exit "$alone"
[ "$alone" -eq 5 ] && exit "$shared"
[ "$shared" -ne 0 ] && exit "$shared"
exit "$alone"
