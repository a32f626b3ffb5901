"""A model that is spread over processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL."""

import sys

from emssd import Engine

engine = Engine.from_pretrained(sys.argv[1], drafter="suffix", tensor_parallel=True)  # returns in process 0 only
for generation in engine.generate(["One, two, three, one, two,"], max_new_tokens=24):
    print(generation.text)
