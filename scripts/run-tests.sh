#!/bin/sh
# Runs the tests in two parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
#   1. those that may share the machine: they mostly wait, so several files run at a time, also on two cores;
#   2. those that measure time or take all cores, marked `alone`: two files at a time, as these mostly wait too. What fails has
#      to pass while nothing else runs.
# $TEST_WORKERS: how many files at a time in the first part, 3 unless set. Ends with 0 when all passed, with 5 when neither part
# had a test, else with pytest's own status.
set -u

python=$1
shift

"$python" -m pytest --part shared -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
shared=$?
# Interrupted, or a usage error of pytest: the second part would end the same way.
if [ "$shared" -eq 2 ] || [ "$shared" -eq 4 ]; then exit "$shared"; fi

"$python" -m pytest --part alone "$@" -n 2 --dist loadfile --no-loadscope-reorder
alone=$?
if [ "$alone" -eq 1 ]; then
    "$python" -m pytest --part alone "$@" -n 0 --last-failed --last-failed-no-failures none
    alone=$?
fi

# 5: no test was selected, which is possible for one of the parts.
if [ "$shared" -eq 5 ]; then exit "$alone"; fi
if [ "$shared" -ne 0 ]; then
    echo "run-tests.sh: tests of the first part failed, see above" >&2
    exit "$shared"
fi
if [ "$alone" -eq 5 ]; then exit 0; fi
exit "$alone"
