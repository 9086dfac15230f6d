# The image of all roles: the static binary and nothing else.
#
#	docker build -t quicvpn .     the binary is built in Docker's Go image
#	make image                    with the Go of this machine, no network needed
#
# The gateway, the sidecar and the driver run as root, because Docker gives
# capabilities to no other user, but with few of root's powers: docs/docker.md
# has the least options of each. The other commands need no root: --user.
#
# There is no VOLUME: what a role keeps in /var/lib/quicvpn belongs on a volume
# with a name, not on one that Docker makes anew and forgets. There are no CA
# certificates: clients know the gateway by its key.

# The stage that the binary comes from: build, or prebuilt for dist/quicvpn.
# BuildKit does not touch the other one.
ARG BIN_STAGE=build

FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
	go build -trimpath -ldflags='-s -w' -o /quicvpn .

FROM scratch AS prebuilt
COPY dist/quicvpn /quicvpn

FROM $BIN_STAGE AS bin

FROM scratch
LABEL org.opencontainers.image.title="quicvpn" \
	org.opencontainers.image.description="Container networks through QUIC: gateway, sidecar and Docker network driver" \
	org.opencontainers.image.source="https://github.com/quicvpn/quicvpn" \
	org.opencontainers.image.documentation="https://github.com/quicvpn/quicvpn/blob/main/docs/docker.md" \
	org.opencontainers.image.licenses="Apache-2.0"
COPY --from=bin /quicvpn /quicvpn
ENTRYPOINT ["/quicvpn"]
