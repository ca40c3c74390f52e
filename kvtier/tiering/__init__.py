"""One worker's KV in two tiers: the radix tree, the free pages of both pools, and the moves."""
