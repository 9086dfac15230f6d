package docker

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quicvpn/quicvpn/internal/dockerlab"
	"github.com/quicvpn/quicvpn/internal/netlab"
)

// A swarm's service runs on a quicvpn network. The kernel of the tests has no
// IPVS, which Docker's virtual addresses of services need: names stand for the
// containers themselves.
func TestSwarm(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.bareHost()
	h.createPlugin()
	h.must("plugin enable quicvpn")
	h.must("swarm init --advertise-addr 127.0.0.1")
	h.must("network create --config-only --subnet 172.31.0.0/24 here")
	h.must("network create -d quicvpn:latest --scope swarm --attachable --config-from here net")
	h.must("service create -d --name web --replicas 3 --endpoint-mode dnsrr --network net --no-resolve-image IMAGE serve")
	var tasks []string
	h.waitFor("three replicas", 30*time.Second, func() error {
		tasks = strings.Fields(h.must("ps -q --filter label=com.docker.swarm.service.name=web"))
		if len(tasks) != 3 {
			return fmt.Errorf("there are %d", len(tasks))
		}
		return nil
	})
	for _, task := range tasks {
		h.reaches(task)
		h.must("exec " + task + " /toolbox get http://web/")
		if in := h.look(task); len(in.Links) != 1 {
			t.Errorf("a replica has the links %+v, want one", in.Links)
		}
	}
	h.must("run --rm --network net IMAGE get http://tasks.web/")
	h.must("service rm web")
	h.waitEmpty()
	h.must("network rm net")
	h.waitState("no network", func(s state) bool { return len(s.Networks) == 0 })
	h.waitFor("the swarm gives the configuration back", 20*time.Second, func() error {
		_, err := h.try("network rm here")
		return err
	})
	h.must("swarm leave --force")
}

// Two hosts of a swarm and one gateway are one network: replicas reach each
// other on whichever host they run, and by the service's name.
func TestSwarmOfTwo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	uplink, _ := w.AddClient("other", netlab.LinkConfig{})
	var hosts []*host
	for i, uplink := range []*netlab.Iface{w.ClientIf, uplink} {
		h := &host{Engine: dockerlab.Start(t, uplink.NS, dockerlab.Config{}), w: w, name: uplink.NS.Name, uplink: uplink}
		h.createPlugin()
		h.must("plugin enable quicvpn")
		if address := uplink.Addresses()[0].Addr().String(); i == 0 {
			h.must("swarm init --advertise-addr " + address)
		} else {
			h.must("swarm join --advertise-addr " + address + " --token " + hosts[0].must("swarm join-token -q worker") + " " + hosts[0].uplink.Addresses()[0].Addr().String() + ":2377")
		}
		h.must(fmt.Sprintf("network create --config-only --subnet 172.31.%d.0/24 here", i))
		hosts = append(hosts, h)
	}
	hosts[0].must("network create -d quicvpn:latest --scope swarm --config-from here net")
	hosts[1].ScratchImage(w.ctx)
	hosts[0].must("service create -d --name web --replicas 2 --replicas-max-per-node 1 --endpoint-mode dnsrr --network net --no-resolve-image IMAGE serve")
	want := []string{"172.31.0.2", "172.31.1.2"}
	for i, h := range hosts {
		var task string
		h.waitFor("a replica and its name of the other", 60*time.Second, func() error {
			if task = h.must("ps -q --filter label=com.docker.swarm.service.name=web"); task == "" {
				return errors.New("there is no replica")
			}
			out, err := h.try("exec " + task + " /toolbox resolve web")
			if found := slices.Sorted(strings.FieldsSeq(out)); err == nil && !slices.Equal(found, want) {
				err = fmt.Errorf("the name stands for %q", found)
			}
			return err
		})
		h.reaches(task)
		if page := h.must("exec " + task + " /toolbox get http://" + want[1-i] + "/"); !strings.Contains(page, want[i]) {
			t.Errorf("the other replica was visited by %q, want %s", page, want[i])
		}
	}
}

// The engine does not give a swarm's networks to a plugin that it does not
// manage.
func TestSwarmNeedsManagedPlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.newHost(dockerlab.Config{})
	h.must("swarm init --advertise-addr 127.0.0.1")
	h.must("network create --config-only --subnet 172.31.0.0/24 here")
	h.refused("network create -d quicvpn --scope swarm --config-from here net", "legacy plugin")
	// Networks of this host alone are as ever.
	h.must("network create -d quicvpn --subnet 172.31.0.0/24 alone")
	h.must("run -d --name web --network alone IMAGE serve")
	h.reaches("web")
}
