"""A numerical check of a plan without its cluster: its devices, simulated in one process, against one device.

chunk_programs  the chunks of a plan as local programs, the messages between them, and their order
values          weights and batches to run on
single_device   the model on one device, every tensor and every gradient of it
parts           the same on the devices of a chunk in lockstep
compare         one against the other, tensor by tensor, with the likely cause of a difference
walk            ``verify``: all of it in the order of the schedule
capture_check   the model itself against the graph that was captured of it
check_rules     sharding rules against execution, op by op (``split_execution`` runs the op)
lockstep        a mesh of threads in one process, as a communicator
"""

from .compare import Difference, Verification
from .walk import verify

__all__ = ["Difference", "Verification", "verify"]
