#!/usr/bin/env bash
# Ring, tiles and Transformer Engine's ring on network namespaces with rate-limited links. Needs root; --help says more.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export PYTHONPATH=$mesh_cp_root/scripts${PYTHONPATH:+:$PYTHONPATH}
exec python -m netbench "$@"
