"""Benchmarks, run from a checkout as `python -m perf.<name>`; not installed."""
