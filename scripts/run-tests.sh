#!/bin/sh
# Runs the tests in parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
#   unit    tests/unit, which compute: in one process, which imports them once.
#   shared  at the same time those of the others that may share the machine: they mostly wait, so several files run at a time, also on
#           two cores.
#   alone   then those that measure time or take all cores, marked `alone`: two files at a time, as these mostly wait too.
# What fails runs once more while nothing else does. A test that passes only then is listed: it may have a deadline that a loaded
# machine does not meet, or have found a fault that shows under load.
# $TEST_WORKERS: how many files at a time in `shared`, 6 unless set. Ends with 0 when all passed, with 5 when no part had a
# test, else with pytest's own status.
set -u

python=$1
shift

# first NAME WORKERS [ARGUMENT …]: becomes pytest on one part.
first() {
    name=$1 workers=$2
    shift 2
    exec "$python" -m pytest --part "$name" -o "cache_dir=.pytest_cache/$name" "$@" -n "$workers" --dist loadfile --no-loadscope-reorder
}

# again NAME STATUS [ARGUMENT …]: runs once more what failed; the part's status is in $status.
again() {
    name=$1 status=$2
    shift 2
    if [ "$status" -ne 1 ]; then return; fi
    echo "run-tests.sh: tests of part '$name' failed in company, see above; once more, by themselves:"
    "$python" -m pytest --part "$name" -o "cache_dir=.pytest_cache/$name" "$@" -n 0 --last-failed --last-failed-no-failures none
    status=$?
    if [ "$status" -eq 0 ]; then echo "run-tests.sh: the failures of part '$name' passed by themselves"; fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
(first unit 0 "$@") >"$log" 2>&1 &
unit=$!
(first shared "${TEST_WORKERS:-6}" "$@")
shared=$?
# Interrupted, or a usage error of pytest: the other parts would end the same way.
if [ "$shared" -eq 2 ] || [ "$shared" -eq 4 ]; then
    kill -INT "$unit" 2>/dev/null
    wait "$unit"
    exit "$shared"
fi
wait "$unit"
unit=$?
cat "$log"
again unit "$unit" "$@"
unit=$status
again shared "$shared" "$@"
shared=$status
(first alone 2 "$@")
again alone $? "$@"

ends=5 # no test was selected, which is possible for each of the parts
for part in "$unit" "$shared" "$status"; do
    if [ "$part" -ne 5 ] && { [ "$ends" -eq 5 ] || [ "$ends" -eq 0 ]; }; then ends=$part; fi
done
if [ "$ends" -ne 0 ] && [ "$ends" -ne "$status" ]; then echo "run-tests.sh: tests of a part before failed, see above" >&2; fi
exit "$ends"
