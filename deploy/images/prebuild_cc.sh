#!/bin/sh
# In a build stage, which has gcc: compiles the one C file that each Triton under the environment in $1 wants compiled when a GPU
# is first used, and puts the results where prebuilt-cc, the final stage's CC, looks for them by the source's checksum.
# A GPU's own code is not C: Triton's assembler comes with it.
set -eu
environment=$1
store=$environment/lib/prebuilt-cc
mkdir -p "$store"
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
# The driver's library is on the node, not here: an empty one of its name to link with.
gcc -shared -fPIC -x c /dev/null -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1"

for source in "$environment"/lib/python3*/site-packages/*/backends/nvidia/driver.c; do
    [ -e "$source" ] || continue
    library=$store/$(sha256sum <"$source" | cut -d ' ' -f 1).so
    gcc "$source" -O3 -shared -fPIC -Wno-psabi -o "$library" -I"$(dirname "$source")/include" -I"$headers" \
        -L"$stub" -Wl,--no-as-needed -l:libcuda.so.1
    echo "compiled $source"
done
