"""Pages that decoding requests will need, as all of them advance in lockstep."""

from __future__ import annotations


class Growth:
    """Counts requests by the step at which their last page is full, modulo the page size."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._full_at = [0] * page_size
        self.num_requests = 0

    def add(self, context_tokens: int, step: int) -> None:
        """A request with so many tokens decodes from `step` on."""
        self._full_at[(step - context_tokens) % self._page_size] += 1
        self.num_requests += 1

    def remove(self, context_tokens: int, step: int) -> None:
        """A request that has so many tokens by `step` decodes no more."""
        self._full_at[(step - context_tokens) % self._page_size] -= 1
        self.num_requests -= 1

    def pages(self, step: int, num_steps: int) -> int:
        """Pages that all of them need beyond those of `step` for `num_steps` tokens each."""
        size = self._page_size
        whole, rest = divmod(num_steps, size)
        # Beyond whole pages, those need one more whose last page has no room for the rest.
        crossing = sum(self._full_at[(step + room) % size] for room in range(rest))
        return whole * self.num_requests + crossing

    def steps_within(self, step: int, num_pages: int, most: int) -> int:
        """The largest number of steps, up to `most`, that needs no more than `num_pages`."""
        if self.pages(step, most) <= num_pages:
            return most
        low, high = 0, most  # pages(low) fit, pages(high) do not
        while high - low > 1:
            middle = (low + high) // 2
            if self.pages(step, middle) <= num_pages:
                low = middle
            else:
                high = middle
        return low
