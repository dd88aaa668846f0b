#!/bin/sh
# Install what the tests need from Debian, only what is missing. No service of these packages is left running or enabled.
set -eu
# PROGRAM:PACKAGE
NEEDED="prometheus:prometheus promtool:prometheus chromium:chromium munged:munge slurmctld:slurm-wlm slurmd:slurm-wlm sbatch:slurm-wlm"
SERVICES="prometheus munge slurmctld slurmd"
POLICY=${POLICY:-/usr/sbin/policy-rc.d} # asked by each package before it starts a service; 101: no
KEPT="$POLICY.kept"                     # the machine's own meanwhile
MARK="made by tests/system.sh"          # in the one of here: a run that was killed leaves it

packages=
for each in $NEEDED; do
    command -v "${each%:*}" >/dev/null || packages="$packages ${each#*:}"
done
packages=$(printf '%s\n' $packages | sort -u | tr '\n' ' ')
[ -n "${packages% }" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "make system: missing: ${packages% }. On Debian or Ubuntu run this as root: apt-get install --no-install-recommends ${packages% }" >&2
    echo "make system: elsewhere install what has the programs; the tests that need them are skipped without" >&2
    exit 1
fi
ours() { grep -qs "$MARK" "$POLICY"; }
put_back() {
    if ours; then rm -f "$POLICY"; fi
    if [ -e "$KEPT" ] || [ -L "$KEPT" ]; then mv -f "$KEPT" "$POLICY"; fi
}
trap put_back EXIT
trap 'exit 130' INT # dash leaves out what EXIT is to do if a signal ends it
trap 'exit 143' TERM HUP
if ! ours && { [ -e "$POLICY" ] || [ -L "$POLICY" ]; }; then mv -f "$POLICY" "$KEPT"; fi
printf '#!/bin/sh\n# %s\nexit 101\n' "$MARK" >"$POLICY"
chmod 755 "$POLICY"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends $packages
for each in $SERVICES; do
    if command -v systemctl >/dev/null; then
        systemctl --quiet disable "$each" 2>/dev/null || true # else it starts with the machine
    fi
done
