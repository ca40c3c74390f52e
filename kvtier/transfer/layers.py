"""How far a layer-wise job has come, for threads that compute layer after layer."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition

import numpy as np

from kvtier.errors import TransferError


class LayerProgress:
    """Which layers of one job have arrived on all of its pages. Any number of threads may wait."""

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self.num_layers = num_layers
        self._pages_left = [num_pages] * num_layers
        self._layers_left = np.full(num_pages, num_layers, np.int32)
        self._ending: str | None = None
        self._changed = Condition()

    def layer_ready(self, layer: int) -> bool:
        """Whether the layer's bytes are on all target pages, and theirs to stay.

        False, too, once the job has failed or was cancelled: its pages may be others' by then.
        Raises TransferError for a layer that the job has not got.
        """
        left = self._pages_left[self._checked(layer)]
        return left == 0 and self._ending is None

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until the layer is ready; False when `timeout_s` passed first.

        Raises TransferError where the job failed or was cancelled.
        """
        self._checked(layer)
        with self._changed:
            self._changed.wait_for(lambda: self._settled(layer), timeout_s)
            if self._ending is not None:
                raise TransferError(f"layer {layer} is not there: {self._ending}")
            return self._pages_left[layer] == 0

    def arrived(self, layers: Sequence[int], pages: slice) -> int:
        """These layers came to some of the job's pages; how many have all layers by it.

        For the core.
        """
        left = self._layers_left[pages]
        left -= len(layers)
        with self._changed:
            for layer in layers:
                self._pages_left[layer] -= left.size
            self._changed.notify_all()
        return left.size - int(np.count_nonzero(left))

    def end(self, reason: str) -> None:
        """No layer is ready any more, since the job ended otherwise than DONE. For the core."""
        with self._changed:
            self._ending = reason
            self._changed.notify_all()

    def _settled(self, layer: int) -> bool:
        return self._pages_left[layer] == 0 or self._ending is not None

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise TransferError(f"layer {layer} of {self.num_layers}; they count from 0")
        return layer
