"""A model that runs ragged steps on its KV cache.

`target` is a model that an engine owns or borrows, `runner` runs it, `parallel` keeps ranks in step; `rounded` and
`borrowed` lend it, or parts of it, to drafters.
"""
