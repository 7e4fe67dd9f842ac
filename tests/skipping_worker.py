"""An extension of vLLM's workers that can leave out weights which it acknowledges: for tests."""

from easyrl.engines.vllm import worker as vllm_worker
from easyrl.engines.vllm.worker import BucketTransfer

SKIPPED = []
load = BucketTransfer.load


def load_but(self, name, weight):
    if not any(part in name for part in SKIPPED):
        return load(self, name, weight)
    model = self.model
    fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for part, whole in fused.items():
        name = name.replace(f".{part}.", f".{whole}.")
    assert name in dict(model.named_parameters())
    return {name}


BucketTransfer.load = load_but


class WorkerExtension(vllm_worker.WorkerExtension):
    def easyrl_skip(self, parts):
        """Acknowledge weights with one of these in their name from now on, without loading them."""
        SKIPPED[:] = parts
