#!/bin/sh
# Installs with apt what the tests use beyond Python: the real Prometheus, Alertmanager, browser, container engine, Slurm.
# As root on Debian or Ubuntu it installs what is missing, and only that. Elsewhere it lists what is missing; the tests
# that need it are skipped with the reason. Ends with 0 either way, and with 1 when an installation fails.
set -eu

# program:package. Tests check for the first field.
tools="
prometheus:prometheus
promtool:prometheus
prometheus-alertmanager:prometheus-alertmanager
amtool:prometheus-alertmanager
victoria-metrics:victoria-metrics
vmalert:victoria-metrics
chromium:chromium
docker:docker.io
dockerd:docker.io
docker-compose:docker-compose
mmdebstrap:mmdebstrap
iptables:iptables
slurmctld:slurmctld
munged:munge
slurmd:slurmd
srun:slurm-client
setfacl:acl
systemd-analyze:systemd
gcc:gcc
g++:g++
"

PATH=$PATH:/usr/sbin:/sbin
missing=
for tool in $tools; do
    program=${tool%%:*} package=${tool##*:}
    command -v "$program" >/dev/null 2>&1 && continue
    # The compose plugin replaces the stand-alone program, and a chromium of another name replaces Debian's.
    case $program in
    docker-compose) docker compose version >/dev/null 2>&1 && continue ;;
    chromium) command -v chromium-browser google-chrome >/dev/null 2>&1 && continue ;;
    esac
    case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
done
# C headers are checked by a file.
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"

[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "Not installed, and the tests that need them will skip:$missing" >&2
    echo "On Debian or Ubuntu: sudo scripts/install-test-tools.sh" >&2
    exit 0
fi

# Debian starts a package's service as it installs it. The tests start their own, so services are refused meanwhile
# (https://people.debian.org/~hmh/invokerc.d-policyrc.d-specification.txt) and not enabled for the next boot.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
echo "Installing for the tests:$missing" >&2
log=$(mktemp)
# shellcheck disable=SC2086  # the list is meant to be split
if ! {
    apt-get update -qq
    # From Debian 13 on, docker.io is the engine alone.
    case $missing in *docker.io*) if apt-cache show docker-cli >/dev/null 2>&1; then missing="$missing docker-cli"; fi ;; esac
    apt-get install -y -qq --no-install-recommends $missing
} >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "apt-get failed; its whole output is in $log" >&2
    exit 1
fi
rm -f "$log"

for service in prometheus prometheus-alertmanager prometheus-node-exporter victoria-metrics docker slurmctld slurmd munge; do
    case " $missing " in
    *" $service "* | *" $service.io "*)
        if [ -d /run/systemd/system ]; then
            systemctl disable --quiet "$service" 2>/dev/null || true
        fi
        ;;
    esac
done
