"""The vLLM engine on vLLM's CPU build (make test-vllm)."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from easyrl.channels import BUCKET_BYTES
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.config import ConfigError
from easyrl.config.model import LoraConfig
from easyrl.config.spec import ModelSpec
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
from easyrl.devices import LOOPBACK, network_environment
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.vllm.platforms import environment
from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.loading import load_policy, picture_input
from easyrl.types import RowPictures
from multimodal_models import FAMILIES, multimodal_folder
from real_models import real_model
from tiny_models import untied_model

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` installs it and runs these")
pytestmark = pytest.mark.vllm
os.environ |= {**network_environment(LOOPBACK), **environment("cpu"), "OMP_NUM_THREADS": "1"}

TOLERANCE = 1e-4  # nats, in float32
TEMPERATURE = 0.7
TIMEOUT_SECONDS = 10.0  # of the weight channel
SAMPLING = SamplingSettings(
    max_prompt_length=48, max_completion_length=48, temperature=TEMPERATURE, seed=3
)
SIZE = {"max_concurrent_groups": 2, "num_generations": 4}
PROMPTS = [[5, 6, 7, 8, 9] * 3, [20, 21, 22], [30] * 40]
"""The last one fills a block of the KV cache, which a group shares and an update must drop."""
WHOLE = replace(SAMPLING, top_k=1000)  # excludes nothing


def spec_of(model, **changes):
    return ModelSpec(
        path=str(model),
        dtype="float32",
        trust_remote_code=False,
        attention="auto",
        lora=LoraConfig(),
        chat_template=None,
        **changes,
    )


class Trained:
    def __init__(
        self, model, folder, sampling=SAMPLING, timeout_seconds=TIMEOUT_SECONDS, **changes
    ):
        """`changes`: of `ModelSpec`."""
        from easyrl.engines.vllm import engine

        engine.EXTENSION = "skipping_worker.WorkerExtension"
        spec = spec_of(model, **changes)
        self.policy = load_policy(resolve_model(model), pictures=picture_input(spec))
        self.tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
        self.version = -1
        self.engine = engine.VllmEngine(spec, sampling, device="cpu", **SIZE)
        self.store = str(folder / "store")
        self.timeout_seconds = timeout_seconds
        self.generation = -1
        self.thread = ThreadPoolExecutor(1)
        self.cancelled = threading.Event()
        self.join()

    def join(self, bucket_bytes=BUCKET_BYTES):
        self.generation += 1
        self.cancelled.clear()
        endpoints = [
            WeightEndpoint(
                *(self.store, rank, 2, name, "cpu", self.timeout_seconds),
                bucket_bytes=bucket_bytes,
                generation=self.generation,
            )
            for rank, name in enumerate(("train-0", "rollout-0"))
        ]
        channel = self.thread.submit(WeightChannel, endpoints[0])
        self.engine.join_weights(endpoints[1], self.cancelled.is_set)
        self.channel = channel.result()

    def update(self):
        self.version += 1
        sent = self.thread.submit(self.channel.send, self.version, self.policy.weights())
        try:
            self.engine.receive_weights(self.version)
        finally:
            sent.result()

    def change(self, alpha=0.02):
        with torch.no_grad():
            for weight in self.policy.model.parameters():
                if not weight.requires_grad:  # of a frozen tower
                    continue
                weight.add_(torch.randn_like(weight), alpha=alpha)

    def answers(self, requests):
        for request in requests:
            self.engine.submit(request)
        return all_groups(self.engine)

    def generate(self, sampling=None):
        """Groups of PROMPTS; `sampling`: instead of the engine's."""
        from easyrl.engines.vllm.engine import sampling_parameters

        if sampling is not None:
            self.engine.sampling = sampling
            end_tokens = set(self.policy.eos_token_ids)
            self.engine._parameters = sampling_parameters(sampling, end_tokens)
        for number, prompt in enumerate(PROMPTS):
            self.engine.submit(GroupRequest((0, number), prompt, 4))
        return all_groups(self.engine)

    def check(self):
        self.update()
        assert self.largest_gap(self.generate()) <= TOLERANCE

    def distributions(self, groups):
        """Of each completion: the whole vocabulary's log-probabilities, [R, V], those of its tokens
        and the engine's, [R]."""
        for request, completions in groups:
            for completion in completions:
                tokens, num_prompt = completion.token_ids.tolist(), len(request.prompt_ids)
                ids = torch.tensor([*request.prompt_ids, *tokens])
                at = torch.arange(num_prompt - 1, len(ids) - 1)
                tree = TokenTree.of_sequences([len(ids)])
                shown = ()
                if request.media is not None and request.media.pictures:
                    shown = (RowPictures(request.media.pictures, 0, num_prompt, len(ids)),)
                row = ModelInputs.of_row(ids, tree, at, pictures=shown)
                with torch.no_grad():
                    logits = self.policy.forward(row)
                whole = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
                own = whole[range(len(tokens)), tokens]
                yield whole, own, torch.from_numpy(completion.logprobs)

    def largest_gap(self, groups):
        """Largest difference between the engine's and the trainer's log-probabilities, in nats."""
        return max(float((a - b).abs().max()) for _, a, b in self.distributions(groups))


def all_groups(engine):
    groups = []
    while engine.has_work:
        groups += engine.step()
    return sorted(groups, key=lambda group: group[0].key)


@pytest.fixture(scope="module", params=["tied", "untied"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    made = Trained("tiny" if request.param == "tied" else untied_model(folder / "m"), folder)
    yield made
    made.engine.close()


@pytest.mark.long
def test_a_real_model_has_the_trainers_log_probabilities_after_an_update(tmp_path, monkeypatch):
    made = Trained(str(real_model("smollm2")), tmp_path, timeout_seconds=120.0)
    chats = [[{"role": "user", "content": text}] for text in ("What is 12 + 25?", "hello")]
    prompts = [render_prompt(chat, made.tokenizer) for chat in chats]
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", prompts)
    try:
        for _ in range(2):
            made.check()
            made.change(alpha=1e-4)
    finally:
        made.engine.close()


def test_log_probabilities_are_the_trainers_after_every_update(trained):
    drawn = []
    for _ in range(3):
        trained.change()
        trained.update()
        groups = trained.generate()
        assert [len(completions) for _, completions in groups] == [4, 4, 4]
        assert trained.largest_gap(groups) <= TOLERANCE
        drawn.append([[c.token_ids.tolist() for c in group] for _, group in groups])
    assert drawn[1] != drawn[2]
    assert len({str(tokens) for tokens in drawn[2][2]}) > 1, "each sample draws its own tokens"


@pytest.mark.parametrize("skipped", ["layers.1.mlp.up_proj", "embed_tokens", "norm.weight"])
def test_acknowledged_but_skipped_weight_stops_the_run(trained, skipped):
    trained.update()
    trained.change()
    trained.engine._call_workers("easyrl_skip", [skipped])
    try:
        with pytest.raises(RuntimeError, match=rf"weights {trained.version + 1} .*parameters"):
            trained.update()
    finally:
        trained.engine._call_workers("easyrl_skip", [])
    trained.check()


def test_no_sequence_has_tokens_of_two_weights(trained):
    trained.update()
    trained.engine.submit(GroupRequest((0, 0), [5, 6], 2))
    with pytest.raises(RuntimeError, match="in flight"):
        trained.engine.receive_weights(99)
    all_groups(trained.engine)
    trained.engine._call(trained.engine._engine.update_weight_version("another"))
    trained.engine.submit(GroupRequest((0, 0), [5, 6], 1))
    with pytest.raises(RuntimeError, match=rf"policy {trained.version}, .* another"):
        all_groups(trained.engine)
    trained.update()


def test_prefix_cache_that_is_not_cleared_stops_the_run(trained, monkeypatch):
    async def keep():  # as vLLM does if it assumes that blocks are in use
        return False

    monkeypatch.setattr(trained.engine._engine, "reset_prefix_cache", keep)
    with pytest.raises(RuntimeError, match=rf"weights {trained.version + 1}: .*prefix cache"):
        trained.update()
    monkeypatch.undo()
    trained.check()


class Died(Exception):
    pass


@pytest.mark.parametrize("num_sent", [0, 5, 20])
def test_update_that_failed_is_repeated(trained, num_sent):
    """Layers have none, a part or all of their weights. `update` compares the checksums."""
    trained.join(bucket_bytes=2**12)
    trained.update()
    trained.change()
    weights = list(trained.policy.weights())

    def die():
        trained.channel.close()
        raise Died

    weights[num_sent] = replace(weights[num_sent], materialize=die)
    sent = trained.thread.submit(trained.channel.send, trained.version + 1, weights)
    started = time.monotonic()
    with pytest.raises(ConnectionError, match="weight channel, rollout-0"):
        trained.engine.receive_weights(trained.version + 1)
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2
    assert isinstance(sent.exception(), Died)
    trained.join(bucket_bytes=2**12)
    trained.check()


def test_wait_for_a_stopped_trainer_is_cancelled(trained):
    threading.Timer(0.3, trained.cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"weight channel, rollout-0.*cancelled"):
        trained.engine.receive_weights(trained.version + 1)
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2
    trained.join()
    trained.check()


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    sampling = replace(SAMPLING, top_p=0.9, stop=("x",))
    made = Trained("tiny", tmp_path_factory.mktemp("truncated"), sampling)
    made.update()
    yield made
    made.engine.close()


@pytest.mark.parametrize("changes", [{"top_p": 0.7}, {"top_k": 2}], ids=str)
def test_log_probabilities_are_of_the_whole_distribution(truncated, changes):
    groups = truncated.generate(replace(SAMPLING, **changes))
    assert truncated.largest_gap(groups) <= TOLERANCE
    for whole, drawn, _ in truncated.distributions(groups):
        more_likely = whole > drawn[:, None] + 1e-3
        if "top_k" in changes:
            assert (more_likely.sum(-1) < 2).all()
        else:
            assert (torch.where(more_likely, whole.exp(), 0.0).sum(-1) < 0.7 + 1e-3).all()


def test_completion_ends_with_the_token_that_completes_a_stop_string(truncated, monkeypatch):
    monkeypatch.setattr(truncated.engine, "_is_deterministic", True)  # draws the same tokens again
    whole = truncated.generate(WHOLE)
    texts = [truncated.tokenizer.decode(c.token_ids) for _, group in whole for c in group]
    stops = tuple({text[4:6] for text in texts if len(text) > 8})  # two tokens, one per character
    assert stops
    groups = truncated.generate(replace(WHOLE, stop=stops))
    num_stopped = 0
    for (_, cut_group), (_, whole_group) in zip(groups, whole, strict=True):
        for cut, long in zip(cut_group, whole_group, strict=True):
            text = truncated.tokenizer.decode(long.token_ids, skip_special_tokens=True)
            ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
            tokens = long.token_ids.tolist()
            expected = tokens[: min(ends)] if ends else tokens
            assert cut.token_ids.tolist() == expected
            assert cut.finish_reason == ("stop" if ends else long.finish_reason)
            assert len(cut.logprobs) == len(expected)
            num_stopped += bool(ends)
    assert num_stopped > 3
    assert truncated.largest_gap(groups) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_does_not_depend_on_chunks_device_or_order(monkeypatch, dtype):
    from easyrl.engines.vllm import worker

    values = torch.randn(7, 13).to(dtype)
    whole = worker.checksum(values)
    monkeypatch.setattr(worker, "CHUNK_ELEMENTS", 5)
    monkeypatch.setattr(worker.devices, "adds_integers", lambda device: False)
    assert worker.checksum(values) == worker.checksum(values.T) == whole
    assert worker.checksum(values * 2) != whole


@pytest.mark.long
def test_text_model_of_a_multimodal_model_is_updated_without_its_tower(tmp_path):
    pytest.importorskip("torchvision")  # vLLM's classes with towers import it
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    parts = FAMILIES["qwen2_5_vl"]
    rotary = parts["text_config"]["rope_parameters"] | {"mrope_section": [8, 4, 4]}
    text = parts["text_config"] | heads | {"vocab_size": 99, "rope_parameters": rotary}
    vision = parts["vision_config"] | {"out_hidden_size": 64}
    folder = tmp_path / "model"
    multimodal_folder(folder, "qwen2_5_vl", text_config=text, vision_config=vision)
    trained = Trained(str(folder), tmp_path)
    try:
        trained.check()
        trained.change()
        trained.check()
    finally:
        trained.engine.close()


@pytest.mark.long
def test_short_convolutions_and_the_attention_between_them_are_exact(tmp_path):
    """vLLM's CPU kernel of RoPE is wrong for attention that is written as LFM2's is."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    config = AutoConfig.for_model(
        "lfm2",
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,  # of 32 numbers: the smallest that vLLM's attention has on CPUs
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        conv_dim=128,  # vLLM reads these two, which are in LFM2's own config.json
        block_dim=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0.0, 0.15)  # large enough for a wrong position to show
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trained = Trained(str(folder), tmp_path)
    try:
        trained.check()
        trained.change()
        trained.check()
    finally:
        trained.engine.close()


def test_unsupported_model_is_refused(tmp_path):
    from easyrl.engines.vllm.engine import VllmEngine

    config = AutoConfig.for_model("openai-gpt", vocab_size=99, n_embd=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.path: .*rollout.engine=embedded"):
        VllmEngine(spec_of(tmp_path), SAMPLING, device="cpu", **SIZE)


@pytest.mark.parametrize("kind", ["Value error", "Assertion failed"])
def test_a_refused_configuration_gives_vllms_reason(kind):
    from easyrl.engines.vllm.engine import EngineLog

    text = f"1 validation error for VllmConfig\n  {kind}, blocks of 8 tokens. More [type={kind}]"
    error = EngineLog(None).start_error("some/model", ValueError(text))
    assert "cannot serve 'some/model': blocks of 8 tokens;" in str(error)


def test_errors_name_the_log_of_vllm_only_if_there_is_one(tmp_path):
    from easyrl.engines.vllm.engine import EngineLog

    file = tmp_path / "rollout-0.log"
    file.write_text("before\n")
    log = EngineLog(str(file))
    file.write_text("before\nRuntimeError: no blocks are left\n")
    died = RuntimeError("engine core died")
    for error in (log.end_error(), log.start_error("some/model", died)):
        assert "no blocks are left" in str(error) and str(file) in str(error)
    without = EngineLog(None)
    for error in (without.end_error(), without.start_error("some/model", died)):
        assert "more in" not in str(error)
