#!/bin/sh
# Runs every fuzz target of the module, one after the other, for a time (30s) or a
# number of runs (1000x).
set -eu

time=${1:?usage: fuzz.sh TIME}
go=${GO:-go}
packages=$("$go" list ./...)
for package in $packages; do
	listed=$("$go" test -list '^Fuzz' "$package")
	for target in $listed; do
		case $target in
		Fuzz*) "$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 10x "$package" ;;
		esac
	done
done
