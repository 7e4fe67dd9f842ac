"""Models with a text model inside, without their towers: what is loaded, and what is kept.

    class of the whole model ──on meta──► names of all weights ◄──transformers' mapping── files
            │                                     │
    towers removed: text model and head           └─► loaded: of the text model
    under the same names                              kept: all others (towers, draft heads)

A tower (of pictures, of sound) is a module that the logits of a text do not need. It is neither
built nor loaded nor trained: what a run writes has its weights as the source has them
(`kept_parts`). The class says which of its modules is the decoder.

With pictures the model is loaded whole (`loading`). A frozen tower is kept all the same.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from easyrl.config import ConfigError
from easyrl.data.hub import KEY, download_small_files, model_folder
from easyrl.model.kept_parts import PROCESSOR_FILES, KeptParts
from easyrl.model.pictures import frozen_tower, text_parts, tower_parameters
from easyrl.model.text_part import picture_class, whole_class
from easyrl.model.weight_files import read_headers, weight_files


class TowerUsed(AttributeError):
    """A class computes with its tower although there is nothing but text."""


class Tower(nn.Module):
    """Stand in for a tower, without weights."""

    # Some classes ask for these before they look for pictures.
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise TowerUsed(*error.args) from None

    def forward(self, *_: Any, **__: Any) -> Any:
        raise TowerUsed("a tower is called")


def model_class(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the class that loads a model for training, with transformers' `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    whole = whole_class(config, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM if whole is None else without_towers(whole)


def meta_model(
    config: Any, *, trust_remote_code: bool = False, has_trained_tower: bool = False
) -> Any:
    """Make the model of a configuration, as it is trained, on torch's `meta` device, where it takes
    no memory. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    whole = whole_class(config, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        if has_trained_tower and whole is not None:
            return whole._from_config(config)
        if whole is None:
            return auto.from_config(config, trust_remote_code=trust_remote_code)
        return without_towers(whole)._from_config(config)


@cache
def without_towers(whole: type) -> Any:
    """Return a class like `whole` whose models have no towers. Its name and module are the same:
    transformers looks up by them how weights are named."""

    def init(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        with making(whole):
            whole.__init__(self, config, *arguments, **options)  # type: ignore[misc]
            remove_towers(self)

    @wraps(whole.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        decoder = self.get_decoder()
        if decoder.get_output_embeddings() is not None:
            # A whole causal model is inside. The class itself may demand pictures.
            return decoder(*arguments, **options)
        if "_as_text" not in vars(self):
            try:
                return whole.forward(self, *arguments, **options)  # type: ignore[attr-defined]
            except TowerUsed:  # to no effect for text (Gemma 3n)
                vars(self)["_as_text"] = _as_text_model(self)
        return vars(self)["_as_text"](*arguments, **options)

    members = {"__init__": init, "forward": forward, "__module__": whole.__module__}
    return type(whole.__name__, (whole,), members)


def _as_text_model(model: Any) -> Any:
    """Return transformers' model of the text model's type, with the decoder and the head of
    `model`. Raises TowerUsed if transformers has no such class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    decoder = model.get_decoder()
    if type(decoder.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TowerUsed(f"{type(model).__name__} computes with its tower for text too")
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
    with torch.device("meta"):
        text_model = text_class(decoder.config)
    setattr(text_model, text_model.base_model_prefix, decoder)
    text_model.set_output_embeddings(model.get_output_embeddings())
    return text_model


@contextmanager
def making(whole: type) -> Iterator[None]:
    """Let transformers make a model of the class `whole`, with a `Tower` in place of each tower for
    which a library is missing. Raises ConfigError if it cannot make the model."""
    from transformers import AutoModel

    auto: Any = AutoModel
    make = auto.from_config

    def make_or_stand_in(config: Any, **options: Any) -> Any:
        try:
            return make(config, **options)
        except ImportError:
            return Tower(config)

    is_nested = "from_config" in vars(auto)
    auto.from_config = make_or_stand_in
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of many types, depending on the class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{KEY}: transformers cannot make a {whole.__name__} to train its text model: {reason}"
        ) from error
    finally:
        if is_nested:
            auto.from_config = make
        else:
            del auto.from_config  # the base class has it


def remove_towers(model: Any) -> None:
    """Put a `Tower` in place of each module that is neither decoder, head nor embedding, and has
    none of them inside."""
    _remove_others(model, set(text_parts(model)))
    left = {name for name, _ in named_tensors(model)}
    tied = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {
        name: source for name, source in tied if name in left and source in left
    }


def _remove_others(module: nn.Module, needed: set[nn.Module]) -> None:
    for name, child in module.named_children():
        if child in needed:
            continue
        if needed.isdisjoint(child.modules()):
            setattr(module, name, Tower(getattr(child, "config", None)))
        else:
            _remove_others(child, needed)
    for name, _ in [*module.named_parameters(recurse=False)]:  # such as an embedding of line ends
        setattr(module, name, None)
    module._is_hf_initialized = True  # type: ignore[assignment]  # transformers leaves it as it is


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def find_kept_parts(path: str, model: Any) -> KeptParts | None:
    """Open what a run keeps of the folder of `path`, from which `model` was loaded just now: what
    is not loaded, and a frozen tower; None: all of it is loaded and trained."""
    folder = model_folder(path)
    headers = read_headers(folder, is_whole=False)
    names_in_class = _names_in_class(model, headers)
    frozen = set(frozen_tower(model))
    trained = {
        name for name, weight in model.state_dict(keep_vars=True).items() if weight not in frozen
    }
    kept = {name for name, found in names_in_class.items() if trained.isdisjoint(found)}
    has_towers = any(isinstance(module, Tower) for module in model.modules())
    has_processor = has_towers or picture_class(model.config) is not None
    if not kept and not has_processor:
        return None
    download_small_files(path, PROCESSOR_FILES)  # the hub's clients have loaded the others
    return KeptParts(folder, weight_files(folder), kept)


def has_tower_weights(config: Any, names: Iterable[str]) -> bool:
    """Return whether parameters with these names, or adapters beside such, are of a tower in the
    model of a configuration."""
    if picture_class(config) is None:
        return False
    model = meta_model(config, has_trained_tower=True)
    tower = set(tower_parameters(model))
    modules = set[str]()
    for name, parameter in model.named_parameters():
        if parameter in tower:
            modules.add(name.rpartition(".")[0])
    return any(name.startswith(tuple(f"{module}." for module in modules)) for name in names)


class Parts(NamedTuple):
    """The weights of a model's files, by their names there."""

    loaded: frozenset[str]
    kept: frozenset[str]  # they have no place in what is trained
    missing: tuple[str, ...]  # names in the class of weights of towers that the files lack
    num_loaded: int  # elements of what is trained, tied weights once


def find_parts(config: Any, names: Iterable[str]) -> Parts:
    """Find which weights of a model's files, with these names, are loaded and which are kept."""
    whole = whole_class(config)
    with torch.device("meta"), making(whole):
        model = whole._from_config(config)
    names_in_class = _names_in_class(model, names)
    of_whole = {name for name, _ in model.named_parameters()}  # tied ones once
    ignored = model._keys_to_ignore_on_load_missing or ()
    remove_towers(model)
    trained = model.state_dict()
    loaded = set[str]()
    found = set[str]()
    for name, in_class in names_in_class.items():
        found.update(in_class)
        if not trained.keys().isdisjoint(in_class):
            loaded.add(name)
    of_towers = sorted(of_whole - trained.keys() - found)
    return Parts(
        frozenset(loaded),
        frozenset(names_in_class.keys() - loaded),
        missing=tuple(n for n in of_towers if not any(re.search(each, n) for each in ignored)),
        num_loaded=sum(weight.numel() for weight in model.parameters()),
    )


def _names_in_class(model: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """Return for each name in a model's files those in its class, as transformers maps them when it
    loads the files. A name that the class lacks has itself."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    in_class = model.state_dict()
    prefix = model.base_model_prefix
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    targets: dict[str, list[str]] = {}  # by a source pattern of a converter
    for converter in converters:
        targets |= dict.fromkeys(converter.source_patterns, converter.target_patterns)
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings depend on earlier names
        pattern: str | None
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, in_class)
        if renamed not in in_class and name in in_class:
            renamed, pattern = rename_source_key(name, [], [], prefix, in_class)
        found[name] = [renamed]
        if pattern is not None:  # one weight in the files may become several
            first = targets[pattern][0]
            found[name] = [renamed.replace(first, target) for target in targets[pattern]]
    return found
