#!/usr/bin/env bash
# From a fresh checkout to a trained model: environment, data set, three runs, a table and a plot.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec mesh-cp quickstart "$@"
