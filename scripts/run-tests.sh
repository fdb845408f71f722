#!/bin/sh
# Runs the tests in two parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
#   1. those that may share the machine: they mostly wait, so several files run at a time, also on two cores;
#   2. those that measure time or take all cores, marked `alone`: two files at a time, as these mostly wait too.
# What fails runs once more while nothing else does. A test that passes only then is listed: it may have a deadline that a loaded
# machine does not meet, or have found a fault that shows under load.
# $TEST_WORKERS: how many files at a time in the first part, 3 unless set. Ends with 0 when all passed, with 5 when neither part
# had a test, else with pytest's own status.
set -u

python=$1
shift

# part NAME WORKERS [ARGUMENT …]: runs one part; its status is in $status.
part() {
    name=$1 workers=$2
    shift 2
    "$python" -m pytest --part "$name" "$@" -n "$workers" --dist loadfile --no-loadscope-reorder
    status=$?
    if [ "$status" -ne 1 ]; then return; fi
    echo "run-tests.sh: tests of part '$name' failed in company, see above; once more, by themselves:"
    "$python" -m pytest --part "$name" "$@" -n 0 --last-failed --last-failed-no-failures none
    status=$?
    if [ "$status" -eq 0 ]; then echo "run-tests.sh: the failures of part '$name' passed by themselves"; fi
}

part shared "${TEST_WORKERS:-3}" "$@"
shared=$status
# Interrupted, or a usage error of pytest: the second part would end the same way.
if [ "$shared" -eq 2 ] || [ "$shared" -eq 4 ]; then exit "$shared"; fi
part alone 2 "$@"

# 5: no test was selected, which is possible for one of the parts.
if [ "$shared" -eq 5 ]; then exit "$status"; fi
if [ "$shared" -ne 0 ]; then
    echo "run-tests.sh: tests of the first part failed, see above" >&2
    exit "$shared"
fi
if [ "$status" -eq 5 ]; then exit 0; fi
exit "$status"
