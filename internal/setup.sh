#!/bin/sh
# Installs the Debian packages that the tests, the demo and the benchmarks use,
# where they are missing. Nothing is asked, and nothing is downloaded when all
# is there.
set -eu

missing=
need() { # PROGRAM PACKAGE...
	program=$1
	shift
	PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null 2>&1 || missing="$missing $*"
}
need iperf3 iperf3
need curl curl
need ip iproute2
need tc iproute2
need nft nftables
need iptables iptables
need setpriv util-linux
need git git
need systemd-analyze systemd
need gcc gcc libc6-dev # the race detector
[ -x /usr/bin/docker ] || missing="$missing docker.io" # another docker may come first
need containerd containerd
need runc runc
need mmdebstrap mmdebstrap
need proxychains4 proxychains4
need socksify dante-client
[ -e /usr/lib/python3/dist-packages/socks.py ] || missing="$missing python3 python3-socks"
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "setup: these packages are needed: install$missing" >&2
	exit 1
fi
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The tests start Docker Engines of their own; the machine's is not wanted.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	trap 'rm -f "$log" $policy' EXIT
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
fi
install() {
	# Since Debian 13 the client has a package of its own.
	case $missing in *docker.io*) apt-cache show docker-cli >/dev/null 2>&1 && missing="$missing docker-cli" ;; esac
	# shellcheck disable=SC2086 # a list of names
	apt-get install -y --no-install-recommends $missing
}
if ! { apt-get update && install; } >"$log" 2>&1; then
	cat "$log" >&2
	exit 1
fi
