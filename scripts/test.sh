#!/usr/bin/env bash
# Linter, formatter and tests; arguments go to pytest, for instance: scripts/test.sh tests/cli -k recipe
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$mesh_cp_root"
ruff check .
ruff format --check .
exec python -m pytest "$@"
