"""Moves of pages between tiers: jobs, their order, the windows, and what carries them out."""
