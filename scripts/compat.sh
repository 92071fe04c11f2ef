#!/usr/bin/env bash
# The tests marked `compat` with other versions of Python, torch, megatron-core and Transformer Engine, an environment
# each, and a table of the results; `scripts/compat.sh --list` shows the rows. See docs/compatibility.md.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec python "$mesh_cp_root/scripts/compat.py" "$@"
