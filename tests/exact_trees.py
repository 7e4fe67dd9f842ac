"""A tree of tokens in one row, compared with each of its sequences alone in float64."""

import torch
from torch.overrides import TorchFunctionMode

from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.mixers.kinds import connect
from easyrl.model.mixers.packed_row import PackedRow
from tiny_models import VOCABULARY

BOUND = 1e-10


class InFloat64(TorchFunctionMode):
    """Compute in float64 where code asks for float32 whatever the model's dtype is: the gated delta
    rule, norms, rotary embeddings."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def sequences_of(tree):
    return [tree.tokens_of(tree.path(leaf)) for leaf in tree.leaves]


def gradients_of(model, logprobs):
    """Gradients of a sum with random weights, so that no token's part vanishes."""
    generator = torch.Generator().manual_seed(0)
    loss = 0.0
    for of_sequence in logprobs:
        weights = torch.randn(of_sequence.shape, generator=generator, dtype=torch.float64)
        loss = loss + (of_sequence * weights).sum()
    model.zero_grad()
    loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def assert_tree_is_exact(model, tree):
    """Compare log-probabilities and every gradient of a model in float64 with eager attention."""
    register_attention()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (tree.num_tokens,), generator=generator)
    positions = torch.from_numpy(tree.positions)
    with InFloat64():
        alone = []
        for sequence in sequences_of(tree):
            logits = model(input_ids=ids[None, sequence], use_cache=False).logits[0]
            alone.append(logits.log_softmax(-1))
        expected = gradients_of(model, alone)
        current = connect(model)
        model.set_attn_implementation(ATTENTION_NAME)
        with current.use(PackedRow(tree)):
            row = model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        logprobs = row.logits[0].log_softmax(-1)
        together = [logprobs[sequence] for sequence in sequences_of(tree)]
        got = gradients_of(model, together)

    for one, other in zip(together, alone, strict=True):
        assert float((one - other).detach().abs().max()) <= BOUND
    assert got.keys() == expected.keys()
    whole = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
    for name, gradient in expected.items():
        scale = max(float(gradient.norm()), 1e-4 * whole)
        assert float((got[name] - gradient).norm()) <= BOUND * scale, name
