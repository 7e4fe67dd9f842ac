"""The vLLM engine: its asynchronous engine in processes of its own, behind `engines.base.Engine`.

    submit ─► one request, n = G ─► vLLM's scheduler and model ─► step: groups that are done
    receive_weights ─► every tensor-parallel rank, over the weight channel (`vllm_worker`)

A thread runs the event loop that vLLM's client lives on; the rollout worker only hands over
requests and takes finished groups. vLLM goes on by itself between two calls of `step`, so that no
work of this process holds it up. Which sequences share a forward pass depends on when requests
arrive: sampling is seeded, but last bits may differ from run to run.

Every completion says which weights its tokens were sampled by: one version, the right one, or the
run stops.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from easyrl.channels.weights import WeightSeat
from easyrl.config import ConfigError
from easyrl.engines.base import FinishedGroup, GroupRequest, check_request
from easyrl.engines.held_weights import Held, HeldWeights
from easyrl.types import Completion

WORKER = "easyrl.engines.vllm_worker"
BACKEND = "easyrl_buckets"
STEP_SECONDS = 0.02
"""Longest wait of a `step` for a group: the rollout worker has other work too."""
SHUTDOWN_SECONDS = 1.0
"""How long vLLM's processes may take to end by themselves; they end with this one all the same."""
EMBEDDED = "rollout.engine=embedded takes it"
T = TypeVar("T")


class VllmEngine:
    """Groups through vLLM (see `engines.base.Engine`)."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        dtype: str,
        trust_remote_code: bool,
        eos_token_ids: Iterable[int],
        max_concurrent_groups: int,
        num_generations: int,
        kv_cache_bytes: int | None,
        memory_fraction: float,
        max_prompt_length: int,
        max_completion_length: int,
        temperature: float,
        seed: int,
        top_k: int = 0,
        top_p: float = 1.0,
        tensor_parallel_size: int = 1,
        extension: str = f"{WORKER}.WorkerExtension",
    ) -> None:
        """`kv_cache_bytes`: of the KV cache; None: what `memory_fraction` of the device's memory
        leaves. Raises ConfigError where vLLM cannot serve the model or has no room for it."""
        self.max_prompt_length = max_prompt_length
        self.max_completion_length = max_completion_length
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.policy_version = -1
        self._seed = seed
        self._tensor_parallel_size = tensor_parallel_size
        self._sampling = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": list(eos_token_ids),
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._num_unfinished = 0
        self._finished: SimpleQueue[FinishedGroup | BaseException] = SimpleQueue()
        self._held = HeldWeights()
        self._is_complete = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm").start()
        executor = f"{WORKER}.OneProcessExecutor" if tensor_parallel_size == 1 else "mp"
        arguments = AsyncEngineArgs(
            model=model,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=0,
            max_model_len=max_prompt_length + max_completion_length,
            max_num_seqs=max_concurrent_groups * num_generations,
            # 0 for the sampled token; in the distribution that it was drawn from.
            max_logprobs=1,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # nothing of the model's own: only what is asked for
            enforce_eager=device == "cpu",
            enable_prefix_caching=True,
            kv_cache_memory_bytes=kv_cache_bytes,
            gpu_memory_utilization=memory_fraction,
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend=executor,
            worker_extension_cls=extension,
            weight_transfer_config={"backend": BACKEND},
            disable_log_stats=True,
        )
        self._engine: AsyncLLM = self._call(_start(arguments))

    @property
    def has_work(self) -> bool:
        return self._num_unfinished > 0

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self.max_prompt_length, self.max_completion_length)
        limits = set(request.limits(self.max_completion_length))
        if len(limits) > 1:
            raise ValueError("completion lengths: vLLM takes one for all completions of a group")
        sampling = SamplingParams(
            **self._sampling,
            n=request.num_generations,
            max_tokens=limits.pop(),
            seed=_seed_of(self._seed, request.key),
        )
        self._num_unfinished += 1
        asyncio.run_coroutine_threadsafe(self._generate(request, sampling), self._loop)

    def step(self) -> list[FinishedGroup]:
        """The groups that are done, waiting a moment for the next."""
        groups: list[FinishedGroup] = []
        try:
            while self._num_unfinished:
                result = self._finished.get(timeout=0.0 if groups else STEP_SECONDS)
                if isinstance(result, BaseException):
                    raise result
                self._num_unfinished -= 1
                groups.append(result)
        except Empty:
            pass
        for group in groups:
            self.num_prompt_tokens += len(group.request.prompt_ids)
            self.num_completion_tokens += sum(len(c.token_ids) for c in group.completions)
        return groups

    async def _generate(self, request: GroupRequest, sampling: SamplingParams) -> None:
        """Runs on the loop's thread: the group, or what went wrong, goes into the queue."""
        try:
            output: Any = None
            async for output in self._engine.generate(
                {"prompt_token_ids": list(request.prompt_ids)},
                sampling,
                request_id="-".join(map(str, request.key)),
            ):
                pass
            completions = sorted(output.outputs, key=lambda completion: completion.index)
            group = [self._completion(completion) for completion in completions]
            self._finished.put(FinishedGroup(request, group))
        except BaseException as error:
            self._finished.put(error)

    def _completion(self, output: Any) -> Completion:
        versions = {span.version for span in output.weight_versions}
        if versions != {str(self.policy_version)}:
            raise RuntimeError(
                f"a completion was sampled by the weights {', '.join(sorted(versions))}, "
                f"but the policy is {self.policy_version}"
            )
        tokens = np.array(output.token_ids, dtype=np.int32)
        logprobs = [
            at_place[token].logprob
            for at_place, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert output.finish_reason in ("stop", "length"), output.finish_reason
        return Completion(tokens, np.array(logprobs, dtype=np.float32), output.finish_reason)

    # -- weights --------------------------------------------------------------------------------

    def join_weights(self, seat: WeightSeat) -> None:
        """Every tensor-parallel rank takes a seat, the first of them this one."""
        info = WeightTransferInitRequest(init_info={"seat": asdict(seat)})
        self._call(self._engine.init_weight_transfer_engine(info))

    def receive_weights(self, policy_version: int) -> None:
        if self.has_work:
            raise RuntimeError("weights arrived while sequences of the old policy are in flight")
        self._call(self._update(policy_version))
        self.policy_version = policy_version

    async def _update(self, policy_version: int) -> None:
        engine = self._engine
        await engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"policy_version": policy_version})
        await engine.update_weights(update)
        await engine.finish_weight_update(weight_version=str(policy_version))
        await engine.reset_prefix_cache()
        ranks = await engine.collective_rpc("easyrl_held_weights")
        if not self._is_complete:
            _check_complete(ranks)
            self._is_complete = True
        held = [[Held(*row) for row in rows] for rows, _, _ in ranks]
        self._held.check(policy_version, held)

    # -- vLLM's loop ----------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on vLLM's loop. An error of the weight channel comes back as what it was."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except Exception as error:
            found = re.search(r"(TimeoutError|ConnectionError): (weight channel.*)", str(error))
            if found is None:
                raise
            kind = TimeoutError if found[1] == "TimeoutError" else ConnectionError
            raise kind(found[2]) from error

    def close(self) -> None:
        """End vLLM's processes."""
        self._engine.shutdown(timeout=SHUTDOWN_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def _check_complete(ranks: list[Any]) -> None:
    """After the first update, with all weights: each has a place, and each place a weight."""
    for _, unused, missing in ranks:
        if unused or missing:
            names = [*unused, *missing]
            raise ConfigError(
                f"model.path: {len(names)} of the model's weights have other names in vLLM than "
                f"in transformers ({', '.join(names[:3])}{', ...' if names[3:] else ''}), so they "
                f"cannot be brought to it; {EMBEDDED}"
            )


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """Of a group; sample i has the one that is larger by i."""
    (word,) = np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)
    return int(word) >> 2
