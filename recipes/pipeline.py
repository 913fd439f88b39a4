"""Supervised full fine-tuning with pipeline parallelism, for slow links between nodes.

make pipeline PP=2                              # the bundled task, two processes
make pipeline PP=2 GPUS=4 MODEL=Qwen/Qwen3-8B DATA=data.jsonl
make pipeline PP=2 GPUS=8 NODES=2 NODE_RANK=0 MASTER_ADDR=host0 MODEL=Qwen/Qwen3-8B DATA=data.jsonl
torchrun --nproc_per_node 2 recipes/pipeline.py --model Qwen/Qwen3-8B --data data.jsonl
python recipes/pipeline.py --help
"""

from zerofit import Recipe, entrypoint

RECIPE = Recipe(
    "pipeline",
    # Unsupported features are off by default, and explicit requests are rejected (parallel/pipeline.py).
    defaults={"learning_rate": 2e-5, "num_samples": 0, "canary": False},
    common=("pp_size", "gradient_accumulation_steps"),
    trainer="zerofit.train.pipeline_trainer:PipelineTrainer",
    bundled="examples/tiny/pipeline.yaml",
    stages=True,
)

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)  # --help and missing files, before the slow import of torch

from zerofit import recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_tokenizer
from zerofit.train.pipeline_trainer import PipelineTrainer, load_stage
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


def main() -> None:
    # --- arguments: flags, YAML and DeepSpeed JSON, checked before anything is loaded ---
    settings = recipe.parse(RECIPE)

    # --- tokenizer and data: tokenized once, all ranks map the same file ---
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)

    # --- process group and transformers' arguments; each rank loads only the layers of its stage ---
    training_args = recipe.start_processes(settings, train_set, eval_set)
    stage = load_stage(settings, tokenizer)

    # --- train: micro batches pass through the stages one after another ---
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = PipelineTrainer(settings, stage, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)

        # --- save final/, evaluate, write result.json ---
        save_final(trainer)
        metrics = evaluate(trainer)
        write_result(trainer, metrics)


if __name__ == "__main__":
    entrypoint.guard(main)
