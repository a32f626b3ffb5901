"""A model that is spread over processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL."""

import sys

import torch

from emssd import Engine

engine = Engine.from_pretrained(sys.argv[1], drafter="suffix", tensor_parallel=True)
for generation in engine.generate(["One, two, three, one, two,"], max_new_tokens=24):
    if torch.distributed.get_rank() == 0:  # every process has the same text
        print(generation.text)
