"""Format a conversion: the YAML file in our names, and what is said of it in the terminal."""

import re
from typing import Any

import yaml

from zerofit.base.errors import one_line
from zerofit.convert.conversion import GPU_ONLY, Conversion, Line

# The order of the lines; others follow by name.
ORDER = (
    "model model_revision trust_remote_code random_init adapter load_in_4bit load_in_8bit lora_r lora_alpha "
    "lora_dropout lora_target_modules use_rslora use_dora init_lora_weights modules_to_save loss_type beta "
    "label_smoothing rpo_alpha simpo_gamma data data_config data_split columns eval_data eval_fraction "
    "max_samples chat_template chat_template_kwargs train_on mask_generation_prompt max_length truncation packing "
    "effective_batch_size per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps "
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm optim seed "
    "bf16 fp16 pure_bf16 gpus zero offload sp_size tp_size"
).split()

WIDTH = 44  # of a line before its comment


def text(done: Conversion, command: str) -> str:
    """Return the converted file: lines with their origin, then what a GPU can add, what is lost and what differs."""
    names = sorted(done.lines, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    parts = [f"# From {one_line(done.file.name)} of {done.kit.name}, read as version {done.kit.version}."]
    parts += [f"# {one_line(command)}"]
    if done.chosen_by:
        parts += [f"# Recipe {done.recipe} ({', '.join(done.chosen_by)})."]
    parts += [_line(name, done.lines[name]) for name in names]
    if done.on_gpus:
        parts += ["", f"# {GPU_ONLY}:"]
        parts += ["# " + _line(name, line) for name, line in done.on_gpus.items()]
    if done.lost:
        parts += ["", "# Without a counterpart:"]
        parts += [f"# - {line}" for line in _losses(done)]
    if done.same:
        parts += ["", f"# {_same(done)}"]
    if done.differs:
        parts += ["", "# What differs in meaning:"]
        parts += [f"# - {one_line(sentence)}" for sentence in done.differs]
    return "\n".join(parts) + "\n"


def _line(name: str, line: Line) -> str:
    return f"{f'{name}: {written(line.value)}':<{WIDTH}}  # {one_line(line.origin)}"


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that escapes the ends of lines in a text."""


def _text_node(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = '"' if re.search("[\n\r\x85\u2028\u2029]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text_node)


def written(value: Any) -> str:
    """Return a value as YAML on one line."""
    dumped = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return dumped.removesuffix("...\n").strip()


def _losses(done: Conversion) -> list[str]:
    """Return a line for each key without a counterpart; keys of a section with the same reason share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, why in done.lost.items():
        group = key.partition(".")[0] if done.kit.nested else key
        groups.setdefault((group, why), []).append(key)
    return [
        _lost(done, keys[0], why)
        if len(keys) == 1
        else one_line(f"{group}: {', '.join(k[len(group) + 1 :] for k in keys)} -- {why}")
        for (group, why), keys in groups.items()
    ]


def _lost(done: Conversion, key: str, why: str) -> str:
    value = done.given.get(key)
    shown = "" if value is None or isinstance(value, list | dict) else f": {' '.join(str(value).split())}"
    return one_line(f"{key}{shown[:42]} -- {why}")


def _same(done: Conversion) -> str:
    """Return the sentence on the keys that change nothing."""
    return one_line(f"The same as without the line: {', '.join(done.same)}")


def summary(done: Conversion, path: str, command: str) -> str:
    """Return what the terminal says of a conversion."""
    lines = [
        f"{done.file} is a file of {done.kit.name}; {path}: {len(done.lines)} arguments of the recipe {done.recipe}"
    ]
    if done.lost:
        lines += ["without a counterpart"]
        lines += [f"  - {line}" for line in _losses(done)]
    if done.same:
        lines += [_same(done)]
    if done.differs:
        lines += ["what differs in meaning"]
        lines += [f"  - {one_line(sentence)}" for sentence in done.differs]
    lines += [f"next: {command}"] * ("model" in done.lines)  # else the bundled model would be trained
    return "\n".join(lines)
