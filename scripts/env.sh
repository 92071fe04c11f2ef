# shellcheck shell=bash
# Sourced by the other scripts: creates or reuses their one Python environment and puts it first on PATH.
#
#   MESH_CP_VENV   folder of the environment; .venv in the checkout by default
#   MESH_CP_PYTHON interpreter to make it with; by default the first of 3.12 and 3.13 that really runs
#
# The stamp file is written last and holds a hash of what was installed: without the right stamp nothing that
# lies in the folder is trusted, and the install runs (again) over it.
# Failures exit by hand: after `source env.sh && ...` bash would not heed set -e in here.
set -euo pipefail

mesh_cp_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mesh_cp_venv=${MESH_CP_VENV:-$mesh_cp_root/.venv}
# Training needs a megatron-core with megatron.training; the torch range is what the tests have run with.
mesh_cp_packages=("megatron-core==0.19.2" "torch>=2.13,<2.15" "pydantic")
# Its Python (1 MB) for tests/te, which emulate the compiled part; pydantic above is what it needs. It goes into a folder
# of its own: from site-packages, without the compiled part, it would break every import of megatron.core.
mesh_cp_te="transformer-engine==2.20.2"

mesh_cp_fail() {
    echo "mesh-cp: $1" >&2
    exit 1
}

# Python 3.12 or 3.13 (megatron-core has no wheels for others) that can make an environment.
mesh_cp_python_runs() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
        >/dev/null 2>&1
}

# A name on PATH may be a pyenv shim that refuses to run, so pyenv's own interpreters are candidates too.
mesh_cp_find_python() {
    local pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv} minor candidate
    if [[ -n ${MESH_CP_PYTHON:-} ]]; then
        mesh_cp_python_runs "$MESH_CP_PYTHON" ||
            mesh_cp_fail "MESH_CP_PYTHON=$MESH_CP_PYTHON is no Python 3.12 or 3.13 that runs, with venv; unset it or name another"
        echo "$MESH_CP_PYTHON"
        return
    fi
    for minor in 3.12 3.13; do
        for candidate in "python$minor" "$pyenv/versions/$minor".*/bin/python; do
            if mesh_cp_python_runs "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    if mesh_cp_python_runs python3; then
        echo python3
        return
    fi
    mesh_cp_fail "no Python 3.12 or 3.13 that runs, with venv; install one (apt install python3.12-venv, or pyenv install 3.12) and start again"
}

mesh_cp_stamp() {
    {
        echo "$mesh_cp_root" "${mesh_cp_packages[@]}" "$mesh_cp_te"
        cat "$mesh_cp_root/pyproject.toml"
    } | cksum
}

mesh_cp_create() {
    local python
    if [[ ! -e $mesh_cp_venv/pyvenv.cfg ]]; then
        if [[ -d $mesh_cp_venv && -n $(ls -A "$mesh_cp_venv") ]]; then
            mesh_cp_fail "$mesh_cp_venv is not a Python environment and not empty; set MESH_CP_VENV to another folder or remove it"
        fi
    elif [[ -e $mesh_cp_venv/bin/python ]] && ! mesh_cp_python_runs "$mesh_cp_venv/bin/python"; then
        mesh_cp_fail "$mesh_cp_venv/bin/python is no Python 3.12 or 3.13 that runs; remove that environment and start again"
    fi
    if ! "$mesh_cp_venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(mesh_cp_find_python) || exit 1
        echo "mesh-cp: making $mesh_cp_venv with $("$python" --version)"
        "$python" -m venv "$mesh_cp_venv" || mesh_cp_fail "cannot make an environment in $mesh_cp_venv"
    fi
}

mesh_cp_install() {
    local info
    echo "mesh-cp: installing into $mesh_cp_venv; the first time this takes some minutes and about 6 GB"
    # pip writes INSTALLER last: a package without it was cut off, and pip would take it for installed.
    for info in "$mesh_cp_venv"/lib/python3.*/site-packages/*.dist-info; do
        [[ ! -d $info || -e $info/INSTALLER ]] || rm -rf "$info"
    done
    "$mesh_cp_venv/bin/python" -m pip install --disable-pip-version-check \
        -e "${mesh_cp_root}[test]" "${mesh_cp_packages[@]}" | { grep -v "^Requirement already satisfied" || true; } ||
        mesh_cp_fail "the install failed, see above; starting again goes on with it"
    rm -rf "$mesh_cp_venv/te"
    "$mesh_cp_venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
        --target "$mesh_cp_venv/te" "$mesh_cp_te" ||
        mesh_cp_fail "the install of $mesh_cp_te failed, see above; starting again goes on with it"
}

if [[ $(cat "$mesh_cp_venv/.mesh-cp-stamp" 2>/dev/null || true) != "$(mesh_cp_stamp)" ]]; then
    mkdir -p "$mesh_cp_venv"
    if command -v flock >/dev/null; then # two scripts started at once: the second waits for the first
        exec 9<"$mesh_cp_venv"
        flock 9
    fi
    if [[ $(cat "$mesh_cp_venv/.mesh-cp-stamp" 2>/dev/null || true) != "$(mesh_cp_stamp)" ]]; then
        mesh_cp_create
        mesh_cp_install
        mesh_cp_stamp >"$mesh_cp_venv/.mesh-cp-stamp"
    fi
    exec 9<&-
fi

mesh_cp_venv=$(cd "$mesh_cp_venv" && pwd) # the scripts change folder, and a relative PATH would not follow
export VIRTUAL_ENV=$mesh_cp_venv
export PATH=$mesh_cp_venv/bin:$PATH
