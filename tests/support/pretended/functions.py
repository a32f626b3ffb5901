"""PyTorch's functions that look at devices before they dispatch, as they are on a pretended device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.support.pretended.journal import DeviceMixError, Journal
from tests.support.pretended.tensor import CPU, CUDA, OnDevice, is_cuda, unwrapped

__all__ = ["Functions"]

_T = torch.Tensor
_to_copy: Any = torch.ops.aten._to_copy.default


class Functions(TorchFunctionMode):
    """Serves what asks for a device or for values; all else is dispatched as usual."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._served: dict[Any, Any] = {
            _T.tolist: self._tolist,
            _T.numpy: self._numpy,
            _T.data_ptr: lambda tensor: unwrapped(tensor).data_ptr(),
            _T.is_pinned: lambda tensor, *_: journal.is_pinned(tensor),
            _T.pin_memory: lambda tensor, *_: journal.pin(tensor.clone()),
            _T.cuda: lambda tensor, *_, **__: self._moved(tensor, CUDA),
            _T.cpu: lambda tensor, *_, **__: self._moved(tensor, CPU),
            _T.to: self._to,
            _T.type_as: lambda tensor, other: self._moved(tensor, other.device, other.dtype),
            _T.new_tensor: self._new_tensor,
            _T.__deepcopy__: self._deepcopy,
            torch.tensor: self._tensor,
            F.scaled_dot_product_attention: self._attention,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        served = self._served.get(func)
        return func(*args, **kwargs) if served is None else served(*args, **kwargs)

    def _tolist(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, OnDevice):
            self._journal.waited("tolist()")
        return unwrapped(tensor).tolist()

    def _numpy(self, tensor: torch.Tensor, **options: Any) -> Any:
        if isinstance(tensor, OnDevice):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return tensor.numpy(**options)

    def _tensor(self, data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = torch.tensor(data, **options)
        if pin_memory:
            self._journal.pin(made)
        if not is_cuda(device):
            return made
        if made.numel():
            self._journal.waited("torch.tensor(…, device=cuda)")
        return OnDevice(made, self._journal)

    def _new_tensor(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not isinstance(tensor, OnDevice):
            return tensor.new_tensor(*args, **options)
        self._journal.waited("new_tensor")
        return OnDevice(tensor.on_host.new_tensor(*args, **options), self._journal)

    def _deepcopy(self, tensor: torch.Tensor, memo: Any) -> torch.Tensor:
        if not isinstance(tensor, OnDevice):
            return tensor.__deepcopy__(memo)  # type: ignore[no-untyped-call, no-any-return]  # torch's
        copied = OnDevice(tensor.on_host.clone(), self._journal)
        if isinstance(tensor, torch.nn.Parameter):
            copied._is_param = True
        return copied

    def _attention(self, *args: Any, **options: Any) -> torch.Tensor:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
        there = [value for value in tensors if isinstance(value, OnDevice)]
        if there and len(there) < len(tensors):
            raise DeviceMixError("scaled_dot_product_attention: tensors on cuda:0 and on cpu")
        if not there:
            return F.scaled_dot_product_attention(*args, **options)

        def attend() -> torch.Tensor:
            return F.scaled_dot_product_attention(
                *map(unwrapped, args), **{name: unwrapped(value) for name, value in options.items()}
            )

        out = attend()
        self._journal.launched(lambda: out.copy_(attend()))
        return OnDevice(out, self._journal)

    def _to(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        target = {name: options.get(name) for name in ("device", "dtype", "non_blocking", "copy")}
        values = [options["other"], *args] if "other" in options else [*args]
        for value in values:
            if isinstance(value, torch.Tensor):
                target |= {"device": value.device, "dtype": value.dtype}
            elif isinstance(value, torch.dtype):
                target["dtype"] = value
            elif isinstance(value, bool):
                target["copy" if target["non_blocking"] is not None else "non_blocking"] = value
            elif value is not None:
                target["device"] = value
        return self._moved(tensor, **target)

    def _moved(
        self, tensor: torch.Tensor, device: Any = None, dtype: Any = None, non_blocking: Any = None, copy: Any = None
    ) -> torch.Tensor:
        device, dtype = torch.device(device or tensor.device), dtype or tensor.dtype
        there = isinstance(tensor, OnDevice)
        if is_cuda(device) == there and dtype == tensor.dtype and not copy:
            return tensor
        if is_cuda(device) and not there:
            self._journal.copied_to_device(tensor, "to", bool(non_blocking))
            return OnDevice(_to_copy(tensor, dtype=dtype).clone(), self._journal)
        if there and not is_cuda(device):
            self._journal.copied_to_host(None, "to", bool(non_blocking))
            copied: torch.Tensor = _to_copy(unwrapped(tensor), dtype=dtype)
            return copied
        moved: torch.Tensor = _to_copy(tensor, dtype=dtype)
        return moved
