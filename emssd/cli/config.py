"""The run's options as dataclasses, and their place in Hydra's ConfigStore. Defaults live here and nowhere else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import yaml  # type: ignore[import-untyped]  # it has no stubs of its own
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from emssd.data.model_options import ModelOptions
from emssd.decoding.options import EngineOptions
from emssd.errors import ConfigError
from emssd.errors.faults import described
from emssd.errors.ranges import AtLeastOne, Meta
from emssd.hooks import PromptSourceSpec
from emssd.hooks.registry import KINDS, Registry
from emssd.sampling import SamplingParams

__all__ = [
    "DEFAULT_OUTPUT_DIR",
    "STDOUT",
    "DecodeConfig",
    "OnError",
    "RunConfig",
    "ServeConfig",
    "changed_options",
    "conf_dir",
    "no_size",
    "prompt_source",
    "register_configs",
    "structured",
]

STDOUT = "-"  # as output_dir
DEFAULT_OUTPUT_DIR = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"
_NO_ROW_OPTIONS = ("data.limit", "sampling.n", "model.tensor_parallel")
_ROW_OPTIONS = ("model", "prompt", "data", "chat_template", "sampling", "max_new_tokens", "stop", "ignore_eos")


class Check(str, Enum):
    """The run that the output is compared with."""

    greedy = "greedy"
    plain = "plain"


class OnError(str, Enum):
    """The effect of an invalid prompt on the run."""

    auto = "auto"
    fail = "fail"
    skip = "skip"


class Size(str, Enum):
    """The size of an experiment."""

    toy = "toy"
    small = "small"
    paper = "paper"
    shapes = "shapes"


@dataclass
class ExperimentConfig:
    """An experiment: a sweep whose runs are kept as rows, to be compared.

    Attributes:
        name: what the rows and their report call it.
        title: what it shows, in a line.
        simulated: the paper's numerical simulation, which decodes nothing.
        sizes: what the sweep of each size covers; the file of the experiment says how.
    """

    name: str = MISSING
    title: str = ""
    simulated: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskConfig:
    """The data of an experiment.

    Attributes:
        name: what the rows and their report call it.
        data: the choice of ``data=`` that belongs to it; with another one, the name would be wrong.
    """

    name: str = MISSING
    data: str = MISSING


def _sampling_config() -> type:
    """`SamplingParams` as options: OmegaConf writes into them, and without a temperature the run is greedy."""
    kinds = get_type_hints(SamplingParams) | {"logit_bias": dict[int, float], "grammar": Any}
    options: list[Any] = []
    for option in fields(SamplingParams):
        default: Any = 0.0 if option.name == "temperature" else option.default
        with_default = field(default=default, default_factory=option.default_factory)
        options.append((option.name, kinds[option.name], with_default))
    made = dataclasses.make_dataclass("SamplingConfig", options, namespace={"__doc__": SamplingParams.__doc__})
    made.__module__ = __name__
    return made


SamplingConfig = _sampling_config()


@dataclass
class DecodeConfig(EngineOptions):
    r"""Options of a run and of a server, beside those of `EngineOptions`.

    Attributes:
        drafter, backend, budget, model, sampling: config groups; see ``--help`` for what is installed.
        speculate: ``false`` decodes plainly whatever the drafter is, to have something to compare with.
        max_new_tokens: upper limit of new tokens per prompt; ``data.max_new_tokens_field`` gives prompts their own.
        stop: texts that end a sequence, as in ``stop='["\n\n","Question:"]'``; ``\n``, ``\t``, ``\r`` and ``\\``
            stand for newline, tab, carriage return and backslash.
        chat_template: a Jinja file that makes prompts of conversations, in the place of the tokenizer's own template.
        ignore_eos: let only limits and stop strings end a sequence (for benchmarks).
        num_threads: CPU threads of PyTorch; ``null`` leaves its choice.
    """

    drafter: Any = MISSING
    backend: Any = MISSING
    budget: Any = MISSING
    model: ModelOptions = field(default_factory=ModelOptions)
    sampling: Any = field(default_factory=SamplingConfig)
    speculate: bool = True
    max_new_tokens: AtLeastOne = 128
    stop: list[str] = field(default_factory=list)
    chat_template: str | None = None
    ignore_eos: bool = False
    num_threads: AtLeastOne | None = None


@dataclass
class ServeConfig(DecodeConfig):
    """Options of ``emssd serve``, beside those of a run that say how to decode.

    Attributes:
        host: the address that is listened on; ``0.0.0.0`` is every one of this machine.
        port: of the address; 0 is any that is free.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000


@dataclass
class RunConfig(DecodeConfig):
    """Options of one run of ``python -m emssd``, beside those of `DecodeConfig`.

    Attributes:
        data: config group; see ``--help`` for what is installed.
        prompt: decode this text, and nothing else; it is taken as it stands, without Hydra's quotes.
        check: ``plain`` also decodes without drafts, by turns, and compares every token and the speed. ``greedy`` is
            its older name.
        on_error: ``fail`` stops at a prompt that cannot be used; ``skip`` notes it in ``errors.jsonl`` and goes on;
            ``auto`` skips if the source of the prompts writes answers, which have a place for errors, and else fails.
        output_dir: where ``generations.jsonl``, ``metrics.json`` and ``config.yaml`` go. With ``-``, rows go to stdout,
            all else that is printed goes to stderr, and no file is written.
        resume: go on with the job whose rows are in `output_dir`; its finished rows are not decoded again.
        overwrite: replace what an earlier run left in `output_dir`.
        progress: show a progress bar.
        figures: print the speed and what it says of the drafts; ``null`` does so unless there is a `prompt`.
        details: print all figures, which are in ``metrics.json`` as well.
        experiment: config group: sweeps whose runs are compared, such as those of the paper.
        size: of an experiment: ``toy`` (seconds), ``small`` (minutes on two cores), ``paper`` (a GPU, real weights), or
            ``shapes`` (the paper's shapes with random weights, and replayed acceptance).
        method, task: config groups of experiments: what is compared, on what data; they set the options above.
        repeat: which repetition of an experiment this is.
    """

    data: Any = MISSING
    prompt: str | None = None
    check: Check | None = None
    on_error: OnError = OnError.auto
    output_dir: str = DEFAULT_OUTPUT_DIR
    resume: bool = False
    overwrite: bool = False
    progress: bool = True
    figures: bool | None = None
    details: bool = False
    experiment: ExperimentConfig | None = None
    size: Size = Size.small
    method: str | None = None
    task: TaskConfig | None = None
    repeat: AtLeastOne = 1

    @property
    def drafts(self) -> bool:
        """Whether anything drafts; else others may be compared with the run."""
        return bool(self.speculate and self.drafter.name != "none")


def prompt_source(config: RunConfig, registry: Registry) -> PromptSourceSpec:
    """The source that ``data=`` chooses."""
    return cast("PromptSourceSpec", registry.find("data", config.data.name))


def changed_options(before: str, now: str) -> list[str]:
    """Names of the options that determine a row's tokens and differ between two ``config.yaml``.

    Options that only say how many rows there are do not count. An option of the model that the first lacks has its
    default there. Raises ConfigError: the first is no such text.
    """
    first, second = _row_options(before), _row_options(now)
    default = {f"model.{option.name}": option.default for option in fields(ModelOptions)}
    return [name for name in {**first, **second} if first.get(name, default.get(name)) != second.get(name)]


def _row_options(text: str) -> dict[str, Any]:
    try:
        config = OmegaConf.create(text)
        groups = {name: OmegaConf.select(config, name) for name in _ROW_OPTIONS}
    except RecursionError:
        raise ConfigError("it is no YAML of options: its brackets are nested too deeply") from None
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"it is no YAML of options: {str(error).partition(chr(10))[0]}") from error
    if groups["model"] is None:
        raise ConfigError("it holds no options")
    options: dict[str, Any] = {}
    for name, value in groups.items():
        options |= {f"{name}.{key!s}": value[key] for key in value} if isinstance(value, DictConfig) else {name: value}
    return {name: value for name, value in options.items() if name not in _NO_ROW_OPTIONS}


def no_size(size: str) -> str:
    """The message for a `size` that an experiment does not have."""
    return f"this experiment has no size {size!r}; choose one of {', '.join(other for other in Size if other != size)}"


def conf_dir() -> Path:
    """The config directory: the packaged one if it exists, else the repository's."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def structured(options: type) -> DictConfig:
    """The dataclass `options` as OmegaConf's structured config; one of them that is a dictionary takes any key. Raises
    OmegaConfBaseException: a field's type or default that cannot be.
    """
    node: DictConfig = OmegaConf.structured(options)
    for _, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)
    return node


def register_configs(registry: Registry, *, runnable: bool = False) -> None:
    """Put the options of the run and of every plugin into Hydra's ConfigStore.

    Args:
        runnable: leave out plugins that cannot run on this machine, so that Hydra refuses them at once.
    """
    store = ConfigStore.instance()
    store.store(name="run", node=structured(RunConfig))
    store.store(name="server", node=structured(ServeConfig))
    store.store(group="model", name="hf", node=structured(ModelOptions), provider="emssd")
    store.store(group="sampling", name="greedy", node=structured(SamplingConfig), provider="emssd")
    absent = {(record.kind, record.name) for record in registry.records if runnable and record.state == "unavailable"}
    offered = [(kind, spec) for kind in KINDS for spec in registry.specs(kind) if (kind, spec.name) not in absent]
    for kind, spec in offered:
        name = ("name", str, spec.name)  # by which its options are found again after composition
        try:
            node = structured(dataclasses.make_dataclass(spec.config.__name__, [name], bases=(spec.config,)))
            store.store(group=kind, name=spec.name, node=node, provider=registry.source(kind, spec.name))
            continue
        except OmegaConfBaseException as error:  # of its many, all say that a field's type or default cannot be
            reason = str(error).partition("\n")[0]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a default that is made may do anything
            reason = described(error)
        registry.withdraw(kind, spec.name, f"{spec.config.__name__} cannot be an options class: {reason}")
