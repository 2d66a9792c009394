#!/usr/bin/env bash
# Installs Debian's redis-server where it is missing and we may; where we may not, says what to do and fails.
set -euo pipefail

command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "redis-server is missing; install it (Debian: apt-get install redis-server) and run this again" >&2
    exit 1
fi
echo "redis-server is missing; apt-get installs it" >&2
# Where no systemd runs, runlevel 1 keeps the package from starting a server of its own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt=(timeout --foreground 600 apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 -qq)
"${apt[@]}" update
"${apt[@]}" install -y --no-install-recommends redis-server
command -v redis-server >/dev/null
