"""Fine-tuning of a LoRA adapter; the model's own weights stay as they are.

make lora                                       # the bundled task, one process
make lora GPUS=2 ZERO=2 MODEL=Qwen/Qwen3-8B DATA=data.jsonl ARGS="--lora_r 32"
accelerate launch recipes/lora.py --model Qwen/Qwen3-8B --data data.jsonl --lora_r 32
torchrun --nproc_per_node 4 recipes/lora.py --config my_run.yaml
python recipes/lora.py --help
"""

from zerofit import early

if __name__ == "__main__":
    early.recipe("lora")  # mistakes in the flags, told before the next line imports torch for seconds

from zerofit import adapters, data, errors, inspection, model, start, train


def main() -> None:
    # --- arguments: flags, YAML and DeepSpeed JSON, checked before anything is loaded ---
    settings = start.settings("lora")

    # --- tokenizer and data: tokenised once, every rank maps the same file ---
    tokenizer = model.load_tokenizer(settings)
    train_set, eval_set = data.load(settings, tokenizer)
    inspection.check(settings, train_set, eval_set, tokenizer)

    # --- process group and transformers' arguments; under ZeRO-3 the base is sharded while it loads ---
    arguments = start.processes(settings, train_set, eval_set)
    net = adapters.add(model.load_model(settings, tokenizer), settings, tokenizer)

    # --- run folder; train, save final/, evaluate, report ---
    start.open_run(settings, train_set, eval_set)
    train.run(train.KitTrainer(settings, net, tokenizer, arguments, train_set, eval_set))


if __name__ == "__main__":
    errors.guard(main)
