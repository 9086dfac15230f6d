// Package gateway is the server role: it authenticates clients, assigns
// addresses, routes between the clients of a network, and lets their packets out
// to the internet.
//
// A packet's way, and the files in which it is decided:
//
//  1. A session hands over what its client sent (router_path.go). What is not
//     the client's own source is dropped.
//  2. A destination in the pools is another client of the same network, and
//     the packet goes straight to that session; or it is the gateway itself,
//     which answers pings (router_icmp.go); or it is refused.
//  3. So is one in a prefix that another client of the network has announced
//     (announce.go), unless the client's own token opens it. Any other
//     destination is looked up in the client's policy (policy.go). What that
//     refuses, but asks a name server, the gateway answers itself (names.go).
//  4. What may leave is written to the one TUN device. The kernel forwards and
//     masquerades it (egress*.go, nft*.go, sysctl*.go).
//  5. What the kernel hands to the TUN device goes to the session that owns the
//     destination.
//
// Who may join, and with which addresses, is a State's to know.
//
// The package does not speak QUIC (tunnel does), resolves no name by itself, and
// holds no proxy and no user interface.
package gateway
