"""The data that flows through a run: Prompt → Completion × G → RolloutGroup → MicroBatch.

Plain data in NumPy arrays. Imports no torch.

Shapes: P prompt tokens, R tokens of one completion, G completions of one prompt,
ΣR all completion tokens of a group, N nodes of its tree; F image files of a group, ΣB bytes of
them, C places where pictures are shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.layout.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

Messages = list[dict[str, Any]]
"""A chat: `[{"role": "user", "content": "..."}]`. The content of a message with pictures is a list
of parts: `[{"type": "image"}, {"type": "text", "text": "..."}]`."""
PICTURE_PART: Mapping[str, str] = {"type": "image"}
"""The part of a content that stands for the prompt's next picture."""
DIGEST = "digest"
"""Key of such a part, in the messages of an episode, with the digest of the picture's file."""
PICTURE_TEXT = "<image>"
"""What is shown for a picture where a prompt is shown as text."""
MAX_REFERENCE = 2000
"""Longest column that is written to samples.jsonl, in characters of JSON."""


def text_of(completion: str | Messages) -> str:
    """Return a completion's text; of a chat or an episode, what the model has written last."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message["role"] == "assistant":
            return str(message["content"])
    return ""


def is_picture_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def shown_content(content: Any) -> str:
    """Return the content of a message as a text for people, with `<image>` for each picture."""
    if not isinstance(content, list):
        return str(content)
    shown = []
    for part in content:
        shown.append(PICTURE_TEXT if is_picture_part(part) else str(part.get("text", "")))
    return "".join(shown)


def short_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns whose values are short and can be written as JSON."""
    found = {}
    for name, value in columns.items():
        with contextlib.suppress(TypeError, ValueError):  # no JSON
            if len(json.dumps(value, allow_nan=False)) <= MAX_REFERENCE:
                found[name] = value
    return found


def as_text(content: str | Messages) -> str:
    """Return a prompt or a completion as one text; of a chat, a line or more for each message."""
    if isinstance(content, str):
        return content
    lines = []
    for message in content:
        lines.append(f"{message['role']}: {shown_content(message['content'])}")
    return "\n".join(lines)


class BrokenInvariant(RuntimeError):
    """An invariant (docs/design.md) does not hold: the run ends, and nothing is retried."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """An image file that a prompt shows."""

    data: bytes  # of the file: PNG, JPEG, ...

    @property
    def digest(self) -> str:
        """SHA-256 of the file: pictures with the same digest are the same picture."""
        return hashlib.sha256(self.data).hexdigest()


def picture_part(picture: Picture) -> dict[str, str]:
    """Return the part of a content that stands for this picture, in the messages of an episode."""
    return {"type": "image", DIGEST: picture.digest}


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """What a prompt with pictures has beside its tokens."""

    pictures: tuple[Picture, ...]  # in the order of their placeholders
    arrays: Mapping[str, np.ndarray]
    """What the checkpoint's processor makes of the pictures beside token ids, by the names of the
    model's arguments (`pixel_values`, `image_grid_thw`, ...), for this prompt alone."""
    short_ids: tuple[int, ...] = ()
    """The prompt's tokens with one placeholder for each picture: what an engine gets that runs a
    processor of its own."""


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """Pictures that are encoded together, and the tokens among which their features stand."""

    pictures: tuple[Picture, ...]
    start: int  # number of the first of these tokens
    stop: int  # behind the last one


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, at its index in the run's stream of prompts."""

    index: int  # in the stream, counted over the whole run; it seeds sampling
    content: str | Messages
    columns: Mapping[str, Any]  # the other columns of the row, passed to the reward functions
    teacher_content: str | Messages | None = None  # its own prompt (`algorithm.teacher_prompt`)
    pictures: tuple[Picture, ...] = ()  # in the order of the content parts that stand for them

    def references(self) -> dict[str, Any]:
        """Return the columns that are shown beside completions: all but long ones."""
        return short_columns(self.columns)


class GroupKey(NamedTuple):
    """Key of a group in a rollout worker. It seeds the group's sampling."""

    kind: int  # 0: it is trained, 1: it is part of an evaluation
    number: int  # of the iteration or the evaluation round
    prompt_index: int


IndexedPrompt = tuple[int, Prompt]  # a group's index in the iteration, and its prompt


def no_tokens() -> Int32:
    return np.zeros(0, dtype=np.int32)


def no_bytes() -> Bytes:
    return np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that follow one prompt, once: those that the model sampled and, in an episode,
    those inserted between its turns."""

    token_ids: Int32  # [R], with the end-of-sequence token or stop string
    logprobs: Float32  # [R], of softmax(logits / temperature)
    finish_reason: Literal["stop", "length"]
    """`stop`: end token or stop string; `length`: cut off at the maximum length."""
    is_sampled: Bool  # [R], False for inserted tokens, whose log-probability is 0
    tree: TokenTree | None = None
    """Of an agent's episode: the tree of the prompt's tokens and its own, in their order. None:
    each token continues the one before it."""

    @property
    def num_sampled(self) -> int:
        return int(self.is_sampled.sum())

    @property
    def num_inserted(self) -> int:
        """Number of tokens that come from an environment, a tool, or a later request."""
        return len(self.token_ids) - self.num_sampled

    def num_read_before(self, num_prompt_tokens: int) -> int:
        """Return how many tokens the model had read when it sampled its first one: the prompt, and
        what an observation or an agent's own first request adds to it. 0 if it sampled none."""
        if not self.is_sampled.any():
            return 0
        first_sampled = int(self.is_sampled.argmax())
        if self.tree is None:
            return num_prompt_tokens + first_sampled
        return int(self.tree.positions[num_prompt_tokens + first_sampled])


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The G scored rollouts of one prompt: what the ring buffer carries."""

    iteration: int
    policy_version: int
    group_index: int  # in the iteration, from 0; it orders groups; a replacement keeps it
    prompt_index: int
    prompt_ids: Int32  # [P]
    completion_lengths: Int32  # [G]
    completion_ids: Int32  # [ΣR], completion after completion
    rollout_logprobs: Float32  # [ΣR], what the engine reported
    loss_mask: Bool  # [ΣR], False where a token was not sampled by the policy
    rewards: Float32  # [G]
    advantages: Float32  # [G]
    truncated: Bool  # [G], True where the completion was cut off
    node_lengths: Int32  # [N]
    node_parents: Int32  # [N]
    """The tree of `prompt_ids` followed by `completion_ids` (`layout.tree`): the prompt, then the
    completions, each of one node or of several. A node continues the prompt or its own completion,
    or begins a context of its own."""
    teacher_prompt_ids: Int32 = field(default_factory=no_tokens)  # [P'], empty: `prompt_ids`
    picture_bytes: Bytes = field(default_factory=no_bytes)  # [ΣB]
    """The image files that are shown, one after the other."""
    picture_lengths: Int32 = field(default_factory=no_tokens)  # [F] bytes of each of these files
    shown_files: Int32 = field(default_factory=no_tokens)  # [C] number of each place's file
    shown_starts: Int32 = field(default_factory=no_tokens)
    """[C] number of the place's first token, in `prompt_ids` followed by `completion_ids`. Pictures
    that are encoded together, as those of a row's prompt, have the same tokens."""
    shown_stops: Int32 = field(default_factory=no_tokens)  # [C] behind the place's last token

    @property
    def pictures(self) -> tuple[PlacedPictures, ...]:
        """Where pictures are shown, in the order of the tokens, with copies of their files."""
        files = self._picture_files()
        pictures_at = dict[tuple[int, int], list[Picture]]()  # by start and stop
        numbers = self.shown_files.tolist()
        starts = self.shown_starts.tolist()
        stops = self.shown_stops.tolist()
        for number, start, stop in zip(numbers, starts, stops, strict=True):
            shown = pictures_at.setdefault((start, stop), [])
            shown.append(files[number])
        placed = list[PlacedPictures]()
        for (start, stop), shown in pictures_at.items():
            placed.append(PlacedPictures(tuple(shown), start, stop))
        return tuple(placed)

    def _picture_files(self) -> list[Picture]:
        files = list[Picture]()
        start = 0
        for length in self.picture_lengths.tolist():
            stop = start + length
            files.append(Picture(self.picture_bytes[start:stop].tobytes()))
            start = stop
        return files

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.node_lengths, self.node_parents)

    def completion_slices(self) -> Sequence[slice]:
        """Return the slice of each completion in the [ΣR] arrays."""
        ends = np.cumsum(self.completion_lengths).tolist()
        return [slice(*each) for each in pairwise([0, *ends])]

    def trained_mask(self, *, mask_truncated: bool) -> Bool:
        """Return `loss_mask` [ΣR]; with `mask_truncated`, False for all tokens of a truncated
        completion (overlong filtering, DAPO, arXiv 2503.14476, section 3.4)."""
        if not mask_truncated:
            return self.loss_mask
        mask: Bool = self.loss_mask & np.repeat(~self.truncated, self.completion_lengths)
        return mask


@dataclass(frozen=True, slots=True)
class RowPictures:
    """Pictures of a packed row that are encoded together, and the tokens among which their features
    stand: a whole prompt, or the tokens of one picture."""

    pictures: tuple[Picture, ...]
    start: int  # the first of these tokens
    stop: int  # behind the last one
    end: int  # behind the last token of the row that continues them
    arrays: Mapping[str, np.ndarray] | None = None
    """As in `PromptMedia`. None: they are made of the files where they are needed."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward: rollouts packed into one row (`layout.row`).
    Shapes: T tokens of the row, K completion tokens in it, C completions."""

    input_ids: np.ndarray  # [T] int64
    tree: TokenTree  # of the row, in depth-first order
    logits_at: np.ndarray  # [K] int64: positions whose logits predict the completion tokens
    targets: np.ndarray  # [K] int64: the completion tokens
    completion_of_token: np.ndarray  # [K] int64 in 0..C-1
    rollout_logprobs: Float32  # [K]
    loss_mask: Bool  # [K]
    advantages: Float32  # [K], of the token's completion
    for_teacher: MicroBatch | None = None
    """The same completions behind the teacher's prompts; None: its prompts are the same."""
    pictures: tuple[RowPictures, ...] = ()  # in the row's order

    @property
    def num_completions(self) -> int:
        return int(self.completion_of_token[-1]) + 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model, under the name and shape that checkpoints and engines use."""

    name: str
    reference: Tensor  # gives shape and dtype
    materialize: Callable[[], Tensor]  # returns the weight: the stored tensor, or one computed now
    is_trained: bool

    @classmethod
    def stored(cls, name: str, tensor: Tensor, *, is_trained: bool) -> Weight:
        return cls(name, tensor, lambda: tensor, is_trained)


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Elements `start : start + len(values)` of the flattened weight `name`."""

    name: str
    start: int
    values: Tensor  # [n], valid until the next piece is read
    shape: tuple[int, ...] = ()  # of the whole weight
