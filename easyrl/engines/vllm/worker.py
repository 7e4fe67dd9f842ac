"""The part of the engine that runs inside vLLM's processes: executors and the weight transfer.

    rollout worker ── update_weights(version) ──► BucketTransfer ◄══ buckets ══ train rank 0
                                                       │ load_weights, weight by weight
                   ◄── checksums of each parameter ── vLLM's model

vLLM imports this module by name, which registers the transfer. Every tensor-parallel rank is a
member of the weight channel and loads its share of each weight as it arrives.

After an update each parameter is compared with the weights that were sent for it, by the sum of the
bits of the elements: vLLM may fuse, split or pad weights (with zeros) without changing the sum. On
CPUs vLLM packs weights and frees the originals; then the sum is over the products with one-hot
vectors, which are exactly the weight's columns.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from easyrl import devices
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.engines.parameter_checksum import ParameterChecksum
from easyrl.engines.vllm.platforms import BACKEND
from easyrl.engines.vllm.processes import FOLDER, cancel_file
from easyrl.processes import die_with_parent
from easyrl.types import WeightPiece

MAX_COLUMNS = 256  # number of columns of a packed weight that are compared
CHUNK_ELEMENTS = 2**24  # number of elements that are summed at a time
_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Run the model in the process of vLLM's scheduler, also on CPUs."""

    def _init_executor(self) -> None:
        with _tied_to_rollout_worker():
            super()._init_executor()


class ManyProcessesExecutor(MultiprocExecutor):  # type: ignore[misc]
    def _init_executor(self) -> None:
        with _tied_to_rollout_worker():
            super()._init_executor()
        queue = getattr(self, "rpc_broadcast_mq", None)
        memory = getattr(getattr(queue, "buffer", None), "shared_memory", None)
        if memory is not None:  # all ranks have opened it
            memory.unlink()


@contextmanager
def _tied_to_rollout_worker() -> Iterator[None]:
    """End with the rollout worker, ignore a terminal's signals, and create temporary files in the
    folder that `processes.Cleanup` removes. At the end remove the names of locks (all are open)."""
    die_with_parent()
    tempfile.tempdir = os.environ[FOLDER]
    for signum in (signal.SIGINT, signal.SIGHUP):  # the controller handles them
        signal.signal(signum, signal.SIG_IGN)
    yield
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]


@dataclass
class TransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    endpoint: dict[str, Any]  # `WeightEndpoint` of the first tensor-parallel rank


@dataclass
class TransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    policy_version: int


class BucketTransfer(WeightTransferEngine[TransferInitInfo, TransferUpdateInfo]):  # type: ignore[misc]
    init_info_cls = TransferInitInfo
    update_info_cls = TransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._channel: WeightChannel | None = None
        self.channel_error = ""
        """Raised in one of several ranks, it would leave vLLM's calls out of step."""
        self.held: list[ParameterChecksum] = []  # after an update
        self.unmatched: list[str] = []  # weights without a parameter, parameters without a weight
        self.has_trained_tower = False  # updates are for its parameters, too
        self._sent: dict[str, ParameterChecksum] = {}  # by parameter
        self._sent_columns: Counter[str] = Counter()

    def init_transfer_engine(self, init_info: TransferInitInfo) -> None:
        endpoint = dict(init_info.endpoint)
        endpoint["rank"] += get_tensor_model_parallel_rank()
        for key in ("device", "shared_device"):  # this process has its own device numbers
            if endpoint[key] not in (None, "cpu"):
                endpoint[key] = str(self.device)
        if self._channel is not None:
            self._channel.close()
        cancelled = cancel_file(os.environ[FOLDER], endpoint["generation"])
        try:
            self._channel = WeightChannel(WeightEndpoint(**endpoint), cancelled.exists)
            self.channel_error = ""
        except OSError as error:
            self.channel_error = str(error)
        ident = os.environ.get("VLLM_DIST_IDENT")
        if ident:  # names segments that all CPU ranks have opened by now
            for segment in Path("/dev/shm").glob(f"{ident}-*"):
                segment.unlink(missing_ok=True)

    def start_weight_update(self) -> None:
        self._sent = {}
        self._sent_columns = Counter()
        self.unmatched = []
        with set_current_vllm_config(self.vllm_config):  # layers read it; not all workers set it
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: TransferUpdateInfo) -> None:
        assert self._channel is not None
        pieces = self._channel.receive(update_info.policy_version)
        try:
            with set_current_vllm_config(self.vllm_config):
                for name, weight in whole_weights(pieces, self.device):
                    parameters = self.load(name, weight)
                    # vLLM leaves layers of a tower out whose output the text model does not get.
                    if not parameters and not self.has_trained_tower:
                        self.unmatched.append(name)
                    for parameter in parameters:
                        sent = self._sent.setdefault(parameter, ParameterChecksum(parameter))
                        sent.is_matrix |= weight.ndim > 1
                        sent.sent += checksum(weight)
                        if self.device.type == "cpu" and weight.ndim == 2:
                            self._sent_columns[parameter] += checksum(_columns(weight))
        except OSError as error:
            self.channel_error = str(error)

    def load(self, name: str, weight: Tensor) -> set[str]:
        """Load a whole weight; return the names of the parameters that it is part of."""
        return set(self.model.load_weights([(name, weight)]) or ())

    def finish_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.channel_error:  # some weights are old or missing until the update is repeated
            return
        parameters = dict(self.model.named_parameters())
        expected = list(parameters)
        if not self.has_trained_tower:
            expected = _language_parameters(self.model)
        self.unmatched += [name for name in expected if name not in self._sent]
        self.held = []
        for name, sent in self._sent.items():
            if parameters[name].numel():
                self.held.append(replace(sent, held=checksum(parameters[name])))
        self.held += self._packed_checksums(parameters)

    def _packed_checksums(self, parameters: dict[str, Any]) -> list[ParameterChecksum]:
        """Return checksums of the packed weights with which CPU layers multiply."""
        checksums = []
        names = {weight: name for name, weight in parameters.items()}  # a tied weight has one
        for module in self.model.modules():
            if not hasattr(module, "cpu_linear") or getattr(module, "weight", None) is None:
                continue
            name = names[module.weight]
            if name not in self._sent:  # of a tower that gets no updates
                continue
            if module.weight.numel():
                # vLLM packs a head that is tied to the embedding only once.
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            packed = ParameterChecksum(
                f"{name} (packed)",
                is_matrix=True,
                sent=self._sent_columns[name],
                held=checksum(_packed_columns(module)),
            )
            checksums.append(packed)
        return checksums

    def shutdown(self) -> None:
        self._channel = None


class WorkerExtension:
    """Methods that the rollout worker calls by name in each of vLLM's workers."""

    weight_transfer_engine: BucketTransfer
    model_runner: Any

    def easyrl_results(self) -> tuple[str, list[Any], list[str]]:
        transfer = self.weight_transfer_engine
        held = [list(astuple(held)) for held in transfer.held]
        return transfer.channel_error, held, transfer.unmatched

    def easyrl_set_logprobs_mode(self, mode: str) -> None:
        sampler = self.model_runner.sampler
        for part in (sampler, sampler.topk_topp_sampler):
            assert hasattr(part, "logprobs_mode"), type(part)
            part.logprobs_mode = mode

    def easyrl_update_tower(self) -> None:
        """Expect weights of the tower, too, in each update from now on."""
        self.weight_transfer_engine.has_trained_tower = True

    def easyrl_change_logits(self, divisor: float, banned: list[int]) -> None:
        """Divide the model's logits from now on (see `engine`), and give tokens that stand for
        parts of pictures no probability, as the trainer does."""
        model = self.weight_transfer_engine.model
        compute = model.compute_logits

        def changed(*arguments: Any, **more: Any) -> Tensor | None:
            logits = compute(*arguments, **more)
            if logits is None:  # not rank 0
                return None
            scaled: Tensor = logits.float().div_(divisor)
            for token in banned:
                if token < scaled.shape[-1]:
                    scaled[..., token] = -torch.inf
            return scaled

        model.compute_logits = changed


def whole_weights(
    pieces: Iterator[WeightPiece], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and a copy of each weight, which vLLM keeps, and report progress."""
    values = torch.empty(0)
    for piece in pieces:
        if piece.start == 0:
            size = torch.Size(piece.shape).numel()
            values = torch.empty(size, dtype=piece.values.dtype, device=device)
        end = piece.start + len(piece.values)
        values[piece.start : end].copy_(piece.values)
        if end == len(values):
            yield piece.name, values.view(piece.shape)
        os.utime(os.environ[FOLDER])  # shows the rollout worker that this rank does not hang


def _language_parameters(model: Any) -> list[str]:
    """Return the names of the parameters that updates are for: not those of towers."""
    find = getattr(model, "get_language_model", None)  # a multimodal model has it
    language_model = model if find is None else find()
    ids = {id(parameter) for parameter in language_model.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in ids]


def checksum(values: Tensor) -> int:
    """Sum the elements' bits as integers, on the CPU where devices cannot add them exactly."""
    bits = values.detach().contiguous().view(_INTEGER_TYPES[values.dtype.itemsize]).view(-1)
    is_exact = devices.adds_integers(values.device)
    total = 0
    for chunk in torch.split(bits, CHUNK_ELEMENTS):
        summed = chunk if is_exact else chunk.cpu()
        total += int(summed.sum(dtype=torch.int64))
    return total


def _compared(num_columns: int) -> Tensor:
    """Return the indices of the compared columns: all, or MAX_COLUMNS evenly spaced ones."""
    return torch.linspace(0, num_columns - 1, min(num_columns, MAX_COLUMNS)).long()


def _columns(weight: Tensor) -> Tensor:
    """Return the compared columns of a weight [N, K]: [N, C]. Adding 0 makes -0 positive."""
    return weight[:, _compared(weight.shape[1])] + 0.0


def _packed_columns(module: Any) -> Tensor:
    """Return the compared columns of the packed weight [N, K], transposed: [C, N]."""
    num_columns = 0
    # The last one is that of a head, before vLLM 0.31.
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        num_columns = num_columns or getattr(module, name, None) or 0
    one_hot = nn.functional.one_hot(_compared(num_columns), num_columns).to(module.weight.dtype)
    product: Tensor = module.cpu_linear(one_hot, module.weight, None)
    return product + 0.0


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
