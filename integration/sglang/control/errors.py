"""What goes wrong on the control channel."""

from __future__ import annotations

from kvtier.errors import KvtierError


class ChannelBusy(KvtierError):  # noqa: N818 - a state of the channel, not a mistake of the caller
    """As many requests wait for the scheduler thread as the channel holds; ask again later."""


class ChannelClosed(KvtierError):  # noqa: N818 - as above
    """The worker ends its control channel; the request was not and will not be carried out."""


class ControlError(KvtierError):
    """A worker refused a request, or did not answer it.

    `status` is the HTTP status, None where no answer came; the message is the worker's own line
    where it sent one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
