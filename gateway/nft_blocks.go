package gateway

import (
	"net/netip"

	"github.com/google/nftables"
)

// blocksOf returns the blocks of a pool as the elements of a set.
func (f *firewall) blocksOf(pool netip.Prefix) (all []nftables.SetElement) {
	for block := range f.blocks {
		if pool.Contains(block.Addr()) {
			all = append(all, blockElement(block))
		}
	}
	return all
}

func blockElement(block netip.Prefix) nftables.SetElement {
	return nftables.SetElement{Key: block.Addr().AsSlice()}
}

// setBlock says whether a prefix is a block, and reports whether that is news.
func (f *firewall) setBlock(block netip.Prefix, is bool) bool {
	if _, was := f.blocks[block]; was == is || !block.IsValid() {
		return false
	}
	if is {
		f.blocks[block] = struct{}{}
	} else {
		delete(f.blocks, block)
	}
	return true
}

// updateBlocks tells the kernel of blocks that have come or gone, without an end
// of the counts of the others.
func (f *firewall) updateBlocks(changed []netip.Prefix) error {
	if f.limit == nil {
		return nil
	}
	c, err := nftables.New()
	if err != nil {
		return explainNft(err)
	}
	for _, block := range changed {
		pool := f.pool4
		if block.Addr().Is6() {
			pool = f.pool6
		}
		if !pool.IsValid() {
			continue
		}
		change := c.SetDeleteElements
		if _, is := f.blocks[block]; is {
			change = c.SetAddElements
		}
		if err := change(blocksSet(tableRef(f.table), pool), []nftables.SetElement{blockElement(block)}); err != nil {
			return err
		}
	}
	if err := c.Flush(); err != nil {
		return explainNft(err)
	}
	return nil
}

// admit prepares the way out for a client: answers from what it may reach by
// name are forwarded, and the connections of its block are counted together. A
// run of addresses that was a block may be that of single clients by now.
func (e *egress) admit(c Client) {
	e.letThrough(c.Allow)
	e.mu.Lock()
	defer e.mu.Unlock()
	var changed []netip.Prefix
	for block, is := range map[netip.Prefix]bool{
		c.Block4: true, c.Block6: true,
		netip.PrefixFrom(c.Addr4, 24).Masked(): false, netip.PrefixFrom(c.Addr6, 120).Masked(): false,
	} {
		if e.fw.setBlock(block, is) {
			changed = append(changed, block)
		}
	}
	if len(changed) == 0 {
		return
	}
	err := e.ns.do(func() error {
		if e.fw.updateBlocks(changed) == nil {
			return nil
		}
		// Another program may have flushed the rules: they come back whole.
		return e.installFirewall(e.open)
	})
	if err != nil {
		e.cfg.log.Warn("the way out may not be complete", "error", err)
	}
}
