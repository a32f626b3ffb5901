"""Scores a task by lighteval's model of Transformers with continuous batching: alone, and within `emssd.speculate`."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

from lighteval.metrics import apply_metric
from lighteval.metrics.metrics import Metrics
from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
from lighteval.tasks.requests import Doc
from transformers.generation import ContinuousBatchingConfig

import emssd
from emssd.data.demo import model_path

TASK = LightevalTask(
    LightevalTaskConfig(
        name="questions",
        prompt_function=lambda line, _: Doc(f"Question: {line['question']}\nAnswer:", [str(line["answer"])], 0),
        hf_repo=str(Path(__file__).parent / "lm_eval"),  # a folder with a file of questions
        hf_subset="default",
        evaluation_splits=["train"],
        metrics=[Metrics.exact_match],
    )
)


def scored(docs, speculates):
    """The score of each question, and the model's texts. (`Pipeline` imports all tasks, and one of these downloads.)"""
    with tempfile.TemporaryDirectory() as folder:
        path = str(model_path("target"))  # or any folder or hub id
        options = {"continuous_batching": True, "override_chat_template": True, "cache_dir": folder}
        model = TransformersModel(TransformersModelConfig(model_name=path, device="cpu", dtype="float32", **options))
        model.tokenizer.chat_template = "{{ messages[0].content }}"  # lighteval 0.13 needs one for continuous batching
        model.model.generation_config.max_new_tokens = 24
        model.model.generation_config.continuous_batching_config = ContinuousBatchingConfig(num_blocks=64)
        with emssd.speculate(model.model, model.tokenizer, drafter="suffix") if speculates else nullcontext():
            responses = model.greedy_until(docs)
        return apply_metric(responses, docs, TASK.metrics), [response.text[0] for response in responses]


if __name__ == "__main__":
    docs = TASK.get_docs()
    alone, speculated = scored(docs, speculates=False), scored(docs, speculates=True)
    print(*speculated[1][:3], *speculated[0][:3], sep="\n")
    assert alone == speculated
