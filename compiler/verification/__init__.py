"""A numerical check of a plan without its cluster: what its devices compute, in one process, against one device.

chunk_programs  the chunks of a plan as local programs, who sends what to whom, and in which order they run
values          weights and batches to run on
single_device   the model on one device, every tensor and every gradient of it
parts           the same on the devices of a chunk in lockstep
compare         one against the other, tensor by tensor; why they may differ
walk            ``verify``: all of it in the order of the schedule
captured  the model itself against the graph that was captured of it
"""

from .compare import Difference, Verification
from .walk import verify

__all__ = ["Difference", "Verification", "verify"]
