"""Map flags of TRL, axolotl, LLaMA-Factory and older transformers to the names used here."""

import difflib
import re

from zerofit.job import program
from zerofit.job.recipe import Recipe

# Argument elsewhere -> zerofit's, with a remark in parentheses if they differ.
RENAMED = {
    "warmup_ratio": "--warmup_steps (a value below 1 is a ratio)",
    "torch_dtype": "--dtype",
    "no_cuda": "--use_cpu",
    "evaluation_strategy": "--eval_strategy",
    "group_by_length": "--train_sampling_strategy group_by_length",
    "per_gpu_train_batch_size": "--per_device_train_batch_size",
    "overwrite_output_dir": "--output_dir (name a new folder)",
    # names of earlier versions
    "dry_run": "--plan",
    "force": "--ignore_plan",
    "gpu": "--gpu_type",
    "out": "--output_dir",
    "probe": "--per_device_train_batch_size auto",
    "resume_anyway": "--ignore_resume_mismatch",
    "zenflow": "--super_offload (deepspeed 0.19's ZenFlow trains another function)",
    "zero_stage": "--zero",
    "stage": "--zero (the ZeRO stage; what is trained follows from the recipe)",
    # models
    "model_name_or_path": "--model",
    "model_name": "--model",
    "base_model": "--model",
    "base_model_config": "--model",
    "flash_attn": "--attn_implementation",
    "flash_attention": "--attn_implementation",
    "use_flash_attention_2": "--attn_implementation flash_attention_2",
    # rows
    "dataset": "--data",
    "datasets": "--data",
    "dataset_name": "--data",
    "dataset_dir": "--data",
    "dataset_path": "--data",
    "train_file": "--data",
    "dataset_config": "--data_config",
    "dataset_train_split": "--data_split",
    "dataset_text_field": "--columns text=...",
    "dataset_num_proc": "--preprocessing_num_workers",
    "eval_dataset": "--eval_data",
    "val_size": "--eval_fraction",
    "val_set_size": "--eval_fraction",
    "template": "--chat_template",
    "chat_template_path": "--chat_template",
    "max_seq_length": "--max_length",
    "max_seq_len": "--max_length",
    "cutoff_len": "--max_length",
    "sequence_len": "--max_length",
    "seq_length": "--max_length",
    "sample_packing": "--packing",
    "sequence_parallel_size": "--sp_size",
    "sequence_parallel_degree": "--sp_size",
    "ulysses_sequence_parallel_size": "--sp_size",
    "context_parallel_size": "--sp_size (by heads, not a ring)",
    "tensor_parallel_size": "--tp_size",
    "tensor_parallel_degree": "--tp_size",
    "tensor_model_parallel_size": "--tp_size",
    "deepspeed_autotp_size": "--tp_size",
    "autotp_size": "--tp_size",
    "pipeline_parallel_size": "--pp_size with recipes/pipeline.py",
    "pipeline_parallel_degree": "--pp_size with recipes/pipeline.py",
    "pipeline_model_parallel_size": "--pp_size with recipes/pipeline.py",
    "expert_parallel_size": "--zero 3 (shards the experts; DeepSpeed's expert parallelism fails with transformers 5)",
    "ep_size": "--zero 3 (shards the experts; DeepSpeed's expert parallelism fails with transformers 5)",
    "neat_packing": "--packing",
    "train_on_prompt": "--train_on all",
    "train_on_inputs": "--train_on all",
    "assistant_only_loss": "--train_on assistant",
    "completion_only_loss": "--train_on assistant",
    "loss_scale": "--mask_generation_prompt (as ms-swift's ignore_empty_think; no other scale is there)",
    # preference pairs
    "pref_beta": "--beta",
    "pref_loss": "--loss_type",
    "pref_ftx": "--rpo_alpha",
    "dpo_label_smoothing": "--label_smoothing",
    "ref_model": "--precompute_ref_log_probs (the reference is the model before training)",
    "reference_free": "--loss_type simpo (or orpo)",
    # steps
    "batch_size": "--per_device_train_batch_size (--effective_batch_size counts all ranks)",
    "train_batch_size": "--effective_batch_size",
    "global_batch_size": "--effective_batch_size",
    "micro_batch_size": "--per_device_train_batch_size",
    "eval_batch_size": "--per_device_eval_batch_size",
    "gradient_accumulation": "--gradient_accumulation_steps",
    "epochs": "--num_train_epochs",
    "num_epochs": "--num_train_epochs",
    "lr": "--learning_rate",
    "optimizer": "--optim",
    "lr_scheduler": "--lr_scheduler_type",
    "scheduler": "--lr_scheduler_type",
    "grad_clip": "--max_grad_norm",
    "gradient_clipping": "--max_grad_norm",
    "wandb_project": "--report_to wandb (WANDB_PROJECT names the project)",
    "output": "--output_dir",
    "resume": "--resume_from_checkpoint",
    # adapters
    "use_peft": "recipes/lora.py",
    "finetuning_type": "recipes/lora.py, or recipes/sft.py for all weights",
    "lora_rank": "--lora_r",
    "lora_target": "--lora_target_modules",
    "lora_target_linear": "--lora_target_modules all-linear",
    "target_modules": "--lora_target_modules",
    "lora_modules_to_save": "--modules_to_save",
    "additional_target": "--modules_to_save",
    "quantization_bit": "--load_in_4bit, or --load_in_8bit",
    "loraplus_lr_multiplier": "--loraplus_lr_ratio",
}

# Argument -> value elsewhere -> the flag of zerofit.
VALUES = {
    "offload": {
        "cpu": "--offload optimizer", "optim": "--offload optimizer", "nvme": "--offload optimizer with --offload_path",
        "param": "--offload all", "params": "--offload all", "parameters": "--offload all", "full": "--offload all",
        "true": "--offload optimizer", "false": "--offload none", "no": "--offload none",
    },
}  # fmt: skip

_STAGE = re.compile(
    r"(?:ds|deepspeed)?[-_]?(?:zero|z|stage)?[-_]?(?:stage)?[-_]?([0-3])(?:[-_]config)?(?:\.json)?", re.IGNORECASE
)


def stage(word: str) -> str | None:
    """Return the ZeRO stage in a word like zero3, stage-2 or ds_z3_config.json; None if it has none."""
    match = _STAGE.fullmatch(word)
    return match and match[1]


def of_value(message: str) -> str | None:
    """Return argparse's message on a wrong value as "name value: what it must be."; None for any other message."""
    if missing := re.fullmatch(r"argument --(\w+)\S*: expected (one|at least one) argument", message):
        return f"{missing[1]}: its value is missing."
    if flag := re.match(r"argument --(\w+)\S*: Truthy value expected: got (.*) but expected", message):
        return f"{flag[1]} {flag[2]}: must be true or false."
    match = re.fullmatch(r"argument --(\w+)\S*: invalid (\w+)(?: value)?: '(.*?)'(?: \(choose from (.*)\))?", message)
    if not match:
        return None
    name, kind, value, choices = match.groups()
    if kind != "choice":
        return f"{name} {value}: must be a {'whole ' * (kind == 'int')}number." if kind in ("int", "float") else None
    choices = choices.replace("'", "").replace("True, False", "true, false")  # argparse prints values, not their words
    meant = f"--zero {stage(value)}" if name == "zero" and stage(value) else VALUES.get(name, {}).get(value.lower())
    return f"{name} {value}: must be one of {choices}{f'; did you mean {meant}?' if meant else '.'}"


def of_unknown(unknown: list[str], recipe: Recipe, names: list[str], origin: str) -> str:
    """Return a sentence for each unknown flag; the words after a flag are its values.

    Args: unknown: the words left over by argparse; names: all arguments of the recipe; origin: "command line" or file.
    """
    sentences, inside = [], False
    for word in unknown:
        is_flag = bool(re.match(r"--?[A-Za-z]", word))
        if not is_flag and inside:
            continue
        inside = is_flag
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        hint = _hint(name, recipe, names)
        what = f"unknown flag --{name}" if is_flag else f"unexpected word {word!r}"
        if origin != "command line":
            what, hint = f"unknown key {name!r}", hint and hint.removeprefix("--")
        sentence = f"{what}; did you mean {hint}?" if hint else f"{what}; --help all lists every flag."
        if sentence not in sentences:
            sentences.append(sentence)
    return " ".join(sentences)


def _hint(name: str, recipe: Recipe, names: list[str]) -> str | None:
    """Return the flag or recipe to use instead of an unknown argument; None if there is no guess."""
    close = difflib.get_close_matches(name, names, 1, 0.75)
    hint = f"--{name}" if name in names else RENAMED.get(name) or (f"--{close[0]}" if close else None)
    for other in sorted(program.kit().values(), key=lambda other: len(other.arguments)):
        of_other = {*other.own_arguments} - {*names}
        if name in of_other or (hint or "").split()[:1] in [[f"--{n}"] for n in of_other]:
            return f"recipes/{other}.py (make {other}){f' with {hint}' if hint and name not in of_other else ''}"
    return hint
