#!/bin/sh
# Runs the tests in parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
# All parts run at the same time. They differ in priority, so that none takes the processors from the one before:
#   alone   those that measure time or take all cores, marked `alone`: two files at a time, at the priority that this script has.
#   shared  those that may share the machine: they mostly wait, so several files run at a time, also on two cores.
#   unit    tests/unit, which compute: two files at a time, so that none of two cores is idle when only these are left.
# What fails runs once more while nothing else does. A test that passes only then is listed: it may have a deadline
# that a loaded machine does not meet, or have found a fault that shows under load.
# $TEST_WORKERS: how many files at a time in `shared`, 6 unless set. $TEST_PRIORITY: `same` for all parts. Ends with 0 when all passed, with 5 when no part had a
# test, else with pytest's own status.
set -u

python=$1
shift

# first NAME NICE WORKERS [ARGUMENT …]: becomes pytest on one part.
first() {
    name=$1 nice=$2 workers=$3
    shift 3
    if [ "${TEST_PRIORITY:-}" = same ]; then nice=0; fi
    set -- "$python" -m pytest --part "$name" -o "cache_dir=.pytest_cache/$name" "$@" -n "$workers" --dist loadfile --no-loadscope-reorder
    if command -v setsid >/dev/null; then
        # Linux shares the processors between sessions by the sessions' priorities, whatever those of their processes are
        # (sched_autogroup). It refuses a second change within 0.1 s.
        exec setsid --wait sh -c '
            for try in 1 2 3; do (echo "$0" >"/proc/$$/autogroup") 2>/dev/null && break; sleep 0.2; done
            exec nice -n "$0" "$@"' "$nice" "$@"
    fi
    exec nice -n "$nice" "$@"
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

# signal_all SIGNAL: to the parts with all that they have started.
signal_all() {
    for pid in $pids; do kill -s "$1" -- "-$pid" 2>/dev/null || kill -s "$1" "$pid" 2>/dev/null; done
}

# end_all: ends the parts as Ctrl-C does, which does not reach other sessions.
end_all() {
    signal_all INT
    (sleep 10; signal_all TERM) >/dev/null 2>&1 </dev/null &
    wait $pids
    kill "$!" 2>/dev/null
}

logs=$(mktemp -d)
(first alone 0 2 "$@") >"$logs/alone" 2>&1 &
alone_pid=$!
(first unit 19 2 "$@") >"$logs/unit" 2>&1 &
unit_pid=$!
(first shared 5 "${TEST_WORKERS:-6}" "$@") &
shared_pid=$!
pids="$alone_pid $shared_pid $unit_pid"
trap 'end_all; rm -rf "$logs"' EXIT
trap 'exit 130' HUP INT TERM
wait "$shared_pid"
shared=$?
# Interrupted, or a usage error of pytest: the other parts would end the same way.
if [ "$shared" -eq 2 ] || [ "$shared" -eq 4 ]; then exit "$shared"; fi
wait "$alone_pid"
alone=$?
cat "$logs/alone"
wait "$unit_pid"
unit=$?
cat "$logs/unit"
trap 'rm -rf "$logs"' EXIT
again alone "$alone" "$@"
alone=$status
again shared "$shared" "$@"
shared=$status
again unit "$unit" "$@"

ends=5 # no test was selected, which is possible for each of the parts
for part in "$alone" "$shared" "$status"; do
    if [ "$part" -ne 5 ] && { [ "$ends" -eq 5 ] || [ "$ends" -eq 0 ]; }; then ends=$part; fi
done
if [ "$ends" -ne 0 ] && [ "$ends" -ne "$status" ]; then echo "run-tests.sh: tests of a part before failed, see above" >&2; fi
exit "$ends"
