#!/bin/sh
# Installs the CPU build of the torch that a requirements file pins: from where pip looks anyway, else from PyTorch's own index.
# It asks for the build by its local version `+cpu`: a plain version is met by the CUDA build too, which takes gigabytes.
#   install_torch.sh requirements/cpu.txt .venv/bin/python [options of pip install]
# TORCH_INDEX names another index than PyTorch's, such as a mirror of it.
set -eu
version=$(sed -n 's/^torch==//p' "$1")+cpu
python=$2
shift 2
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

installed="import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$version')"
if "$python" -c "$installed" 2>/dev/null; then exit 0; fi

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
if "$python" -m pip install --no-deps "$@" "torch==$version" 2>"$errors"; then
    echo "torch $version: found where pip looks anyway"
elif "$python" -m pip install --no-deps --index-url "$index" "$@" "torch==$version" 2>>"$errors"; then
    echo "torch $version: found at $index"
else
    cat "$errors" >&2
    echo "torch $version: neither where pip looks anyway nor at $index. Name an index that has it: TORCH_INDEX=https://..." >&2
    exit 1
fi
