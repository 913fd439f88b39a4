"""Preference tuning (DPO) on pairs of a chosen and a rejected answer, after SFT.

make dpo                                        # the bundled task, one process
make dpo GPUS=4 ZERO=3 MODEL=runs/sft/final DATA=pairs.jsonl
make dpo GPUS=2 MODEL=Qwen/Qwen3-8B DATA=pairs.jsonl ARGS="--adapter lora --beta 0.05"
accelerate launch recipes/dpo.py --model runs/sft/final --data pairs.jsonl
python recipes/dpo.py --help
"""

from zerofit import Recipe, entrypoint
from zerofit.config.arguments import LoraArguments, PreferenceArguments
from zerofit.job.recipe import Variant

RECIPE = Recipe(
    "dpo",
    arguments=(PreferenceArguments, LoraArguments),
    defaults={"learning_rate": 1e-6, "adapter": None},
    adapter_defaults={"learning_rate": 5e-6},
    common=("beta", "loss_type", "label_smoothing", "rpo_alpha", "precompute_ref_log_probs", "adapter", "lora_r"),
    objectives=("zerofit.objective.pairs:Pairs", "zerofit.objective.labeled:Labeled"),
    bundled="examples/tiny/preference/dpo.yaml",
    variants=(Variant("LoRA", {"adapter": "lora"}),),
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

    # --- tokenizer and pairs: tokenized once, all ranks map the same file ---
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)

    # --- process group and transformers' arguments; under ZeRO-3 the model is sharded while it loads ---
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    if settings.adapter:
        model = add_adapter(model, settings, tokenizer)

    # --- train; the reference is the model without its adapter, or log-probabilities from before the first step ---
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
