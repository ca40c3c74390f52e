"""Bytes as people read them, rounded towards the safe side."""

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def at_least(num_bytes: int) -> str:
    """`num_bytes` rounded up to two decimals of GB (10^9), MB or kB: for what somebody asks for."""
    return _text(num_bytes, round_up=True)


def at_most(num_bytes: int) -> str:
    """`num_bytes` rounded down, as `at_least`: for what there is."""
    return _text(num_bytes, round_up=False)


def _text(num_bytes: int, *, round_up: bool) -> str:
    for unit, name in _UNITS:
        if abs(num_bytes) >= unit:
            hundredth = unit // 100
            hundredths = -(-num_bytes // hundredth) if round_up else num_bytes // hundredth
            sign, whole = "-" if hundredths < 0 else "", abs(hundredths)
            return f"{sign}{whole // 100:,}.{whole % 100:02} {name}"
    return f"{num_bytes} bytes"
