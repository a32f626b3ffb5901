"""`NativeStep`: what C++ code reads to attend in a step, where it needs no Python for that."""

from __future__ import annotations

from typing import Any

__all__ = ["NativeStep"]

NativeStep = Any
"""The attention of one step, made once a step: ``torch.classes.emssd_native.Step`` of the kernels.

It is called with, in this order:

- ``keys``, ``values``: tensors by layer, the pool, as `emssd.attention.pool.KVPool` has it;
- ``query_indptr``, ``kv_lens``, ``page_indptr``, ``pages``: lists; row ``i`` has the queries and the pages from entry
  ``i`` of its ``indptr`` to the next;
- ``tree_indptr``, ``parents``: lists, the trees that rows end with; ``None`` if no row has any;
- ``scales``, ``windows``, ``softcaps``, ``sinks``: by layer, see `emssd.attention.LayerSpec`; 0 stands for none.

``attend(query, key, value, layer)`` is what `AttentionBackend.forward` gives. `emssd.model.program` calls its others.
"""
