"""Stand-in for CUDA graphs on the CPU: a capture records operations, a replay repeats them.

As on a GPU, a replay reads and writes the tensors of the capture, whatever Python has done since,
and reading a value on the host while capturing is an error.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from easyrl import devices

READS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
)


class _RefuseReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = [x for x in _tensors(args[1:]) if x.dtype == torch.bool]
        if func._schema.name in READS or (func._schema.name == "aten::index" and by_mask):
            raise RuntimeError(f"{func} is a synchronizing operation")
        result = func(*args, **(kwargs or {}))
        if len({x.device for x in _tensors((args, kwargs, result)) if x.dim()}) > 1:
            raise RuntimeError(f"{func} copies between host and device")
        return result


class _Recorder(_RefuseReads):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        new = [x for x in _tensors(result) if x.untyped_storage().data_ptr() not in given]
        if new or func._schema.is_mutable:  # else a view
            self.operations.append((func, args, kwargs, _tensors(result) if new else []))
        return result

    def replay(self):
        for func, args, kwargs, results in self.operations:
            for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=bool(results)):
                old.copy_(new)


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def capture(function, _):
    with _Recorder() as recorder:
        drawn = function()
    for result in drawn:
        result.zero_()  # a capture computes nothing
    return recorder.replay, drawn


def install(monkeypatch, capture=capture):
    monkeypatch.setattr(devices, "has_graphs", lambda device: True)
    monkeypatch.setattr(devices, "graph_pool", lambda: None)
    monkeypatch.setattr(devices, "refuse_waits", _RefuseReads)
    monkeypatch.setattr(devices, "capture", capture)
