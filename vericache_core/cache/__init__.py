"""Where KV rows live: device pages, the tiers of the full KV, the swap ring, the draft KV."""
