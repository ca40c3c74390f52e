"""The radix tree: which page is where, whose it is, and which goes first."""
