"""The clients' memories of what they did not send: on the GPU up to a budget, in RAM up to another, then in a file."""

from gluefl.clients.residuals.store import Residuals, room_on

__all__ = ["Residuals", "room_on"]
