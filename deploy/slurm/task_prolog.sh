#!/bin/sh
# Slurm's TaskProlog: runs as the user before each task; a line "export NAME=value" becomes a part of the task's environment.
# Variables that the user has set are kept.
socket=${GPUWATCH_RUN_DIR:-/run/gpuwatch}/hook.sock

if [ -z "${GPUWATCH_ENDPOINT:-}" ] && [ -S "$socket" ]; then
    echo "export GPUWATCH_ENDPOINT=ipc://$socket"
fi
# The hook names a run by job and step (slurm-4711.0) on all nodes. After a requeue, the job is a separate run. A step
# within a step, and a job that a step submits, have the step's GPUWATCH_RUN, which no user has set.
case ${GPUWATCH_RUN:-} in
"" | slurm-[0-9]*.*-attempt-*)
    if [ -n "${SLURM_STEP_ID:-}" ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] 2>/dev/null; then
        echo "export GPUWATCH_RUN=slurm-$SLURM_JOB_ID.$SLURM_STEP_ID-attempt-$((SLURM_RESTART_COUNT + 1))"
    else
        echo "unset GPUWATCH_RUN"
    fi
    ;;
esac
exit 0
