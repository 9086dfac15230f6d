// Package netlab builds small networks out of Linux network namespaces for
// tests, the demo and benchmarks. Everything it makes goes away with the process.
package netlab
