#!/usr/bin/env bash
# Installs Debian's redis-server where it is missing and we may. Never fails: run_tests.py says what it cannot test
# without Redis, and goes on or fails (SCALEOUT_REQUIRE_REDIS).
set -uo pipefail

install_redis() {
    # Where no systemd runs, runlevel 1 keeps the package from starting a server of its own.
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    local apt=(timeout --foreground 600 apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 -qq)
    "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends redis-server
}

command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "redis-server is missing; apt-get installs it" >&2
    install_redis || echo "redis-server could not be installed" >&2
fi
exit 0
