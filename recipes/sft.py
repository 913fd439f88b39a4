"""Supervised fine-tuning of all weights.

make sft                                        # the bundled task, one process
make sft GPUS=4 ZERO=3 MODEL=Qwen/Qwen3-8B DATA=data.jsonl
accelerate launch recipes/sft.py --zero 3 --model Qwen/Qwen3-8B --data data.jsonl
torchrun --nproc_per_node 4 recipes/sft.py --config my_run.yaml
python recipes/sft.py --help
"""

from zerofit import early

if __name__ == "__main__":
    early.recipe("sft")  # mistakes in the flags, told before the next line imports torch for seconds

from zerofit import data, errors, inspection, model, start, train


def main() -> None:
    # --- arguments: flags, YAML and DeepSpeed JSON, checked before anything is loaded ---
    settings = start.settings("sft")

    # --- tokenizer and data: tokenised once, every rank maps the same file ---
    tokenizer = model.load_tokenizer(settings)
    train_set, eval_set = data.load(settings, tokenizer)
    inspection.check(settings, train_set, eval_set, tokenizer)

    # --- process group and transformers' arguments; under ZeRO-3 it is sharded while it loads ---
    arguments = start.processes(settings, train_set, eval_set)
    net = model.load_model(settings, tokenizer)

    # --- run folder; train, save final/, evaluate, report ---
    start.open_run(settings, train_set, eval_set)
    train.run(train.KitTrainer(settings, net, tokenizer, arguments, train_set, eval_set))


if __name__ == "__main__":
    errors.guard(main)
