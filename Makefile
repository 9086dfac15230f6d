# Everything here runs as root on a machine with Go and Debian's packages: the
# tests and the demo make network namespaces. They never touch the host's own
# network.

GO := $(shell command -v go || echo /usr/local/go/bin/go)
export PATH := $(dir $(GO)):$(PATH)
# A compiler is needed for the race detector alone.
export CGO_ENABLED := 0

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
UNIT := $$($(GO) list ./... | grep -v /e2e)
# Runs, not seconds: at the end of its time the fuzzer may call a run that it cut
# off a failure.
FUZZTIME ?= 20000x

.PHONY: all build setup lint test e2e fuzz check demo bench-tunnel bench-tun clean

all: build

build:
	$(GO) build -trimpath -buildvcs=auto -ldflags='-s -w' -o bin/quicvpn .

# Debian's packages that tests, the demo and the benchmarks use.
setup:
	@sh internal/setup.sh

lint:
	@bad=$$(gofmt -l .); test -z "$$bad" || { echo "gofmt would change: $$bad"; exit 1; }
	$(GO) vet ./...
	cd internal/bench && $(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	cd internal/bench && $(GO) run $(STATICCHECK) ./...

# The tests of all packages, with the race detector, those in namespaces of their
# own and the seeds of all fuzz targets too.
test: setup
	CGO_ENABLED=1 $(GO) test -race -count=1 -p 2 $(UNIT)
	cd internal/bench && CGO_ENABLED=1 $(GO) test -race -count=1 ./...

# The tests that run the binary as a user would. Most of their time they wait.
# With RACE=1 the binary has the race detector in it.
e2e: setup
	CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(if $(RACE),-race) -count=1 -parallel=8 -timeout=8m ./e2e

# Every fuzz target, FUZZTIME each.
fuzz:
	@GO=$(GO) sh internal/fuzz.sh $(FUZZTIME)

# All of it; about six minutes on two cores. The end-to-end tests run twice: on
# the binary as users have it, and on one with the race detector.
check: setup lint build test e2e fuzz
	$(MAKE) e2e RACE=1

demo: setup build
	@$(GO) build -o bin/demo ./internal/demo
	@bin/demo bin/quicvpn

# QUICK=1 takes under 50 seconds.
bench-tunnel: setup build
	@cd internal/bench && $(GO) build -o ../../bin/bench-tunnel ./tunnel && \
		$(GO) build -o ../../bin/wireguard-go golang.zx2c4.com/wireguard
	@bin/bench-tunnel $(if $(QUICK),-quick) bin/quicvpn bin/wireguard-go

bench-tun: setup
	cd internal/bench && $(GO) run ./tun

clean:
	rm -rf bin dist
