import pretended_device as device
import torch.distributed as dist

from easyrl import devices


class ProcessGroupHCCL:
    """Gloo on the memory of pretended NPUs."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        gloo, self._abort = devices.make_process_group("cpu", store, rank, size, options._timeout)
        self._group = device.over_host(gloo)

    def broadcast(self, tensors, options=None):
        return self._group.broadcast(tensors, options or dist.BroadcastOptions())

    def abort_hccl_comm(self, reason):
        self._abort()
