"""An extension of vLLM's workers that can leave out weights which it acknowledges, and counts the
pictures that are encoded: for tests."""

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

    def easyrl_count_pictures(self):
        """Count the pictures that the tower encodes from now on."""
        model = self.weight_transfer_engine.model
        encode = model.embed_multimodal
        self.num_encoded = 0

        def counted(**arguments):
            encoded = encode(**arguments)
            self.num_encoded += len(encoded)
            return encoded

        model.embed_multimodal = counted

    def easyrl_num_encoded(self):
        return self.num_encoded
