"""Pools of pages: which are free, where they lie, how much memory there is."""
