package gateway

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quicvpn/quicvpn/internal/durable"
)

// lockFile takes a lock that ends with the process or with Close. The file
// stays, because removing it would let two holders in.
func lockFile(dir, name string) (*os.File, error) {
	path := filepath.Join(dir, name)
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock gateway state: %w", err)
		}
		if err := durable.Lock(f); err != nil {
			f.Close()
			return nil, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if st.Nlink > 0 {
			return f, nil
		}
		f.Close() // an Init that failed removed it meanwhile
	}
}

// lockTokens waits for its turn to change tokens.json.
func lockTokens(dir string) (*os.File, error) {
	const patience, pause = 10 * time.Second, 5 * time.Millisecond
	for range patience / pause {
		f, err := lockFile(dir, tokensLock)
		if !errors.Is(err, durable.ErrLocked) {
			return f, err
		}
		time.Sleep(pause)
	}
	return nil, fmt.Errorf("another quicvpn process has held %s for %s: end it and try again",
		filepath.Join(dir, tokensLock), patience)
}
