#!/bin/sh
# Runs every fuzz target of the module for the time given, one after the other.
set -eu

time=${1:?usage: fuzz.sh TIME}
go=${GO:-go}
packages=$("$go" list ./...)
for package in $packages; do
	listed=$("$go" test -list '^Fuzz' "$package")
	for target in $listed; do
		case $target in
		Fuzz*) "$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package" ;;
		esac
	done
done
