#!/bin/sh
# Debian's Prometheus, for tests/ops/test_prometheus.py: the programs, not the service, which would take a port and stay.
set -e
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -q
apt-get install -y -q --no-install-recommends prometheus
