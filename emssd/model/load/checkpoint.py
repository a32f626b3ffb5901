"""Reads config, weights and tokenizer of a folder or hub id, whole, or refuses them with one sentence."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from emssd.data.model_folder import WHAT_TO_GIVE, cannot_load, check_folder, check_layers, gguf_of, source_of
from emssd.errors import ConfigError, EmssdError, OutOfMemoryError
from emssd.model.hf.device_map import count_heads, shards_of
from emssd.model.hf.refusals import check_config, check_quantized, resolve_max_model_len
from emssd.model.load.checkpoint_files import check_json, files_read, has_vocabulary, json_fault, weights_fault
from emssd.model.load.gguf_model import converted_folder, load_packed, name_model, read_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emssd.data.model_options import ModelOptions

__all__ = ["files_of", "load_checkpoint", "load_tokenizer"]

_TRUST = (
    "it needs code that comes with the checkpoint; model.trust_remote_code=true (trust_remote_code=True in Python) "
    "runs that code, so set it only if you trust where it comes from"
)
# Older versions of Transformers stored these and newer ones compute them; the ignore lists of some models lack them.
_COMPUTED = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_TALKATIVE = ("modeling_utils", "distributed.tensor_parallel")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def load_checkpoint(
    options: ModelOptions,
    dtype: torch.dtype | None,
    *,
    num_shards: int = 1,
    packed: bool = False,
    accept: Callable[[Any], None] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer, see `emssd.model.load_model`; without a ``device_map``, to the host.

    Args:
        dtype: ``None`` takes the checkpoint's, and bfloat16 for a GGUF file.
        num_shards: each process of the group loads one of so many shards.
        packed: weights of a GGUF file stay packed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    path, trust = options.path, options.trust_remote_code
    source = source_of(path)
    check_folder(path)
    file = gguf_of(path, options.gguf_file)
    with _explained(path, "its config.json is none that Transformers can read"):
        if file is None:
            check_json(source)
            check_layers(path)
        elif options.weights == "int8":
            raise cannot_load(path, "its weights are rounded already; leave model.weights=int8 out")
        else:
            source = str(converted_folder(file, "config"))
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        if file is not None:
            read_rotary(file, config)
        check_quantized(path, config, options.device_map)
        if not trust or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:  # else only the code knows its class
            check_config(config, None)
        resolve_max_model_len(config, options.max_model_len)
        shards = {"distributed_config": shards_of(config, num_shards)} if num_shards > 1 else {}
    tokenizer = load_tokenizer(path, trust_remote_code=trust, gguf_file=options.gguf_file)
    if accept is not None:
        accept(tokenizer)
    problem = "Transformers cannot make the model of its config.json and weights"
    with _explained(path, problem, lambda: weights_fault(source)), _report_kept_back(path), _MadeEmpty():
        if file is not None and packed:
            loaded: Any = load_packed(file, config, dtype or torch.bfloat16)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(
                source if file is None else file.parent,
                dtype=dtype or ("auto" if file is None else torch.bfloat16),
                trust_remote_code=trust,
                ignore_mismatched_sizes=True,  # judged below, by name
                output_loading_info=True,
                device_map=options.device_map,
                **({} if file is None else {"gguf_file": file.name, "config": config}),
                **shards,
            )
    model, info = loaded
    _check_whole(path, info)
    if file is not None:
        name_model(model, file)
    if num_shards > 1:
        count_heads(model, num_shards)
    return model, tokenizer


def load_tokenizer(path: str, *, trust_remote_code: bool = False, gguf_file: str = "") -> Any:
    """The tokenizer of a model's folder or hub id; of a GGUF file that beside it, or else its own.

    Raises ConfigError: there is none, or it is damaged or needs code that is not trusted.
    """
    from transformers import AutoTokenizer

    source = source_of(path)
    if (file := gguf_of(path, gguf_file)) is not None:
        with _explained(path, "its tokenizer is none that Transformers can convert"):
            beside = has_vocabulary(str(file.parent))
            source = str(file.parent if beside else converted_folder(file, "tokenizer"))
    missing = (
        f"its tokenizer is missing: neither tokenizer.json nor a vocabulary of another kind is in {source}; save the "
        f"model's tokenizer there, with tokenizer.save_pretrained(folder)"
    )

    def fault() -> str | None:
        return json_fault(Path(source) / "tokenizer.json") if has_vocabulary(source) else missing

    with _explained(path, "its tokenizer is none that Transformers can read", fault):
        check_json(source)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        only_special = set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
    if only_special:  # Transformers makes such ones of nothing
        raise cannot_load(path, missing)
    return tokenizer


def files_of(path: str, gguf_file: str = "") -> list[Path]:
    """The files that loading `path` reads, in order; none of a hub id that is not on this machine."""
    from huggingface_hub import snapshot_download

    try:
        if (file := gguf_of(path, gguf_file)) is not None:
            return [file, *files_read(file.parent)]
        source = source_of(path)
        return files_read(Path(source if Path(source).is_dir() else snapshot_download(source, local_files_only=True)))
    except ConfigError:
        raise
    except (OSError, ValueError):  # it was not downloaded, or can be no id
        return []


@contextmanager
def _explained(path: str, problem: str, find_fault: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Turn any error inside into one sentence: that of `find_fault`, or the `problem` and the error.

    Reading a checkpoint runs code of several libraries on files that may hold anything.
    """
    try:
        yield
    except EmssdError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(f"there is no memory for the model {path!r}; take a smaller one or dtype") from error
    except Exception as error:
        sentence = _sentence(error)
        if "trust_remote_code" in str(error):
            why = _TRUST
        elif fault := find_fault():
            why = fault
        elif isinstance(error, ImportError):
            why = f"it needs a package that is not installed: {sentence}"
        elif isinstance(error, OSError):
            why = f"{sentence} {WHAT_TO_GIVE}"
        else:
            why = f"{problem} ({sentence.rstrip('.')})"
        raise cannot_load(path, why) from error


def _check_whole(path: str, info: Mapping[str, Iterable[Any]]) -> None:
    """Refuse weights that are not those of the config, by Transformers' report `info`. It would fill gaps at random."""
    mismatched = [
        f"{name} ({'x'.join(map(str, is_))} in place of {'x'.join(map(str, expected))})"
        for name, is_, expected in info["mismatched_keys"]
    ]
    unexpected = [name for name in info["unexpected_keys"] if not _COMPUTED.search(name)]
    faults = [
        ("are missing", list(info["missing_keys"])),
        ("have another shape than config.json says", mismatched),
        ("have no place in the model of config.json", unexpected),
    ]
    if reasons := [f"{_names(names)} {fault}" for fault, names in faults if names]:
        raise cannot_load(
            path,
            f"its weights are not those of its config.json: {'; '.join(reasons)}. Bring weights and config from one "
            f"place again; if you know that it is right so, save what Transformers makes of it with save_pretrained",
        )


def _names(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _sentence(error: Exception) -> str:
    """The message of `error` in one line; its type too, where the text alone would say little."""
    from huggingface_hub.errors import StrictDataclassError

    text = " ".join(_ANSI.sub("", str(error)).split())
    if not isinstance(error, (OSError, ValueError, ImportError, StrictDataclassError)):
        text = f"{type(error).__name__}: {text}"
    end = re.search(r"\.(?= [A-Z(])", text)  # the first sentence; a dot inside a file's name ends none
    text = text[: end.start()] if end else text
    return text[:300].rstrip(" :,.") + "."


class _MadeEmpty(TorchFunctionMode):
    """Leaves out random numbers for tensors without memory, which a checkpoint fills: PyTorch loads SymPy for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def _report_kept_back(path: str) -> Iterator[None]:
    """Silence Transformers' loggers of weights that do not fit and of tensor parallelism.

    Its report names tensors that it could not put together, as those of experts; its error does not.
    """
    loggers = [logging.getLogger(f"transformers.{name}") for name in _TALKATIVE]
    nothing = logging.Filter("nothing")  # by the name of the only logger that it would let through
    for logger in loggers:
        logger.addFilter(nothing)
    try:
        yield
    except RuntimeError as error:
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        info: Any = next((values["loading_info"] for values in frames if "loading_info" in values), None)
        if names := [*getattr(info, "conversion_errors", ())]:
            raise ValueError(f"what {_names(names)} are made of is missing in part, or has other shapes") from error
        if getattr(info, "mismatched_keys", ()):  # a tied one, say, which cannot be compared
            _check_whole(path, info.to_dict())
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(nothing)
