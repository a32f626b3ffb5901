import ray

from emssd.integrations.ray import TextGenerator

prompts = ["The for statement", "Lambda expressions are", "A class", "An assert"]
rows = ray.data.from_items([{"id": n, "prompt": prompts[n % 4]} for n in range(8)])  # or read_parquet, read_json, …
texts = rows.map_batches(
    TextGenerator,
    fn_constructor_kwargs={"path": "demo", "drafter": "suffix", "batch_size": 4, "max_new_tokens": 16},
    compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2),
    batch_size=8,
    num_gpus=0,  # of each actor
)
texts.write_parquet("texts")
