// Package dnsforward passes DNS messages on to the name servers of a host, and
// their answers back.
//
// It looks at a message's header and question and leaves the rest alone, so that
// records and options that it knows nothing of pass as well. It resolves nothing
// by itself, has no search list and no hosts file. It has no cache either: the
// name servers that it asks have one, near by, and know when an answer is stale.
// Names are not logged.
//
// It does not know how clients reach it, and how many may ask at once is for its
// callers to bound.
package dnsforward
