# shellcheck shell=bash
# Sourced by the job scripts of this folder, once mesh_cp_home is known: the interpreter, the head, the port, srun.

say() { echo "mesh-cp: $1"; }
fail() {
    echo "mesh-cp: error: $1" >&2
    exit "${2:-2}"
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a job script: start it with sbatch"

if [[ -n ${MESH_CP_VENV:-} ]]; then
    python=$MESH_CP_VENV/bin/python
elif [[ -x $mesh_cp_home/.venv/bin/python ]]; then # as scripts/env.sh makes it
    python=$mesh_cp_home/.venv/bin/python
else
    python=python3
fi
if [[ -z ${MESH_CP_CONTAINER:-} ]] && ! command -v "$python" >/dev/null; then
    fail "no interpreter $python on $(hostname); set MESH_CP_VENV to the folder of an environment that every node sees"
fi
mesh_cp=("$python" -m megatron_mesh_cp.cli.main)
export PYTHONPATH=$mesh_cp_home${PYTHONPATH:+:$PYTHONPATH} # a container with its own torch needs no install

# Read once, when CUDA or NCCL starts: in the environment of every rank from its first instruction.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ -n ${MESH_CP_IFNAME:-} ]]; then
    export GLOO_SOCKET_IFNAME=$MESH_CP_IFNAME NCCL_SOCKET_IFNAME=$MESH_CP_IFNAME
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # also where this script runs
run_dir=${RUN_DIR:-${SLURM_SUBMIT_DIR:-$PWD}/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
[[ $run_dir == /* ]] || run_dir=${SLURM_SUBMIT_DIR:-$PWD}/$run_dir
export RUN_DIR=$run_dir

# A port is taken when something on this machine listens on it (state 0A).
port_is_taken() {
    local tables=(/proc/net/tcp)
    [[ ! -e /proc/net/tcp6 ]] || tables+=(/proc/net/tcp6)
    grep -qE "^ *[0-9]+: [0-9A-F]+:$(printf %04X "$1") [0-9A-F]+:0000 0A" "${tables[@]}"
}
# Below the ports that systems give to outgoing connections, which begin at 32768.
if [[ -n ${MASTER_PORT:-} ]]; then
    if [[ ! $MASTER_PORT =~ ^[1-9][0-9]*$ ]]; then
        fail "MASTER_PORT=$MASTER_PORT: must be a port number"
    elif port_is_taken "$MASTER_PORT"; then
        fail "MASTER_PORT=$MASTER_PORT is taken on $head; choose another, or unset it to have one found"
    fi
    port=$MASTER_PORT
else
    port=$((20000 + SLURM_JOB_ID % 10000))
    while port_is_taken "$port"; do
        port=$((port < 29999 ? port + 1 : 20000))
    done
fi
unset MASTER_PORT # torchrun hands its own to the ranks

# One task a node: what it may use is its whole share of the job, and binding it would bind all of its ranks to one core.
on_nodes=(srun "--nodes=${#nodes[@]}" "--ntasks=${#nodes[@]}" --ntasks-per-node=1 --cpu-bind=none)
# srun does not take this over from sbatch since SLURM 22.05, and would give the step one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_nodes+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
if [[ -n ${MESH_CP_CONTAINER:-} ]]; then # options of pyxis
    on_nodes+=("--container-image=$MESH_CP_CONTAINER")
    [[ -z ${MESH_CP_CONTAINER_MOUNTS:-} ]] || on_nodes+=("--container-mounts=$MESH_CP_CONTAINER_MOUNTS")
fi

# The names of the nodes of this job whose slurmd does not answer.
silent_nodes() {
    local node text addr port
    for node in "${nodes[@]}"; do
        text=$(timeout 30 scontrol show node -o "$node") || continue
        [[ $text =~ NodeAddr=([^ ]+) ]] && addr=${BASH_REMATCH[1]} || addr=$node
        if [[ $text =~ \ Port=([0-9]+) ]]; then
            port=${BASH_REMATCH[1]}
        else
            port=$(setting SlurmdPort)
        fi
        timeout 10 bash -c ': <"/dev/tcp/$0/$1"' "$addr" "${port:-6818}" 2>/dev/null || echo "$node"
    done
}

# A number of slurm.conf, as `scontrol show config` prints it.
setting() { timeout 30 scontrol show config | sed -nE "s/^$1 *= *([0-9]+).*/\1/p"; }
