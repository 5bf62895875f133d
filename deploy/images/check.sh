#!/bin/bash
# make image-check: builds the verifier's image on a base made of Debian packages, and checks what is in it and that it runs.
# Needs root, a Debian mirror, mmdebstrap, buildah and podman; no registry. SERVICES="verifier actor trainer" for all three.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export SERVICES=${SERVICES:-verifier} ENGINE=buildah FLAVOUR=cpu REGISTRY=localhost
BASE_IMAGE=${BASE_IMAGE:-localhost/pipelinerl/base:bookworm}
for tool in buildah podman mmdebstrap; do
    command -v $tool >/dev/null || { echo "make image-check: $tool not found: apt install buildah podman runc mmdebstrap" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

buildah inspect --type image "$BASE_IMAGE" >/dev/null 2>&1 || deploy/images/local_base.sh "$BASE_IMAGE" >"$work/base.log" 2>&1 \
    || { cat "$work/base.log"; exit 1; }
volumes=$("$PYTHON" deploy/images/local_pip.py "$work")
export BASE_IMAGE PIP_CONF=$work/pip.conf
export BUILD_ARGS="--isolation ${ISOLATION:-chroot} --network host $volumes ${BUILD_ARGS:-}"
deploy/images/build.sh >"$work/build.log" 2>&1 || { tail -n 60 "$work/build.log"; exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PYTHONPATH=$PWD "$PYTHON" deploy/images/check_images.py --base "$BASE_IMAGE" --tag "${TAG:-$version}-cpu" $SERVICES
