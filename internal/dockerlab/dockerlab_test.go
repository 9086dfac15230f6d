package dockerlab

import (
	"context"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/netlab"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestEngine(t *testing.T) {
	ctx := testContext(t)
	start := time.Now()
	top := netlab.NewTopology(t, netlab.LinkConfig{})
	e := Start(t, top.Client, Config{})
	t.Log("start", time.Since(start))
	image := e.ScratchImage(ctx)
	t.Log("image", time.Since(start))
	e.Docker(ctx, "run", "-d", "--name", "web", image, "serve")
	t.Log("run", time.Since(start))
	t.Log(e.Sandbox(ctx, "web"))
	t.Log(e.Docker(ctx, "exec", "web", "/toolbox", "get", "http://127.0.0.1/"))
	t.Log(e.Docker(ctx, "info"))
	t.Log(e.TryDocker(ctx, "run", "--network", "nope", image, "serve"))
	t.Log("done", time.Since(start))
}
