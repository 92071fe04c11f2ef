#!/usr/bin/env bash
# What only a GPU can show: kernels, ranks, host synchronisations and overlap, in one table.
#
#   scripts/gpu_check.sh [--python PYTHON] [--quick] [--json FILE.json] [--time-limit SECONDS]
#
# PYTHON must import torch with CUDA; by default the active one where it does, else that of scripts/env.sh, which is
# made where it is not there. Exit code 1 where a check failed, 2 where there is no CUDA GPU and nothing was checked.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # a container with its own torch needs no install of this project
# As Megatron sets it before Blackwell, and the harder case for two communicators. CUDA reads it once, when it starts.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

sees_gpu() {
    "$1" -c 'import sys, rich, torch, megatron_mesh_cp.cli.gpu_check; sys.exit(not torch.cuda.is_available())' \
        >/dev/null 2>&1
}

python='' flags=()
while (($#)); do
    case $1 in
        --python)
            python=${2:?"--python needs an interpreter"}
            shift 2
            ;;
        --python=*)
            python=${1#*=}
            shift
            ;;
        *)
            flags+=("$1")
            shift
            ;;
    esac
done

if [[ -z $python ]]; then
    for candidate in python python3; do
        if command -v "$candidate" >/dev/null && sees_gpu "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
if [[ -z $python ]]; then
    # Without a driver no torch would see a GPU: no environment of 6 GB is made to learn that. /dev/dxg is WSL's.
    if [[ " ${flags[*]-} " != *" --device "* && ! -e /dev/nvidiactl && ! -e /dev/dxg ]]; then
        echo "gpu_check: no CUDA GPU on this machine (no NVIDIA driver); nothing was checked" >&2
        exit 2
    fi
    source "$root/scripts/env.sh"
    python=python
fi
exec "$python" -m megatron_mesh_cp.cli.gpu_check ${flags[@]+"${flags[@]}"}
