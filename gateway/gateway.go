// Package gateway is the server role: it authenticates clients, assigns
// addresses, routes between them and lets their packets out to the internet.
package gateway
