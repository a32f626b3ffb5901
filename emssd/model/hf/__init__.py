"""A Hugging Face module as it is: called with other attention, other arithmetic and states beside its own.

`hooked` is the module with its hooks (`interface`, `streams`, `recurrent_layers`, `batch_invariance`); `probe` and
`masks` learn its rules by short passes; `refusals`, `device_map` and `tripwire` look at it without running it.
"""
