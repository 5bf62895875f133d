#!/bin/bash
# Builds the images with docker, buildah or podman, whichever is there. Its arguments are variables; docs/images.md describes them.
#   FLAVOUR=cpu REGISTRY=registry.example.org TAG=0.1.0 SERVICES="actor trainer" deploy/images/build.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
FLAVOUR=${FLAVOUR:-cuda}
SERVICES=${SERVICES:-actor trainer verifier}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TAG=${TAG:-$VERSION}
REVISION=${REVISION:-$(git rev-parse HEAD 2>/dev/null || true)}
PREFIX=${REGISTRY:+$REGISTRY/}pipelinerl

fail() { echo "make images: $1" >&2; exit 1; }

case $FLAVOUR in
cuda) suffix="" ;;
cpu) suffix=-cpu ;;
*) fail "FLAVOUR = '$FLAVOUR': use cuda or cpu" ;;
esac

for engine in ${ENGINE:-docker buildah podman}; do
    command -v "$engine" >/dev/null && break
    engine=""
done
[ -n "$engine" ] || fail "ENGINE: ${ENGINE:-docker, buildah and podman} not found; install one (Debian and Ubuntu: apt install buildah)"

for service in $SERVICES; do
    arguments=(--build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION" --build-arg "SOURCE=${SOURCE:-}")
    [ "$service" = verifier ] || arguments+=(--build-arg "FLAVOUR=$FLAVOUR")
    base=${BASE_IMAGE:-}
    if [ -z "$base" ] && [ "$FLAVOUR" = cpu ]; then
        base=$(sed -n 's/^ARG BASE_IMAGE=//p' services/verifier/Dockerfile)
    fi
    # BASE_IMAGE of a CUDA build is that of actor and trainer: the verifier needs no CUDA.
    if [ -n "$base" ] && ! { [ "$service" = verifier ] && [ "$FLAVOUR" = cuda ]; }; then
        arguments+=(--build-arg "BASE_IMAGE=$base")
    fi
    [ -z "${PIP_CONF:-}" ] || arguments+=(--secret "id=pip,src=$PIP_CONF")
    case $service in verifier) tags=("$TAG" "$TAG$suffix") ;; *) tags=("$TAG$suffix") ;; esac
    for tag in "${tags[@]}"; do arguments+=(--tag "$PREFIX/$service:$tag"); done
    # shellcheck disable=SC2206  # BUILD_ARGS is a list of words
    arguments+=(${BUILD_ARGS:-})
    echo "$engine: $PREFIX/$service:${tags[*]}"
    case $engine in
    docker) DOCKER_BUILDKIT=1 docker build "${arguments[@]}" --file "services/$service/Dockerfile" . ;;
    # The format that keeps what a Dockerfile says about health, shell and signals.
    *) "$engine" build --format docker --layers "${arguments[@]}" --file "services/$service/Dockerfile" . ;;
    esac
done
