"""The target's cache while trees are verified: slots, windows, running states, and the cache that is handed back."""
