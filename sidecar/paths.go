package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
)

const (
	// pathsInterval is how often the file of the paths is written at most while a
	// session lasts: to lose some is no harm.
	pathsInterval = 10 * time.Minute
	// maxPathsFile is above what tunnel.Paths may hold.
	maxPathsFile = 512 << 10
)

// loadPaths reads what is known of the paths to gateways. It is a hint: without
// it, or if it is damaged, they are learned anew.
func (l *Link) loadPaths() {
	if l.cfg.PathFile == "" {
		return
	}
	text, err := readPaths(l.cfg.PathFile)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = json.Unmarshal(text, &l.paths)
	}
	if err != nil {
		l.cfg.Log.Warn("what is known of the paths to gateways cannot be used; it is learned anew", "file", l.cfg.PathFile, "error", err)
		return
	}
	l.stored = text
}

func readPaths(path string) ([]byte, error) {
	// O_NONBLOCK: a FIFO must not hang the start.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxPathsFile+1))
	if err == nil && len(text) > maxPathsFile {
		err = fmt.Errorf("it is larger than %d bytes", maxPathsFile)
	}
	return text, err
}

// savePaths writes what is known of the paths, if that has changed.
func (l *Link) savePaths() {
	if l.cfg.PathFile == "" {
		return
	}
	text, err := json.Marshal(&l.paths)
	if err == nil && (bytes.Equal(text, l.stored) || l.stored == nil && string(text) == "[]") {
		return
	}
	if err == nil {
		err = durable.Replace(l.cfg.PathFile, text)
	}
	if err == nil {
		l.stored = text
		return
	}
	if times, say := l.unsaved.say(err.Error(), time.Now()); say {
		l.cfg.Log.Warn("what is known of the paths to gateways is not stored: make its directory writable; sessions after a restart begin more slowly", "error", err, "times", times)
	}
}

// keepPaths saves the paths now and then, and when a session has ended.
func (l *Link) keepPaths(ctx context.Context) {
	tick := time.NewTicker(pathsInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.ended:
		case <-tick.C:
		}
		l.savePaths()
	}
}
