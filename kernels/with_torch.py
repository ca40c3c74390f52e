"""torch, or one line about what to install."""

try:
    import torch as torch
    from torch import Tensor as Tensor
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "kvtier.kernels needs torch: pip install 'kvtier[runtime]', or 'kvtier[gpu]' for a GPU",
        name="torch",
    ) from None
