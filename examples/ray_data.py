from pathlib import Path

import ray

from emssd.integrations.ray import TextGenerator

done = set()
if Path("answers").exists():  # of an earlier run that was stopped
    done = {row["id"] for row in ray.data.read_json("answers").iter_rows()}
questions = ray.data.read_json("questions.jsonl")  # or read_parquet, read_csv, …
answers = questions.filter(lambda row: row["id"] not in done).map_batches(
    TextGenerator,
    fn_constructor_kwargs={"path": "demo", "drafter": "suffix", "prompt_column": "question", "max_new_tokens": 16},
    compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2),
    batch_size=16,
    num_gpus=0,  # of each actor
)
answers.write_json("answers")
