#!/bin/sh
# Slurm's Epilog: runs as root on each node after a job. Removes the record of the job's GPUs, and the access to the socket that
# prolog.sh gave, if no other job of the user is on the node. The agent itself detects the end of the job's processes.
directory=${GPUWATCH_RUN_DIR:-/run/gpuwatch}
user=${SLURM_JOB_UID:-0}

rm -f "$directory/allocations/slurm-$SLURM_JOB_ID.json"
if [ "$user" != 0 ] && [ -d "$directory/jobs/$user" ]; then
    {
        flock 9
        rm -f "$directory/jobs/$user/$SLURM_JOB_ID"
        if rmdir "$directory/jobs/$user"; then
            setfacl -d -x "u:$user" "$directory"
            setfacl -x "u:$user" "$directory/hook.sock"
        fi
    } 9>"$directory/jobs/lock" 2>/dev/null
fi
exit 0
