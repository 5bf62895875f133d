#!/usr/bin/env bash
# Prometheus with promtool into the folder $1; Chromium, Node.js and bubblewrap onto the system: for tests of metrics, pages and
# sandboxes. Prometheus is unpacked, not installed: the package would start a service. Nothing is done where a tool is there. For Debian:
# Ubuntu's package chromium only leads to a snap, which is of no use in a container, and other systems have other packages. There
# this says what is missing and ends well; tests without a tool are skipped.
set -euo pipefail
bin=$(cd "$1" && pwd)

release=/etc/os-release
if ! command -v apt-get >/dev/null || ! grep -qx 'ID="\?debian"\?' "$release"; then
    echo "not Debian: install Chromium, Node.js, bubblewrap, prometheus and promtool by hand; tests without them are skipped" >&2
    exit 0
fi
updated=
update() {
    [ -n "$updated" ] || apt-get update -qq
    updated=1
}

if [ ! -x "$bin/prometheus" ] || [ ! -x "$bin/promtool" ]; then
    echo "Unpacking Prometheus into .venv/bin"
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    update
    (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg-deb -x prometheus_*.deb unpacked)
    install "$folder"/unpacked/usr/bin/{prometheus,promtool} "$bin"
fi
if ! command -v chromium >/dev/null; then
    echo "Installing Chromium"
    update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
if ! command -v bwrap >/dev/null; then
    echo "Installing bubblewrap"
    update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap libseccomp2 >/dev/null
fi
if ! command -v node >/dev/null; then
    echo "Installing Node.js"
    update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs >/dev/null
fi
