"""Make a Llama checkpoint of Baichuan-7B or Baichuan2-7B: python examples/baichuan_to_llama.py FROM TO.

Both are Llamas whose three projections lie in one matrix. Baichuan2 divides each row of its LM head by its length.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

source, target = map(Path, sys.argv[1:])
config = json.loads((source / "config.json").read_text())
if config["hidden_size"] > 4096:
    sys.exit("this is no 7B model; those of 13B have ALiBi, which Llama has not")
weights: dict[str, torch.Tensor] = {}
for file in sorted(source.glob("*.safetensors")):
    weights |= load_file(file)
for file in sorted(source.glob("pytorch_model*.bin")):
    weights |= torch.load(file, weights_only=True)
for name in [name for name in weights if name.endswith("W_pack.weight")]:
    for part, weight in zip("qkv", weights.pop(name).chunk(3), strict=True):
        weights[name.replace("W_pack", f"{part}_proj")] = weight.contiguous()
if config["vocab_size"] == 125696:  # Baichuan2
    weights["lm_head.weight"] = torch.nn.functional.normalize(weights["lm_head.weight"])
config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
config.pop("auto_map", None)
target.mkdir(parents=True)
(target / "config.json").write_text(json.dumps(config, indent=2))
save_file(weights, target / "model.safetensors", {"format": "pt"})
for file in source.glob("*token*"):
    shutil.copy(file, target)
