"""The vLLM engine: vLLM's asynchronous engine behind the interface of `engines.base.Engine`.

    submit ─► a request per completion ─► vLLM's scheduler and model ─► step: finished groups
              with turns: one for each, which finds the earlier tokens in the prefix cache
    receive_weights ─► every tensor-parallel rank, over the weight channel (`worker`)

vLLM works in processes of its own; its client needs an event loop, which runs in a thread. Which
sequences share a forward pass depends on when requests arrive, so results may differ between runs.
With `is_deterministic` requests are handed over all at once, while vLLM is idle and paused, and
each has a seed (some devices sample such rows one by one).

Log-probabilities are those of the whole distribution at the sampling temperature, which is what is
trained. vLLM reports them at temperature 1, or after all changes to the distribution. So with top-k
or top-p the model's logits are divided by the temperature first, and vLLM samples at temperature 1:

    no top-k, top-p    logits ─► / temperature ─► reported, sampled               processed_logprobs
    top-k or top-p     logits / temperature ─► reported ─► top-k, top-p ─► sampled      raw_logprobs

A prompt with pictures goes to vLLM with one placeholder for each, and the images: vLLM's processor
puts in as many as there are features, and encodes a picture once for its group. What it makes of a
prompt must be the tokens that are trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from easyrl import devices
from easyrl.channels.weights import WeightEndpoint
from easyrl.config import ConfigError
from easyrl.config.spec import ModelSpec
from easyrl.data.hub import loadable_model
from easyrl.data.pictures import open_picture
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.engines.parameter_checksum import ChecksumVerifier, ParameterChecksum
from easyrl.engines.sampling import SamplingSettings
from easyrl.engines.vllm.platforms import (
    BACKEND,
    WORKER,
    can_cache_prefixes,
    device_arguments,
)
from easyrl.engines.vllm.processes import Cleanup, cancel_file
from easyrl.engines.vllm.sizes import cache_bytes
from easyrl.model.files import load_eos_token_ids, load_model_config
from easyrl.model.mixers import elements_of_states
from easyrl.model.pictures import placeholders_of
from easyrl.model.processor import load_processor
from easyrl.model.text_part import whole_class
from easyrl.processes import maybe_sleep
from easyrl.types import Completion

STEP_SECONDS = 0.02  # longest wait of `step` for a group: the rollout worker has other work too
POLL_SECONDS = 0.1  # between checks, during a call into vLLM's processes, whether these are alive
GRACE_SECONDS = 3.0
"""Added to the bound of a weight update: the weight channel's own timeout has a better message."""
SHUTDOWN_SECONDS = 1.0  # grace period for vLLM's processes; then they are killed
EXTENSION = f"{WORKER}.WorkerExtension"
NORMALIZE = "mm_device_do_normalize"
"""vLLM 0.32's argument for scaling pixels in the model itself, by default on. It reads mean and
deviation in the processor's file alone: where these are the defaults of the processor's class, it
does not scale at all."""
NO_OTHER_MEDIA = {"video": 0, "audio": 0}  # vLLM then needs no memory for them
LEAST_FRACTION = 0.01  # vLLM wants this part free, and does not use it if the cache's size is given
USE_EMBEDDED = "use rollout.engine=embedded"
NUM_OPEN_PICTURES = 8  # that are kept open: sequences of a group follow each other


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GroupRequest
    sample_index: int
    limit: int
    max_turn_tokens: int | None = None  # of its next turn
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Append sampled tokens or, without log-probabilities, inserted ones."""
        self.token_ids += token_ids
        self.logprobs += logprobs or [0.0] * len(token_ids)
        self.is_sampled += [bool(logprobs)] * len(token_ids)


class VllmEngine(Engine):
    def __init__(
        self,
        model: ModelSpec,
        sampling: SamplingSettings,
        *,
        device: str,
        max_concurrent_groups: int,
        num_generations: int,
        stop_at: int | None = None,
        special_stops: Collection[int] = (),
        memory_fraction: float = 0.9,
        is_device_shared: bool = False,
        tensor_parallel_size: int = 1,
        log_file: str | None = None,
        is_deterministic: bool = False,
        number: int = 0,
    ) -> None:
        """Start vLLM's processes and load the model. `stop_at`: a token that ends completions,
        besides the model's own; `special_stops`: stop strings that are tokens without a text.
        `memory_fraction`: part of an accelerator's memory for weights and KV cache;
        `is_device_shared`: the trainer uses it too. `number`: engines with one seed and different
        numbers draw different samples. Raises ConfigError if vLLM does not support the model or has
        too little memory for it."""
        super().__init__(sampling)
        self.policy_version = -1
        self._is_deterministic = is_deterministic
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself does not keep them
        self._sampled: SimpleQueue[Any] = SimpleQueue()
        """For each request: the sequence and vLLM's output, or an exception."""
        self._to_sample: deque[_Sequence] = deque()  # not handed over yet
        self._suspended: dict[tuple[tuple[int, ...], int], _Sequence] = {}  # by group and sample
        self._num_in_flight = 0  # requests that vLLM has
        self._verifier = ChecksumVerifier()
        self._timeout_seconds = math.inf  # of a weight update
        self._engine: Any = None
        self._model = model
        self._open_picture = lru_cache(NUM_OPEN_PICTURES)(open_picture)
        self._log = EngineLog(log_file)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm").start()
        kind, _, _ = device.partition(":")
        config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
        tower_arguments, banned = media_settings(model, config, sampling, kind)
        has_states = elements_of_states(config.get_text_config().to_dict()) > 0
        end_tokens = {*load_eos_token_ids(model.path, config)}
        if stop_at is not None:
            end_tokens.add(stop_at)
        self._parameters = sampling_parameters(sampling, end_tokens.union(special_stops))
        self.end_tokens = sorted(end_tokens)
        num_rows = max_concurrent_groups * num_generations
        max_tokens = sampling.max_sequence_length
        executor = "OneProcessExecutor" if tensor_parallel_size == 1 else "ManyProcessesExecutor"
        logprobs_mode = "raw_logprobs" if sampling.truncates else "processed_logprobs"
        num_cache_bytes = cache_bytes(
            model.path,
            model.dtype,
            num_rows,
            max_tokens,
            device=device,
            shared_part=memory_fraction if is_device_shared else None,
            has_tower=model.has_pictures,
            trust_remote_code=model.trust_remote_code,
        )
        self._cleanup = Cleanup()
        try:
            arguments = AsyncEngineArgs(
                model=loadable_model(model.path),
                trust_remote_code=model.trust_remote_code,
                dtype=model.dtype,
                seed=_seed_of(sampling.seed, (number,)) % 2**32,
                max_model_len=max_tokens,
                max_num_seqs=num_rows,
                generation_config="vllm",  # ignore the model's own sampling defaults
                logprobs_mode=logprobs_mode,
                skip_tokenizer_init=not (sampling.stop or model.has_pictures),
                async_scheduling=False if is_deterministic else None,
                enable_prefix_caching=can_cache_prefixes(kind, has_states=has_states),
                kv_cache_memory_bytes=num_cache_bytes,
                gpu_memory_utilization=LEAST_FRACTION if is_device_shared else memory_fraction,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend=f"{WORKER}.{executor}",
                worker_extension_cls=EXTENSION,
                weight_transfer_config={"backend": BACKEND},
                disable_log_stats=True,
                **tower_arguments,
                **device_arguments(kind, max_tokens, has_states=has_states),
            )
            self._engine = self._call(_make_engine(arguments))
        except Exception as error:
            self._cleanup.close()
            raise self._log.start_error(model.path, error) from error
        self._cleanup.stop_marking()
        if kind == devices.ASCEND:  # its sampler is created without `logprobs_mode`
            self._call_workers("easyrl_set_logprobs_mode", logprobs_mode)
        if sampling.truncates or banned:
            divisor = (sampling.temperature or 1.0) if sampling.truncates else 1.0
            self._call_workers("easyrl_change_logits", divisor, sorted(banned))
        if model.has_trained_tower:
            self._call_workers("easyrl_update_tower")

    @property
    def has_work(self) -> bool:
        return self.can_step or bool(self._suspended)

    @property
    def can_step(self) -> bool:
        return bool(self._waiting or self._to_sample or self._num_in_flight or self._finished)

    def step(self) -> list[FinishedGroup]:
        """Return finished groups; wait up to STEP_SECONDS for the first group or turn."""
        has_new = self._waiting or self._to_sample
        if has_new and not (self._num_in_flight and self._is_deterministic):
            self._call(self._start_waiting())
        num_turns = len(self._turns)
        deadline = time.monotonic() + STEP_SECONDS
        with contextlib.suppress(Empty):
            while self._num_in_flight:
                has_news = self._finished or len(self._turns) > num_turns
                left = 0.0 if has_news else max(0.0, deadline - time.monotonic())
                result = self._sampled.get(timeout=left)
                self._num_in_flight -= 1
                if isinstance(result, EngineDeadError):
                    raise self._log.end_error()
                if isinstance(result, BaseException):
                    raise result
                self._end_turn(*result)
        return self._take_finished()

    def _end_turn(self, sequence: _Sequence, sampled: CompletionOutput) -> None:
        tokens = sampled.token_ids
        reason = sampled.finish_reason
        assert reason in ("stop", "length"), reason
        logprobs = []
        for token, candidates in zip(tokens, sampled.logprobs, strict=True):
            logprobs.append(candidates[token].logprob)
        sequence.append(tokens, logprobs)
        self.num_completion_tokens += len(tokens)
        request = sequence.request
        index = sequence.sample_index
        is_cut = reason == "length"
        if not request.has_turns or (is_cut and request.max_turn_tokens is None):
            self._end_sequence(sequence, reason)
            return
        self._suspended[request.key, index] = sequence
        num_left = sequence.limit - len(sequence.token_ids)
        ids = np.array(tokens, dtype=np.int32)
        self._turns.append(Turn(request.key, index, ids, num_left, is_cut))

    def resume(self, turn: Turn, tokens: Sequence[int], max_turn_tokens: int | None = None) -> None:
        assert 0 < len(tokens) < turn.num_left
        sequence = self._suspended.pop((turn.key, turn.sample_index))
        sequence.max_turn_tokens = max_turn_tokens
        sequence.append(tokens)
        self._to_sample.append(sequence)

    def end(
        self, turn: Turn, reason: Literal["stop", "length"], *, may_continue: bool = False
    ) -> None:
        # vLLM keeps blocks of ended sequences for the prompts that begin with their tokens.
        self._end_sequence(self._suspended.pop((turn.key, turn.sample_index)), reason)

    def _end_sequence(self, sequence: _Sequence, reason: Literal["stop", "length"]) -> None:
        completion = Completion(
            np.array(sequence.token_ids, dtype=np.int32),
            np.array(sequence.logprobs, dtype=np.float32),
            reason,
            np.array(sequence.is_sampled, dtype=np.bool_),
        )
        if self._complete(sequence.request, sequence.sample_index, completion):
            self.num_prompt_tokens += len(sequence.request.prompt_ids)

    async def _start_waiting(self) -> None:
        if self._is_deterministic:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            # It would depend on earlier prompts, which a worker's replacement has not seen. So
            # would the pictures that are encoded together.
            await self._reset_prefix_cache(self.policy_version)
            if self._model.has_pictures:
                await self._engine.reset_encoder_cache()
        for request in self._waiting:
            first_tokens = request.first_tokens or [()] * request.num_generations
            limits = request.limits(self.sampling)
            for index, (limit, tokens) in enumerate(zip(limits, first_tokens, strict=True)):
                sequence = _Sequence(request, index, limit, request.max_turn_tokens)
                sequence.append(tokens)
                self._to_sample.append(sequence)
        self._waiting.clear()
        for each in self._to_sample:
            maybe_sleep()
            request = each.request
            count = len(each.token_ids)
            key = (*request.key, each.sample_index, count)
            if request.has_turns:
                seed = _seed_of(self.sampling.seed, key)
            else:
                seed = _seed_of(self.sampling.seed, request.key) + each.sample_index
            parameters = SamplingParams(
                **self._parameters,
                max_tokens=min(each.limit - count, each.max_turn_tokens or each.limit),
                seed=seed if self._is_deterministic else None,
            )
            name = "-".join(map(str, key))
            outputs = await self._engine.add_request(name, self._prompt_of(each), parameters)
            self._num_in_flight += 1
            task = asyncio.create_task(self._collect(each, outputs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._to_sample.clear()
        if self._is_deterministic:
            await self._engine.resume_generation()

    def _prompt_of(self, sequence: _Sequence) -> dict[str, Any]:
        """Return a request's prompt in vLLM's form."""
        request = sequence.request
        media = request.media
        if media is None or not media.pictures:
            return {"prompt_token_ids": [*request.prompt_ids, *sequence.token_ids]}
        return {
            "prompt_token_ids": [*media.short_ids, *sequence.token_ids],
            "multi_modal_data": {"image": [self._open_picture(each) for each in media.pictures]},
            # vLLM processes and encodes a picture once while it knows its name.
            "multi_modal_uuids": {"image": [each.digest for each in media.pictures]},
        }

    async def _collect(self, sequence: _Sequence, outputs: Any) -> None:
        """Put the sequence and what was sampled, or the exception, into the queue."""
        try:
            output = await outputs.get()  # the only one: RequestOutputKind.FINAL_ONLY
            (sampled,) = output.outputs
            check_prompt(sequence.request, sequence.token_ids, output.prompt_token_ids)
            if hasattr(sampled, "weight_versions"):  # from vLLM 0.32 on: those of its tokens
                versions = {span.version for span in sampled.weight_versions or ()}
            else:  # no update happens while a request is in flight, so this version sampled it
                versions = {await self._engine.get_weight_version()}
            is_as_loaded = self.policy_version < 0 and len(versions) <= 1  # no update yet
            if versions != {str(self.policy_version)} and not is_as_loaded:
                raise RuntimeError(
                    f"expected completions sampled from policy {self.policy_version}, got one from "
                    f"weights {', '.join(sorted(map(str, versions)))}"
                )
            self._sampled.put((sequence, sampled))
        except BaseException as error:
            self._sampled.put(error)

    def join_weights(self, endpoint: WeightEndpoint, is_cancelled: Callable[[], bool]) -> None:
        self._timeout_seconds = endpoint.timeout_seconds + GRACE_SECONDS
        self._generation = endpoint.generation
        self._is_cancelled = is_cancelled
        self._call(self._join(endpoint), is_cancelled=is_cancelled)

    def receive_weights(self, policy_version: int) -> None:
        self._check_idle()
        self._call(self._update(policy_version), self._timeout_seconds, self._is_cancelled)
        self.policy_version = policy_version

    async def _join(self, endpoint: WeightEndpoint) -> None:
        request = WeightTransferInitRequest(init_info={"endpoint": asdict(endpoint)})
        await self._engine.init_weight_transfer_engine(request)
        await self._results()

    async def _update(self, policy_version: int) -> None:
        engine = self._engine
        await engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"policy_version": policy_version})
        await engine.update_weights(update)
        await engine.finish_weight_update(weight_version=str(policy_version))
        await self._reset_prefix_cache(policy_version)
        if self._model.has_trained_tower:
            await engine.reset_encoder_cache()
        held = []
        for _, rows, unmatched in await self._results():
            if unmatched and self.policy_version < 0:
                raise ConfigError(
                    f"model.path: {len(unmatched)} of the model's weights have other names in vLLM "
                    f"than in transformers ({', '.join(unmatched[:3])}), so vLLM cannot receive "
                    f"updates; {USE_EMBEDDED}"
                )
            held.append([ParameterChecksum(*row) for row in rows])
        self._verifier.check(policy_version, held)

    async def _results(self) -> list[tuple[str, list[Any], list[str]]]:
        """Return each rank's `easyrl_results`. Raises the first error of the weight channel."""
        results = await self._engine.collective_rpc("easyrl_results")
        for error, _, _ in results:
            if error:
                raise ConnectionError(error)
        return results  # type: ignore[no-any-return]

    async def _reset_prefix_cache(self, policy_version: int) -> None:
        if await self._engine.reset_prefix_cache() is False:
            raise RuntimeError(f"weights {policy_version}: vLLM did not clear its prefix cache")

    def _call(
        self,
        coroutine: Coroutine[Any, Any, Any],
        timeout_seconds: float = math.inf,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Run a coroutine on vLLM's loop. `is_cancelled` ends its waits in the weight channel.
        Raises RuntimeError if no rank has made progress (`worker.whole_weights`) for this long."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        last = 0  # time of the newest progress, as the file system gives it
        changed_at = time.monotonic()
        try:
            while not wait([future], POLL_SECONDS).done:
                if self._engine is not None and self._engine.errored:  # it will not answer
                    raise self._log.end_error()
                if is_cancelled():
                    cancel_file(self._cleanup.folder, self._generation).touch()
                newest = Path(self._cleanup.folder).stat().st_mtime_ns
                if newest != last:
                    last = newest
                    changed_at = time.monotonic()
                if time.monotonic() - changed_at > timeout_seconds:
                    raise RuntimeError(
                        "weight update: the rollout worker waits for vLLM, which has made no "
                        f"progress for {timeout_seconds:.0f} s (runtime.timeout_seconds)"
                    )
            return future.result()
        except EngineDeadError:  # it had died before the call
            raise self._log.end_error() from None

    def _call_workers(self, method: str, *arguments: Any) -> None:
        self._call(self._engine.collective_rpc(method, args=arguments))

    def close(self) -> None:
        self._engine.shutdown(timeout=SHUTDOWN_SECONDS)
        self._engine = None
        self._cleanup.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _make_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def media_settings(
    model: ModelSpec, config: Any, sampling: SamplingSettings, kind: str
) -> tuple[dict[str, Any], set[int]]:
    """Return vLLM's arguments for towers, and the tokens that stand for parts of pictures."""
    if not model.has_pictures:
        is_whole = whole_class(config, trust_remote_code=model.trust_remote_code) is None
        return {} if is_whole else {"language_model_only": True}, set()
    processor = load_processor(
        model.path,
        max_image_pixels=model.max_image_pixels,
        trust_remote_code=model.trust_remote_code,
    )
    assert processor is not None, "checked before the run"
    arguments: dict[str, Any] = {
        # A picture has one token at least.
        "limit_mm_per_prompt": {"image": sampling.max_prompt_length, **NO_OTHER_MEDIA},
        "mm_processor_kwargs": processor.size_settings or None,
        # It encodes the largest possible pictures, to measure what an accelerator needs.
        "skip_mm_profiling": kind == "cpu",
    }
    if hasattr(AsyncEngineArgs, NORMALIZE):
        arguments[NORMALIZE] = False
    return arguments, placeholders_of(config) | processor.placeholder_ids


def check_prompt(
    request: GroupRequest, token_ids: Sequence[int], used: Sequence[int] | None
) -> None:
    """Raise ConfigError if vLLM used other tokens than the prompt's and those behind it. It puts in
    the placeholders of pictures by itself."""
    if request.media is None or not request.media.pictures:
        return
    expected = [*request.prompt_ids, *token_ids]
    if list(used or ()) != expected:
        raise ConfigError(
            "rollout.engine: expected embedded, because vLLM and the processor make different "
            f"tokens of a prompt with pictures ({len(used or ())} and {len(expected)}), got vllm"
        )


def sampling_parameters(sampling: SamplingSettings, end_tokens: set[int]) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that all requests share."""
    temperature = sampling.temperature
    if sampling.truncates and temperature:
        temperature = 1.0  # the logits are divided by it
    return {
        "temperature": temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "logprobs": 0,  # of the sampled token only
        "stop_token_ids": sorted(end_tokens),
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }


def _seed_of(seed: int, key: tuple[int, ...]) -> int:
    """Seed of a group, whose sample i has this seed plus i; with turns, of one turn."""
    (word,) = np.random.SeedSequence((seed, *key)).generate_state(1, np.uint64)
    return int(word) >> 2


class EngineLog:
    """Make errors whose reason is the message of the last exception in vLLM's log.

    `file`: where vLLM's processes write. None: to the terminal, so that no reason is found.
    """

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file)
        self._start = 0 if self._file is None else self._file.stat().st_size
        self._log_hint = "" if file is None else f" (more in {file})"

    def _reason(self, default: str) -> str:
        if self._file is None:
            return default
        text = self._file.read_bytes()[self._start :].decode(errors="replace")
        reasons: list[str] = [default, *re.findall(r"\w*Error: (?!Engine)(.+)", text)]
        return reasons[-1].strip()

    def end_error(self) -> RuntimeError:
        reason = self._reason("unknown reason")
        return RuntimeError(f"vLLM has ended: {reason}{self._log_hint}")

    def start_error(self, model: str, error: Exception) -> Exception:
        if isinstance(error, ValueError | NotImplementedError):  # vLLM refuses its configuration
            # The first sentence of the message; the rest may list everything that is supported.
            # pydantic puts its own first lines before it.
            text = re.split(r"Value error, |Assertion failed, ", str(error))[-1].strip()
            text = re.split(r"\. | \[type=|\n", text)[0]
            return ConfigError(f"model.path: vLLM cannot serve '{model}': {text}; {USE_EMBEDDED}")
        reason = self._reason(str(error))
        if reason.startswith("Free memory"):
            return ConfigError(
                f"rollout.memory_fraction: expected so much free memory, got less: {reason}; end "
                "the programs that use the device, or use a smaller fraction"
            )
        if "memory" in reason.lower() or "KV cache" in reason:
            return ConfigError(
                f"rollout.memory_fraction: too little memory for '{model}' and a KV cache: "
                f"{reason}; use a larger fraction, shorter sequences or a smaller model"
            )
        return RuntimeError(f"vLLM did not start: {reason}{self._log_hint}")
