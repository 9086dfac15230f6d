//go:build race

package docker

const raceEnabled = true
