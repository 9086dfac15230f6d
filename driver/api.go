package driver

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/docker/go-plugins-helpers/sdk"
)

// The remote driver protocol of libnetwork: a POST for each call, JSON both
// ways. What a call gets and answers is named as in libnetwork's
// drivers/remote/api. Go's decoder leaves out what is not named here.

const manifest = `{"Implements": ["NetworkDriver"]}`

// maxRequest bounds a call's body; a port map of 65,535 ports fits.
const maxRequest = 16 << 20

// networkRequest is CreateNetwork and DeleteNetwork.
type networkRequest struct {
	NetworkID          string
	Options            map[string]json.RawMessage
	IPv4Data, IPv6Data []ipamData
}

// ipamData is one address range of a network.
type ipamData struct {
	Pool    string // a prefix; 0.0.0.0/0 or ::/0 from the IPAM driver "null"
	Gateway string // the network's own address, as a prefix
}

// endpointRequest is each of the calls about an endpoint.
type endpointRequest struct {
	NetworkID, EndpointID string
	SandboxKey            string // of Join
	Interface             *endpointInterface
	Options               map[string]json.RawMessage
}

// endpointInterface is what the engine's IPAM gave, or what the driver gives
// instead of it.
type endpointInterface struct {
	Address     string `json:",omitempty"`
	AddressIPv6 string `json:",omitempty"`
	MacAddress  string `json:",omitempty"`
}

type createEndpointResponse struct{ Interface endpointInterface }

// joinResponse tells libnetwork which device to move into the sandbox.
type joinResponse struct {
	InterfaceName         interfaceName
	Gateway               string        `json:",omitempty"`
	GatewayIPv6           string        `json:",omitempty"`
	StaticRoutes          []staticRoute `json:",omitempty"`
	DisableGatewayService bool
}

// interfaceName is the device's name now, and the prefix of the one that it
// gets in the sandbox.
type interfaceName struct{ SrcName, DstPrefix string }

type staticRoute struct {
	Destination string
	RouteType   int
}

// routeConnected is libnetwork's types.CONNECTED: the destination is on the
// link.
const routeConnected = 1

// Names of options in libnetwork's package netlabel.
const (
	optionGeneric  = "com.docker.network.generic"
	optionInternal = "com.docker.network.internal"
	optionIPv6     = "com.docker.network.enable_ipv6"
	optionMAC      = "com.docker.network.endpoint.macaddress"
)

// handler returns the driver's side of the protocol.
func (d *Driver) handler() sdk.Handler {
	h := sdk.NewHandler(manifest)
	empty := func(_ *Driver, _ *endpointRequest) (any, error) { return struct{}{}, nil }
	handle(h, d, "GetCapabilities", nil, func(*Driver, *struct{}) (any, error) {
		// Each host has networks of its own, which reach those of others through the
		// gateway: only then do the hosts of a swarm tell each other the names of
		// services.
		return map[string]string{"Scope": "local", "ConnectivityScope": "global"}, nil
	})
	handle(h, d, "CreateNetwork", checkNetwork, (*Driver).createNetwork)
	handle(h, d, "DeleteNetwork", checkNetwork, (*Driver).deleteNetwork)
	handle(h, d, "CreateEndpoint", checkEndpoint, (*Driver).createEndpoint)
	handle(h, d, "DeleteEndpoint", checkEndpoint, (*Driver).deleteEndpoint)
	handle(h, d, "EndpointOperInfo", checkEndpoint, func(*Driver, *endpointRequest) (any, error) {
		return map[string]any{"Value": map[string]any{}}, nil
	})
	handle(h, d, "Join", checkEndpoint, (*Driver).join)
	handle(h, d, "Leave", checkEndpoint, (*Driver).leave)
	handle(h, d, "ProgramExternalConnectivity", checkEndpoint, (*Driver).program)
	handle(h, d, "RevokeExternalConnectivity", checkEndpoint, (*Driver).revoke)
	// News of other hosts, which a driver of local scope does not need.
	handle(h, d, "DiscoverNew", nil, empty)
	handle(h, d, "DiscoverDelete", nil, empty)
	return h
}

// errEmpty is what the engine sends when it repeats a call that was cut off.
var errEmpty = errors.New("the call came without its parameters, because the driver was restarted in the middle of it: try again")

// checkID refuses what is no ID of Docker's: IDs become names of directories.
func checkID(what, id string) error {
	if id == "" {
		return errEmpty
	}
	const most = 64
	for _, c := range id {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return fmt.Errorf("%s ID %q: only a to z and 0 to 9 are possible", what, id)
		}
	}
	if len(id) > most {
		return fmt.Errorf("%s ID of %d characters: at most %d are possible", what, len(id), most)
	}
	return nil
}

func checkNetwork(r *networkRequest) error { return checkID("network", r.NetworkID) }

func checkEndpoint(r *endpointRequest) error {
	if err := checkID("network", r.NetworkID); err != nil {
		return err
	}
	return checkID("endpoint", r.EndpointID)
}

// handle registers a call. An error's text reaches the user through the engine,
// as "NetworkDriver.<call>: <text>".
func handle[Request any](h sdk.Handler, d *Driver, call string, check func(*Request) error, do func(*Driver, *Request) (any, error)) {
	h.HandleFunc("/NetworkDriver."+call, func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		request := new(Request)
		answer, err := any(nil), decode(http.MaxBytesReader(w, r.Body, maxRequest), request)
		if err == nil && check != nil {
			err = check(request)
		}
		if err == nil {
			answer, err = do(d, request)
		}
		if err != nil {
			d.cfg.Log.Warn("refused", "call", call, "error", err)
			sdk.EncodeResponse(w, map[string]string{"Err": err.Error()}, true)
			return
		}
		d.cfg.Log.Debug("done", "call", call, "took", time.Since(started))
		sdk.EncodeResponse(w, answer, false)
	})
}

func decode(body io.Reader, request any) error {
	err := json.NewDecoder(body).Decode(request)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the engine's call: %w", err)
	}
	return nil // an empty body is refused where something must be in it
}

// text reads a string out of options; empty if it is not there.
func text(options map[string]json.RawMessage, name string) string {
	var s string
	_ = json.Unmarshal(options[name], &s) // another type is no text
	return s
}

// yes reads a bool out of options.
func yes(options map[string]json.RawMessage, name string) bool {
	var b bool
	_ = json.Unmarshal(options[name], &b) // another type is no yes
	return b
}
