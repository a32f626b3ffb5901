from datasets import Dataset
from emssd_suffix import SuffixConfig
from trl import GRPOConfig, GRPOTrainer

from emssd.data.demo import model_path
from emssd.integrations.trl import Rollouts


def variety(completion_ids, **_):
    """Rewards completions that seldom repeat a token."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


options = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 32, "max_steps": 2}
trainer = GRPOTrainer(
    model=str(model_path("target")),  # or any folder or hub id
    reward_funcs=variety,
    args=GRPOConfig("trained", use_cpu=True, report_to="none", **options),
    train_dataset=Dataset.from_dict({"prompt": ["The for statement", "Lambda expressions are"]}),
    rollout_func=Rollouts(drafter=SuffixConfig(cache_tokens=1_000_000)),  # drafts from earlier rollouts, too
)
trainer.train()
