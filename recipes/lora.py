"""Supervised fine-tuning of a LoRA adapter on a frozen model.

make lora                                       # the bundled task, one process
make lora GPUS=2 ZERO=2 MODEL=Qwen/Qwen3-8B DATA=data.jsonl ARGS="--lora_r 32"
accelerate launch recipes/lora.py --model Qwen/Qwen3-8B --data data.jsonl --lora_r 32
torchrun --nproc_per_node 4 recipes/lora.py --config my_run.yaml
python recipes/lora.py --help
"""

from zerofit import Recipe, entrypoint
from zerofit.config.arguments import LoraArguments
from zerofit.job.recipe import Variant

RECIPE = Recipe(
    "lora",
    title="LoRA",
    arguments=(LoraArguments,),
    defaults={"learning_rate": 2e-4},
    common=("lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit"),
    bundled="examples/tiny/lora.yaml",
    smaller=("qlora",),
    variants=(Variant("QLoRA", {"load_in_4bit": True}, method="qlora"),),
)

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)  # --help and missing files, before the slow import of torch

from zerofit import recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.adapters import add_adapter
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

    # --- process group and transformers' arguments; under ZeRO-3 the base is sharded while it loads ---
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = add_adapter(load_model(settings, tokenizer), settings, tokenizer)

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
