#!/bin/sh
# Runs the tests in parts, with any arguments of pytest:  scripts/run-tests.sh PYTHON [-k hook …]
#   unit    tests/unit, which compute: two files at a time, all along with what the others leave of the processors.
#   shared  those of the others that may share the machine: they mostly wait, so several files run at a time, also on two cores.
#   alone   after these, those that measure time or take all cores, marked `alone`: three files at a time, as these mostly wait too;
#           one where other programs have a processor, as a second file would take the time that the first one measures.
# What fails in `alone` runs once more while nothing else does, as a machine has other work at times. A test that passes only then is
# listed. In the other parts no test depends on the machine's load: what fails there has failed.
# $TEST_WORKERS and $ALONE_WORKERS: how many files at a time in `shared`, 6 unless set, and in `alone`. Ends with 0 when all passed, with 5
# when no part had a test, else with pytest's own status.
set -u

python=$1
shift

# first NAME WORKERS [ARGUMENT …]: becomes pytest on one part.
first() {
    name=$1 workers=$2
    shift 2
    set -- "$python" -m pytest --part "$name" -o "cache_dir=.pytest_cache/$name" "$@" -n "$workers" --dist loadfile --no-loadscope-reorder
    if [ "$name" = unit ] && command -v setsid >/dev/null; then
        # Linux shares the processors evenly between sessions, whatever the priorities of their processes (sched_autogroup): of a session
        # of its own, the priority counts.
        exec setsid --wait sh -c '(echo 19 >"/proc/$$/autogroup") 2>/dev/null; exec nice -n 19 "$@"' unit "$@"
    fi
    exec "$@"
}

# quiet: whether other programs leave most of the processors' time for three seconds. What runs at a low priority, as `unit` does, gives
# way, and does not count.
quiet() {
    before=$(busy) && sleep 3 && [ "$(($(busy) - before))" -le "$((2 * $(getconf CLK_TCK)))" ]
}

# busy: time since boot that the processors had for programs of normal priority, for the kernel and for other machines, in clock ticks.
busy() {
    [ -r /proc/stat ] && read -r _ user _ system _ _ interrupts software stolen _ </proc/stat && echo $((user + system + interrupts + software + stolen))
}

# On a new clone nothing is compiled yet, and each process of the parts would compile the same modules, torch's among them, at the same time.
if [ -d tests ] && [ ! -d tests/__pycache__ ] && [ -z "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    "$python" -c "import torch._dynamo, streamlit.web.bootstrap" &
    "$python" -m pytest --part shared --collect-only -q "$@"
    wait
fi >/dev/null 2>&1

log=$(mktemp)
(first unit 2 "$@") >"$log" 2>&1 &
unit_pid=$!
trap 'kill "$unit_pid" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
(first shared "${TEST_WORKERS:-6}" "$@")
shared=$?
# Interrupted, or a usage error of pytest: the other parts would end the same way.
if [ "$shared" -eq 2 ] || [ "$shared" -eq 4 ]; then exit "$shared"; fi
if [ -z "${ALONE_WORKERS:-}" ]; then ALONE_WORKERS=1 && quiet && ALONE_WORKERS=3; fi
(first alone "$ALONE_WORKERS" "$@")
alone=$?
wait "$unit_pid"
unit=$?
cat "$log"
if [ "$alone" -eq 1 ]; then
    echo "run-tests.sh: tests of part 'alone' failed in company, see above; once more, by themselves:"
    "$python" -m pytest --part alone -o cache_dir=.pytest_cache/alone "$@" -n 0 --last-failed --last-failed-no-failures none
    alone=$?
    if [ "$alone" -eq 0 ]; then echo "run-tests.sh: the failures of part 'alone' passed by themselves"; fi
fi

ends=5 # no test was selected, which is possible for each of the parts
for part in "$unit" "$shared" "$alone"; do
    if [ "$part" -ne 5 ] && { [ "$ends" -eq 5 ] || [ "$ends" -eq 0 ]; }; then ends=$part; fi
done
if [ "$ends" -ne 0 ] && [ "$ends" -ne "$alone" ]; then echo "run-tests.sh: tests of a part before failed, see above" >&2; fi
exit "$ends"
