"""How figures are written."""


def number(value: float) -> str:
    """Three significant digits at least, thousands separated."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def percent(value: float) -> str:
    """A share in per cent."""
    return f"{100 * value:.0f} %"


def scaled(value: float) -> str:
    """Three significant digits with an SI prefix: 1.23M."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return number(value / factor) + prefix
    return number(value)
