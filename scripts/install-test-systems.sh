#!/usr/bin/env bash
# Debian packages that tests of several machines need: sshd, rsync and nft for hosts in network namespaces, a real Slurm, a false clock;
# and Chromium for pages.
# Where they cannot be had (no root, another system, no network) those tests say what they miss and are skipped.
set -uo pipefail
packages=(chromium faketime iproute2 iputils-ping munge nftables openssh-client openssh-server rsync shellcheck slurm-client slurm-wlm slurmctld slurmd)
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
	echo "no root or no apt-get: tests need ${packages[*]}" >&2
	exit 0
fi
missing=()
for package in "${packages[@]}"; do
	dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing+=("$package")
done
[[ ${#missing[@]} == 0 ]] && exit 0
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >/dev/null 2>&1; }
install || { timeout 120 apt-get update --quiet >/dev/null 2>&1 && install; } || echo "could not be installed: ${missing[*]}" >&2
exit 0
