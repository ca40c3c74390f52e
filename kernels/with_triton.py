"""Triton, or one line about what to install."""

try:
    import triton as triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ModuleNotFoundError(
        "the Triton kernels need triton: pip install 'kvtier[gpu]'", name="triton"
    ) from None

__all__ = ["tl", "triton"]
