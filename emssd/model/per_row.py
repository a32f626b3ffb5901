"""`PerRow`: modules that mix tokens out of emssd's sight, each run on the whole text of a row (``model.fallback``).

No model is named. A short packed pass is compared with the model's own, module by module. The first module whose
results differ is at fault, and so is one that fails. It then runs row by row, and the passes are compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from emssd.errors import UnsupportedModelError
from emssd.model.interface import ATTENTION_NAME, Visible, implementation
from emssd.model.masks import window_of
from emssd.model.mixing import mixed_by, mixer_of_pass
from emssd.model.probe import PROBE_TOLERANCE, Aranges, ProbeRows, look_at_layers, running
from emssd.model.streams import only_here, replaced_forward

if TYPE_CHECKING:
    from emssd.model.hooked import HookedModel

__all__ = ["PerRow", "find_fault"]

_LENGTHS = (11, 23)  # of the passes that show which sizes of arguments are the number of tokens
_LONG = 1023  # of the pass that shows whether these are the number of tokens in long texts, too
_Tensors = dict[int, torch.Tensor]


@dataclass(slots=True)
class _Call:
    """The arguments and the results of a module.

    Attributes:
        by_token: places of arguments ``[b, n, ...]`` among all of a call.
        tables: arguments for the longest text so far that have the number of tokens in other places, such as masks.
        outputs: places of results ``[b, n, ...]``; the other ones are not handed on.
    """

    by_token: tuple[int, ...]
    tables: _Tensors
    sizes: dict[int, tuple[int, ...]]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class PerRow:
    """The modules of a model that run row by row."""

    target: HookedModel
    _calls: dict[str, _Call] = field(default_factory=dict)
    _length: int = 0

    @property
    def names(self) -> list[str]:
        return [*self._calls]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the modules run row by row in passes of `emssd.model.mixing.mixed_by`."""
        mixer = mixer_of_pass()
        if mixer is not None and self._calls and mixer.longest > self._length:
            self._learn_tables(min(2 * mixer.longest, self.target.max_model_len))
        with ExitStack() as stack:
            for name, call in self._calls.items():
                module = self.target.model.get_submodule(name)
                stack.enter_context(replaced_forward(module, self._forward(module.forward, call)))
            yield

    def mend(self) -> bool:
        """Let the module at fault, and those of its class, run row by row. Returns whether one was found."""
        fault = find_fault(self.target)
        while fault is not None:
            model = self.target.model
            kind = type(model.get_submodule(fault))
            alike = [name for name, module in model.named_modules() if type(module) is kind and self._may(name, module)]
            if fault in alike and (found := self._described(alike)).get(fault):
                self._calls |= {name: call for name, call in found.items() if call is not None}
                self._calls = {name: call for name, call in self._calls.items() if not self._is_within(name)}
                return True
            fault = fault.rpartition(".")[0] if fault else None
        if self.target.attention == ATTENTION_NAME and not self._calls:
            self.target.attention = "eager"  # its code knows no other name
            return True
        return False

    def learn_long_texts(self) -> None:
        """See how the modules are called in a long text, where models may pad."""
        if self._calls and (length := min(_LONG, self.target.max_model_len - 1)) > self._length:
            self._learn_tables(length)

    def _may(self, name: str, module: torch.nn.Module) -> bool:
        """Whether it may be one of them: no layers are in it, as nobody could take hidden states between these."""
        lists = (each for each in module.modules() if isinstance(each, torch.nn.ModuleList))
        return (
            name not in self._calls
            and not self._is_within(name)
            and all(len(each) != self.target.num_layers for each in lists)
        )

    def _is_within(self, name: str) -> bool:
        return any(name.startswith(f"{other}.") for other in self._calls)

    def _described(self, names: list[str]) -> dict[str, _Call | None]:
        """The call of each; ``None`` where that does not go by tokens."""
        short, long = (self._seen(names, length) for length in _lengths(self.target))
        found: dict[str, _Call | None] = {}
        for name in names:
            if len(short.get(name, ())) == len(long.get(name, ())) == 1:
                (old, given), (new, result) = short[name][0], long[name][0]
                found[name] = _described(old, new, given, result, *_lengths(self.target))
        self._length = _lengths(self.target)[1]
        return found

    def _learn_tables(self, length: int) -> None:
        with running(self.target):
            seen = self._seen(self.names, length)
        for name, call in self._calls.items():
            given = seen[name][0][0]
            if any(given[place].shape[1] != length for place in call.by_token):
                raise UnsupportedModelError(
                    f"{type(self.target.model).__name__} cannot be served: {name} gets other numbers of tokens than a "
                    f"text of {length} has, as models that pad do; try a smaller model.max_model_len"
                )
            for place, sizes in call.sizes.items():
                new = given[place]
                if not torch.equal(_cut(new, sizes, self._length), _cut(call.tables[place], sizes, self._length)):
                    raise UnsupportedModelError(
                        f"{type(self.target.model).__name__} cannot be served: {name} gets other masks for the same "
                        f"tokens in longer texts"
                    )
                call.tables[place] = new
        self._length = length

    def _seen(self, names: list[str], length: int) -> dict[str, list[tuple[list[Any], list[Any]]]]:
        """Arguments and results of each call of modules, in the model's own pass over a text of `length` tokens."""
        seen: dict[str, list[tuple[list[Any], list[Any]]]] = {}
        target = self.target

        def note(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                seen.setdefault(name, []).append((tree_flatten((args, kwargs))[0], tree_flatten(output)[0]))

            return only_here(hook)

        ids = torch.arange(length, device=target.device)[None] % target.vocab_size
        with ExitStack() as stack, implementation("eager", experts_in_loops=target.dtype is torch.float64):
            for name in names:
                module = target.model.get_submodule(name)
                stack.enter_context(module.register_forward_hook(note(name), with_kwargs=True))
            with running(target), mixed_by(None):
                target.call(input_ids=ids, use_cache=False)
        return seen

    def _forward(self, own: Callable[..., Any], call: _Call) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            kwargs = {name: given for name, given in kwargs.items() if not name.startswith("emssd_")}
            leaves, spec = tree_flatten((args, kwargs))
            layout: list[Any] = []

            def run(values: list[torch.Tensor]) -> list[torch.Tensor]:
                own_leaves = list(leaves)
                for place, value in zip(call.by_token, values, strict=True):
                    own_leaves[place] = value[None]
                for place, table in call.tables.items():
                    own_leaves[place] = _cut(table, call.sizes[place], len(values[0]))
                given, names = tree_unflatten(own_leaves, spec)
                layout[:] = tree_flatten(own(*given, **names))
                return [layout[0][place][0] for place in call.outputs]

            mixer, values = mixer_of_pass(), [leaves[place].flatten(0, 1) for place in call.by_token]
            with implementation("eager"), mixed_by(None):
                if mixer is not None:
                    results = mixer.run_rows(values, run)
                else:  # nobody knows rows, nor wants these results to be right
                    pieces = zip(*(each.split(self._length) for each in values), strict=True)
                    results = [torch.cat(each) for each in zip(*(run([*piece]) for piece in pieces), strict=True)]
            shape, found = leaves[call.by_token[0]].shape[:2], [None] * len(layout[0])
            for place, result in zip(call.outputs, results, strict=True):
                found[place] = result.view(*shape, *result.shape[1:])  # type: ignore[call-overload]
            return tree_unflatten(found, layout[1])

        return forward


def _lengths(target: HookedModel) -> tuple[int, int]:
    return min(_LENGTHS[0], target.max_model_len - 1), min(_LENGTHS[1], target.max_model_len)


def _cut(table: torch.Tensor, sizes: tuple[int, ...], length: int) -> torch.Tensor:
    for dim in sizes:
        table = table.narrow(dim, 0, length)
    return table


def _described(
    old: list[Any], new: list[Any], given: list[Any], result: list[Any], short: int, long: int
) -> _Call | None:
    by_token, sizes = list[int](), dict[int, tuple[int, ...]]()
    for place, (one, other) in enumerate(zip(old, new, strict=False)):
        if not isinstance(one, torch.Tensor):
            if one != other:
                return None
            continue
        dims = _dims(one, other, short, long)
        if dims == (1,) and one.shape[0] == 1:
            by_token.append(place)
        elif dims:
            sizes[place] = dims
    outputs = [
        place for place, (one, other) in enumerate(zip(given, result, strict=False))
        if isinstance(one, torch.Tensor) and _dims(one, other, short, long) == (1,) and one.shape[0] == 1
    ]  # fmt: skip
    if len(old) != len(new) or not by_token or not outputs:
        return None
    return _Call(tuple(by_token), {place: new[place] for place in sizes}, sizes, tuple(outputs))


def _dims(one: torch.Tensor, other: torch.Tensor, short: int, long: int) -> tuple[int, ...]:
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    return tuple(dim for dim, sizes in pairs if sizes == (short, long))


@dataclass(slots=True)
class _Events:
    """The inputs and outputs of modules in a pass, in order: key, module that runs then, tensors."""

    seen: dict[tuple[Any, ...], tuple[str, list[Any]]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=lambda: [""])
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def heard(self, model: Any) -> Iterator[_Events]:
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                before, after = self._hooks(name)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after))
            yield self

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            self._note((name, self.calls[name], "in"), (args, kwargs))
            self.stack.append(name)

        def after(module: Any, args: Any, output: Any) -> None:
            self._note((name, self.calls[name], "out"), output)
            self.stack.pop()

        return only_here(before), only_here(after)

    def _note(self, key: tuple[Any, ...], given: Any) -> None:
        inner = key[0] if key[-1] == "out" else self.stack[-1]
        self.seen[key] = (
            inner,
            [
                each.clone() if isinstance(each, torch.Tensor) and each.is_floating_point() else None
                for each in tree_flatten(given)[0]
            ],
        )


def find_fault(target: HookedModel) -> str | None:
    """The name of the module at fault in a short pass of the model as it runs now; ``None`` where none is found."""
    return _Search(target).fault()


class _Search:
    """Looks for the module at fault in a short pass."""

    def __init__(self, target: HookedModel) -> None:
        self._target, self._rows = target, ProbeRows(target)

    @torch.inference_mode()
    def fault(self) -> str | None:
        target, rows, events = self._target, self._rows, _Events()
        try:
            if target.attention == ATTENTION_NAME and (name := self._with_foreign_mask(events)):
                return name
            events = _Events()
            with events.heard(target.model):
                rows.run_packed(target, rows.attend)
        except Exception:  # whatever code of models raises
            return events.stack[-1]
        return self._difference(events) or self._counting(events)

    def _with_foreign_mask(self, events: _Events) -> str | None:
        target, modules, masks = self._target, dict[int, str](), dict[int, Visible]()

        def note(layer: int, *_: Any) -> None:
            modules[layer] = events.stack[-1]

        with events.heard(target.model):
            look_at_layers(target, note, masks)
        for layer, visible in masks.items():
            try:
                window_of(visible, target.max_model_len, "", target.device)
            except UnsupportedModelError:
                return modules[layer]
        return None

    def _difference(self, packed: _Events) -> str | None:
        target, rows = self._target, self._rows
        alone = [_Events(), _Events()]
        with implementation("eager", experts_in_loops=target.dtype is torch.float64):
            for row, events in enumerate(alone):
                with events.heard(target.model):
                    rows.run_one_alone(target, row)
        for key, (name, tensors) in packed.seen.items():
            theirs = [events.seen[key][1] for events in alone if key in events.seen]
            if len(theirs) < 2 or {len(each) for each in theirs} != {len(tensors)}:
                continue
            if any(self._differs(*each) for each in zip(tensors, *theirs, strict=True)):
                return name
        return None

    def _differs(self, packed: Any, *alone: Any) -> bool:
        if packed is None or any(each is None for each in alone):
            return False
        lengths = [self._rows.num_tokens, *map(len, self._rows.rows)]
        shapes = [each.shape for each in (packed, *alone)]
        # Elsewhere than first or second, tokens are keys: of masks and tables, which a module gets as they are.
        dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=False)) if list(sizes) == lengths and dim < 2]
        if len(dims) != 1 or len({len(shape) for shape in shapes}) != 1:
            return False
        owner = self._rows.owner
        theirs = torch.cat([each.movedim(dims[0], 0).flatten(1) for each in alone]).double()
        rows = packed.movedim(dims[0], 0).flatten(1)
        ours = torch.cat([rows[owner.to(rows.device) == row] for row in range(2)]).double()
        if ours.shape != theirs.shape:
            return False
        scale = theirs.std().clamp_min(1e-12)
        return not float((ours - theirs).abs().max() / scale) <= PROBE_TOLERANCE[self._target.dtype]

    def _counting(self, packed: _Events) -> str | None:
        """The module that takes the numbers of a call's tokens for their positions."""
        moved, rows = _Events(), self._rows
        with moved.heard(self._target.model), Aranges(rows.num_tokens, rows.positions):
            rows.run_packed(self._target, rows.attend)
        for key, (name, tensors) in packed.seen.items():
            for one, other in zip(tensors, moved.seen.get(key, (name, tensors))[1], strict=False):
                if one is not None and one.shape == other.shape and not torch.equal(one, other):
                    return name
        return None
