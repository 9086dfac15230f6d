# Everything here runs as root on a machine with Go and Debian's packages: the
# tests and the demo make network namespaces. They never touch the host's own
# network.

GO := $(shell command -v go || echo /usr/local/go/bin/go)
export PATH := $(dir $(GO)):$(PATH)
# A compiler is needed for the race detector alone.
export CGO_ENABLED := 0

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
UNIT := $$($(GO) list ./... | grep -v /e2e)
# What beside a Docker Engine has the race detector, too: lives and deaths of
# containers, drivers and engines.
DOCKER_RACE := Driver|Engine|Hosts|Lifecycle|OwnExit|Parallel|Publish|Reboot|Away
# Runs, not seconds: at the end of its time the fuzzer may call a run that it cut
# off a failure.
FUZZTIME ?= 20000x

# Where `make install` puts things; DESTDIR is for those who make packages.
PREFIX ?= /usr/local
UNITS = $(PREFIX)/lib/systemd/system
# Set where systemd runs the machine that is installed on.
SYSTEMD = $(if $(DESTDIR),,$(wildcard /run/systemd/system))
# A client of Docker's that builds with BuildKit: one with the plugin buildx, or
# else Debian's, which has it built in.
DOCKER ?= $(if $(shell docker buildx version 2>/dev/null),docker,/usr/bin/docker)
# Set where the image's binary is built here, which needs no network; empty where
# Docker builds it in its image of Go.
OFFLINE ?= $(if $(wildcard $(GO)),1)

.PHONY: all build image plugin install uninstall setup lint test e2e fuzz check demo demo-docker bench-tunnel bench-tun bench-flows bench-docker bench-socks bench-links clean

all: build

build:
	$(GO) build -trimpath -buildvcs=auto -ldflags='-s -w' -o bin/quicvpn .

# The image quicvpn:latest, of all roles.
image: $(if $(OFFLINE),build)
	$(if $(OFFLINE),mkdir -p dist && cp bin/quicvpn dist/)
	DOCKER_BUILDKIT=1 $(DOCKER) build $(if $(OFFLINE),--build-arg BIN_STAGE=prebuilt) -t quicvpn .

# The managed plugin quicvpn:latest; `docker plugin enable quicvpn` starts it.
plugin: build
	rm -rf dist/plugin
	mkdir -p dist/plugin/rootfs/var
	ln -s ../run dist/plugin/rootfs/var/run
	cp bin/quicvpn dist/plugin/rootfs/
	cp packaging/plugin.json dist/plugin/config.json
	@if $(DOCKER) plugin inspect quicvpn >/dev/null 2>&1; then \
		echo "quicvpn:latest is there already: $(DOCKER) plugin rm -f quicvpn, then make plugin again; containers run on" >&2; exit 1; fi
	$(DOCKER) plugin create quicvpn dist/plugin

# The binary, and the driver as a service of systemd's. Nothing is started.
install: build
	install -D -m 755 bin/quicvpn $(DESTDIR)$(PREFIX)/bin/quicvpn
	install -d $(DESTDIR)$(UNITS)
	sed 's|/usr/local/|$(PREFIX)/|' packaging/quicvpn-driver.service >$(DESTDIR)$(UNITS)/quicvpn-driver.service
ifneq ($(SYSTEMD),)
	systemctl daemon-reload
	@echo 'Docker networks: put a join token into /etc/quicvpn/token, then'
	@echo '    systemctl enable --now quicvpn-driver'
endif

# Leaves what is in /etc/quicvpn and /var/lib/quicvpn: tokens and keys.
uninstall:
ifneq ($(SYSTEMD),)
	-systemctl disable --now quicvpn-driver
endif
	rm -f $(DESTDIR)$(PREFIX)/bin/quicvpn $(DESTDIR)$(UNITS)/quicvpn-driver.service

# Debian's packages that tests, the demo and the benchmarks use.
setup:
	@sh internal/setup.sh

lint:
	@bad=$$(gofmt -l .); test -z "$$bad" || { echo "gofmt would change: $$bad"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags bench ./tunnel ./tunnel/internal/congestion/install
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
	CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(if $(RACE),-race -run '$(DOCKER_RACE)') -count=1 -parallel=4 -timeout=15m ./e2e/docker

# Every fuzz target, FUZZTIME each.
fuzz:
	@GO=$(GO) sh internal/fuzz.sh $(FUZZTIME)

# All of it; about twenty minutes on two cores. The end-to-end tests run twice: on
# the binary as users have it, and on one with the race detector.
check: setup lint build test e2e fuzz
	$(MAKE) e2e RACE=1

demo: setup build
	@$(GO) build -o bin/demo ./internal/demo
	@bin/demo bin/quicvpn

# On the machine's own Docker Engine; it needs no Debian package.
demo-docker: build
	@$(GO) build -o bin/demo ./internal/demo
	@$(GO) build -o bin/toolbox ./internal/dockerlab/toolbox
	@bin/demo -docker bin/toolbox bin/quicvpn

# QUICK=1 takes under 50 seconds.
bench-tunnel: setup build
	@cd internal/bench && $(GO) build -o ../../bin/bench-tunnel ./tunnel && \
		$(GO) build -o ../../bin/wireguard-go golang.zx2c4.com/wireguard
	@bin/bench-tunnel $(if $(QUICK),-quick) bin/quicvpn bin/wireguard-go

bench-tun: setup
	cd internal/bench && $(GO) run ./tun

# QUICK=1 takes under 50 seconds.
bench-flows: setup build
	@cd internal/bench && $(GO) build -o ../../bin/bench-flows ./flows
	@bin/bench-flows bin/quicvpn

# QUICK=1 takes under 50 seconds.
bench-docker: setup build
	@cd internal/bench && $(GO) build -o ../../bin/bench-docker ./docker
	@bin/bench-docker $(if $(QUICK),-quick) bin/quicvpn

# Over emulated links, in virtual time. QUICK=1 takes under 50 seconds.
bench-socks:
	@$(GO) test -tags bench -c -o bin/bench-sim ./tunnel
	@QUICK=$(QUICK) bin/bench-sim -test.run TestBenchSocks

# The same for the congestion control alone, whose package only tunnel may import.
# RUN='/picture' draws docs/far-link.svg only; all of it takes long.
bench-links:
	@$(GO) test -tags bench -c -o bin/bench-links ./tunnel/internal/congestion/install
	@QUICK=$(QUICK) bin/bench-links -test.timeout 5h -test.run 'TestBenchLinks$(RUN)'

clean:
	rm -rf bin dist
