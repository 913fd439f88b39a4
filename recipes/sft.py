"""Supervised full fine-tuning.

make sft                                        # the bundled task, one process
make sft GPUS=4 ZERO=3 MODEL=Qwen/Qwen3-8B DATA=data.jsonl
accelerate launch recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
torchrun --nproc_per_node 4 recipes/sft.py --config my_run.yaml
python recipes/sft.py --help
"""

from zerofit import Recipe, entrypoint

RECIPE = Recipe(
    "sft",
    title="full fine-tuning",
    defaults={"learning_rate": 2e-5},
    smaller=("lora", "qlora"),
    staged="pipeline",
)

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)  # --help and missing files, before the slow import of torch

from zerofit import recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result
from zerofit.train.trainer import ZerofitTrainer


def main() -> None:
    # --- arguments: flags, YAML and DeepSpeed JSON, checked before anything is loaded ---
    settings = recipe.parse(RECIPE)

    # --- tokenizer and data: tokenized once, all ranks map the same file ---
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)

    # --- process group and transformers' arguments; under ZeRO-3 the model is sharded while it loads ---
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)

    # --- train ---
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = ZerofitTrainer(settings, model, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)

        # --- save final/, evaluate, write result.json ---
        save_final(trainer)
        metrics = evaluate(trainer)
        write_result(trainer, metrics)


if __name__ == "__main__":
    entrypoint.guard(main)
