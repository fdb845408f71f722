#!/bin/sh
# Slurm's Prolog: runs as root on each node before a job. Records the job's GPUs for the agent, and lets the job's user write
# to the agent's socket, so that users need not be members of the group `gpuwatch`. The directory's default entry is for the
# socket of an agent that is started again.
#
# Needs setfacl (Debian: acl) and a group `gpuwatch`, which may be empty: without it only root can use the socket. Always exits
# with 0, because a failing prolog drains its node, and training works without an agent.
directory=${GPUWATCH_RUN_DIR:-/run/gpuwatch}
user=${SLURM_JOB_UID:-0}

# For a MIG instance, SLURM_JOB_GPUS has no number of a device file; its UUID is in CUDA_VISIBLE_DEVICES.
gpus=${SLURM_JOB_GPUS:-}
case ${CUDA_VISIBLE_DEVICES:-} in *MIG-*) gpus=$CUDA_VISIBLE_DEVICES ;; esac

# Escaped for JSON: winbind has users such as DOMAIN\alice.
text() {
    printf '%s' "$1" | sed 's/[\\"]/\\&/g'
}

# The folder is created by the first job, even one without GPUs: from then on, a GPU without a job is known to be free.
if [ -d "$directory" ] && mkdir -p "$directory/allocations" && [ -n "$gpus" ]; then
    file=$directory/allocations/slurm-$SLURM_JOB_ID.json
    printf '{"gpus": ["%s"], "job": "%s", "user": "%s", "account": "%s"}\n' \
        "$gpus" "$SLURM_JOB_ID" "$(text "${SLURM_JOB_USER:-}")" "$(text "${SLURM_JOB_ACCOUNT:-}")" >"$file.new" &&
        mv "$file.new" "$file"
fi

if [ "$user" != 0 ] && [ -d "$directory" ] && mkdir -p "$directory/jobs"; then
    {
        flock 9
        mkdir -p "$directory/jobs/$user"
        : >"$directory/jobs/$user/$SLURM_JOB_ID"
        setfacl -d -m "u:$user:rw,g::rw" "$directory" || logger -t gpuwatch "$directory: setfacl failed"
        [ -S "$directory/hook.sock" ] && setfacl -m "u:$user:rw" "$directory/hook.sock"
    } 9>"$directory/jobs/lock"
fi
exit 0
