"""No key of a file is lost: the counting rule over all keys of all kits, and the files that it was made for."""

import itertools
import re

import pytest
import yaml
from counted import summary_text, uncounted

from zerofit.base.errors import UserError
from zerofit.convert import kits, page
from zerofit.convert.conversion import convert as converted
from zerofit.tools import convert

BASES = {
    "axolotl": "base_model: a/b\ndatasets: [{path: a.jsonl, type: alpaca}]\n",
    "LLaMA-Factory": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: a.jsonl\n",
    "ms-swift": "model: a/b\ntuner_type: lora\ndataset: a.jsonl\n",
    "TRL": "model_name_or_path: a/b\ndataset_name: c/d\n",
    "alignment-handbook": "model_name_or_path: a/b\ndataset_mixer: {c/d: 1.0}\n",
    "unsloth": "model: a/b\ntraining: {training_type: lora}\ndata: {dataset: c/d}\n",
    "torchtune": "model: {_component_: torchtune.models.llama3.llama3_8b}\n"
    "checkpointer: {checkpoint_dir: a}\ndataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
    "optimizer: {_component_: torch.optim.AdamW}\n",
    "accelerate": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
    "DeepSpeed": "zero_optimization: {stage: 2}\n",
}

VALUES = (True, False, None, 0, 2, "words", [], ["a"], {"a": 1})
OFF = (None, 0, [])  # beside False, which says the same


def keys_in_tables(kit):
    """Return every key that a kit's tables name; a prefix as one key of it."""
    texts = [*kit.lost.values(), *kit.refused.values(), *(rule.keys for rule in kit.rules)]
    named = {*kit.keys, *kit.defaults, *kit.marks, *itertools.chain(*(text.split() for text in texts)), "unheard_of"}
    return sorted(key.replace("*", "x") for key in named if "," not in key and not key.endswith("."))


def with_key(base, key, value, nested):
    """Return a base with one key; a dotted one of a kit with sections below its section, of a set in each set."""
    section, dot, name = key.partition(".")
    if not dot:
        return base | {key: value}
    held = base.get(section, {})
    if isinstance(held, list):
        return base | {section: [one | {name: value} for one in held]}
    return base | {section: (held if isinstance(held, dict) else {}) | {name: value}}


@pytest.mark.parametrize("kit", kits.KITS, ids=lambda kit: kit.name)
def test_no_key_of_a_kit_vanishes_with_any_value(kit, tmp_path):
    base = yaml.safe_load(BASES[kit.name])
    failures, same = [], {}
    for key, value in itertools.product(keys_in_tables(kit), VALUES):
        theirs = with_key(base, key, value, kit.nested)
        try:
            done = converted(kit, theirs, tmp_path / "a.yaml", names=convert.names())
            convert.name_texts(done, "b.yaml")
        except UserError:
            continue
        failures += [f"{missing}: {value!r}" for missing in uncounted(theirs, done, summary_text(done))]
        if any(place.replace(": ", ".") == key for place in done.same) and (value is False or value not in OFF):
            same.setdefault(key, []).append(value)
    assert not failures, failures
    both = {key: values for key, values in same.items() if len(values) > 1}
    assert not both, both


def of_text(text, folder, kit=""):
    """Return (the conversion, its file's values) of a text, as the command makes them."""
    file = folder / "theirs.yaml"
    file.write_text(text)
    done = convert.convert_files([str(file)], kit)
    written = page.text(done, "make sft")
    convert.check(done, written)
    return done, yaml.safe_load(written)


@pytest.mark.parametrize(
    "kit, line, expected",
    [
        *[(kit, "bf16: false", {"bf16": False}) for kit in ("axolotl", "LLaMA-Factory", "TRL", "alignment-handbook")],
        ("axolotl", "bf16:", {"bf16": False}),
        ("TRL", "bf16: 0", {"bf16": False}),
        ("LLaMA-Factory", "bf16: false\npure_bf16: true", {"bf16": None, "pure_bf16": True}),
        ("ms-swift", "torch_dtype: float32", {"bf16": False}),
        ("torchtune", "dtype: fp32", {"bf16": False}),
        ("DeepSpeed", "bf16: {enabled: false}", {"bf16": False}),
        ("accelerate", "parallelism_config: {parallelism_config_cp_size: 2}", {"sp_size": 2}),
        ("accelerate", "parallelism_config: {parallelism_config_tp_size: 2}", {"tp_size": 2}),
        ("TRL", "max_length: null", {"max_length": None, "truncation": "error"}),
        ("alignment-handbook", "max_seq_length: null", {"max_length": None, "truncation": "error"}),
        ("TRL", "max_grad_norm: null", {"max_grad_norm": 0}),
        ("TRL", "learning_rate: 0", {"learning_rate": 0}),
        ("axolotl", "max_grad_norm: null", {"max_grad_norm": 1.0}),
        ("torchtune", "shuffle: false", {"train_sampling_strategy": "sequential"}),
        ("LLaMA-Factory", "disable_shuffling: true", {"train_sampling_strategy": "sequential"}),
        (
            "ms-swift",
            "dataset_shuffle: false\ntrain_dataloader_shuffle: false",
            {"train_sampling_strategy": "sequential"},
        ),
        *[
            (kit, f"{key}: '.*[.](q|v){{1,1}}_proj'", {"lora_target_modules": [".*[.](q|v){1,1}_proj"]})
            for kit, key in (
                ("axolotl", "adapter: lora\nlora_target_modules"),
                ("ms-swift", "target_modules: [k_proj]\ntarget_regex"),
                ("TRL", "use_peft: true\nlora_target_modules"),
            )
        ],
        ("axolotl", "gradient_checkpointing: false", {"gradient_checkpointing": False}),
        ("LLaMA-Factory", "disable_gradient_checkpointing: true", {"gradient_checkpointing": False}),
        ("TRL", "run_name: 3.10", {"run_name": "3.10"}),
        ("TRL", "model_revision: 0x10", {"model_revision": "0x10"}),
        ("axolotl", "revision_of_model: 2_0", {"model_revision": "2_0"}),
        ("ms-swift", "output_dir: 12:30:00", {"output_dir": "12:30:00"}),
        ("TRL", 'run_name: "a\\nb\\rc\\Nd\\Le\\Pf"', {"run_name": "a\nb\rc\x85d\u2028e\u2029f"}),
    ],
)
def test_what_a_value_says_is_in_the_converted_file(kit, line, expected, tmp_path):
    written = of_text(f"{BASES[kit]}{line}\n", tmp_path, kit)[1]
    assert {name: written.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "kit, line, listed",
    [
        ("ms-swift", "dataset_shuffle: false", "dataset_shuffle"),
        ("ms-swift", "train_type: full", "train_type"),
        ("ms-swift", "lora_dropout_p: 0.1\nlora_dropout: 0.3", "lora_dropout"),
        ("ms-swift", "target_regex: a.*b\ntarget_modules: [q_proj]", "target_modules"),
        ("TRL", "max_length: 100\nmax_seq_length: 200", "max_seq_length"),
        ("axolotl", "shuffle_merged_datasets: false", "shuffle_merged_datasets"),
        ("axolotl", "test_datasets: [{path: b, train_on_eos: last}]", "test_datasets: b: train_on_eos"),
        ("TRL", "disable_dropout: false", "disable_dropout"),
        ("LLaMA-Factory", "pref_loss: orpo", "pref_loss"),
        ("accelerate", "fsdp_config: {fsdp_activation_checkpointing: true, fsdp_version: 2}\n",
         "fsdp_config: fsdp_activation_checkpointing"),
    ],
)  # fmt: skip
def test_off_where_the_kits_default_is_on_and_a_second_name_of_a_setting_are_listed(kit, line, listed, tmp_path):
    text = BASES[kit].replace("MULTI_GPU", "FSDP")
    assert listed in of_text(f"{text}{line}\n", tmp_path, kit)[0].lost


@pytest.mark.parametrize(
    "kit, lines, key, why",
    [
        ("TRL", "lora_modules_to_save: [lm_head]", "lora_modules_to_save", "only for adapters"),
        ("ms-swift", "tuner_type: full\ntarget_modules: [q_proj]", "target_modules", "only for adapters"),
        ("axolotl", "simpo_gamma: 2", "simpo_gamma", "has no effect in this training (recipe sft)"),
    ],
)
def test_a_key_of_another_training_is_listed_with_the_reason(kit, lines, key, why, tmp_path):
    text = BASES[kit].replace("tuner_type: lora\n", "")
    assert of_text(f"{text}{lines}\n", tmp_path, kit)[0].lost[key].startswith(why)


NINE = "\n".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else '1'] * 9)}]" for n in range(9))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "kit, line, sentence",
    [
        (
            "TRL",
            "lora_r: 8\nlora_r: 999",
            r"yaml:4:1: not valid YAML: 'lora_r' is also in line 3; keep one of them\.",
        ),
        ("axolotl", "test_datasets: [{path: a, path: b}]", "'path' is also in line 3"),
        ("TRL", """lr_scheduler_kwargs: '{"a": 1, "a": 2}'""", "lr_scheduler_kwargs: invalid JSON"),
        ("TRL", "seed: null", "seed: null is not allowed; .* default 42"),
        ("TRL", "run_name: no", "run_name: YAML reads it as false; put the text in quotes"),
        ("TRL", NINE, "more than 10,000 values including aliases"),
        ("TRL", "x: &d [*d]", "an alias of an enclosing value"),
        ("TRL", "x: &d {y: *d}", "an alias of an enclosing value"),
        ("TRL", f"x: {'[' * 5000}", "more than 20 levels"),
        ("TRL", f"x: {'{y: ' * 3000}", "more than 20 levels"),
        ("TRL", f"""lr_scheduler_kwargs: '{'{"a": ' * 5000}'""", "lr_scheduler_kwargs: invalid JSON"),
        ("TRL", f"seed: {'9' * 5000}", "cannot be read as int"),
        ("TRL", r'x: "\ud800"', "unpaired surrogate"),
        *[
            (kit, f"{key}: [q_proj, 'layers.[0-9]+.(q|v)_proj']", f"{key}: .*is a regular expression")
            for kit, key in (
                ("axolotl", "adapter: lora\nlora_target_modules"),
                ("ms-swift", "target_modules"),
                ("TRL", "use_peft: true\nlora_target_modules"),
            )
        ],
        ("TRL", "loss_type: dft", "loss_type: dft: trains with a loss"),
        ("axolotl", "use_dynamic_finetuning: true", "trains with a loss that zerofit does not support"),
        ("LLaMA-Factory", "use_dft_loss: true", "trains with a loss that zerofit does not support"),
        ("ms-swift", "enable_dft_loss: true", "trains with a loss that zerofit does not support"),
        ("torchtune", "loss: {_component_: my.FocalLoss}", "trains with a loss that zerofit does not support"),
        ("ms-swift", "loss_type: focal", "trains with a loss that zerofit does not support"),
        ("ms-swift", "report_to: [a.b]\nlearning_rate: x", "learning_rate is x"),
        ("axolotl", "unfrozen_parameters: [lm_head]", "trains a part of the weights"),
        ("ms-swift", "freeze_parameters_ratio: 0.5", "trains a part of the weights"),
        ("LLaMA-Factory", "do_train: false", "do_train"),
        ("TRL", "datasets: [{path: null}]", "YAML reads it as null|is not a file"),
    ],
)
def test_it_refuses_what_would_be_another_training(kit, line, sentence, tmp_path):
    key = line.rpartition("\n")[2].partition(":")[0] if "regular" in sentence else ""
    with pytest.raises(UserError, match=sentence.replace(line.rpartition(":")[0], key) if key else sentence):
        of_text(f"{BASES[kit]}{line}\n", tmp_path, kit)


@pytest.mark.bad_input
@pytest.mark.parametrize("kit", [kit for kit in BASES if kit not in ("accelerate", "DeepSpeed")])
@pytest.mark.parametrize("value", ["null", "''", "[a]"])
def test_a_job_without_a_model_is_refused(kit, value, tmp_path):
    text = re.sub("a/b|(?<=checkpoint_dir: )a", value, BASES[kit])
    with pytest.raises(UserError, match=r"theirs\.yaml: .*(model is missing|is not a file|as null|invalid value)"):
        of_text(text, tmp_path, kit)


@pytest.mark.bad_input
def test_a_flat_file_of_another_kit_is_not_taken_for_one_that_shares_its_keys(tmp_path):
    text = (
        "model_name: a/b\nmax_seq_length: 2048\nload_in_4bit: true\nr: 16\ntarget_modules: [q_proj]\n"
        "use_gradient_checkpointing: unsloth\nrandom_state: 1\ndataset: my.jsonl\nmax_steps: 60\n"
    )
    with pytest.raises(UserError, match=r"4 of its 9 keys are unknown \(max_seq_length, r, .*--kit ms-swift"):
        of_text(text, tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize("end", ["\\n", "\\r", "\\N", "\\L", "\\P"])
def test_a_key_does_not_leave_its_comment(end, tmp_path):
    done, written = of_text(f'{BASES["TRL"]}"zz{end}trust_remote_code: true{end}#": "a{end}zero: 3"\n', tmp_path)
    assert not {"trust_remote_code", "zero"} & written.keys()
    assert "trust_remote_code: true" not in page.summary(done, "x", "y").splitlines()


def test_a_key_of_a_file_that_the_file_names_is_counted(tmp_path):
    (tmp_path / "dataset_info.json").write_text(
        '{"mine": {"file_name": "a.jsonl", "num_samples": 5, "split": "d", "columns": {"prompt": "q", "images": "i"}}}'
    )
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "overlap_comm": true}, "gradient_clipping": 3}'
    )
    text = BASES["LLaMA-Factory"].replace("a.jsonl", "mine") + "deepspeed: ds.json\n"
    done, written = of_text(text, tmp_path, "LLaMA-Factory")
    place = "mine in dataset_info.json"
    assert {f"{place}: num_samples", f"{place}: columns: images"} <= done.lost.keys()
    assert {"ds.json in deepspeed: zero_optimization: overlap_comm", "ds.json in deepspeed: gradient_clipping"} <= {
        *done.lost
    }
    assert (written["data_split"], written["columns"], written["zero"]) == ("d", ["instruction=q"], 2)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "name, content",
    [("dataset_info.json", '{"mine": {"file_name": "a", "file_name": "b"}}'), ("ds.json", '{"bf16": 1, "bf16": 2}')],
)
def test_a_key_twice_in_a_file_that_the_file_names_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    text = BASES["LLaMA-Factory"].replace("a.jsonl", "mine") + "deepspeed: ds.json\n"
    with pytest.raises(UserError, match=rf"{name}:1:\d+: not valid YAML: '\w+' is also in line 1"):
        of_text(text, tmp_path, "LLaMA-Factory")


def test_a_key_of_the_launchers_file_is_counted_beside_the_jobs(tmp_path):
    launcher = BASES["accelerate"] + "mixed_precision: fp16\nuse_cpu: false\ndebug: false\nmachine_rank: 0\n"
    (tmp_path / "job.yaml").write_text(BASES["TRL"] + "use_peft: true\nlearning_rate: 1e-5\n")
    (tmp_path / "accelerate.yaml").write_text(launcher)
    done = convert.convert_files([str(tmp_path / "job.yaml"), str(tmp_path / "accelerate.yaml")])
    assert not uncounted(yaml.safe_load(launcher), done, page.text(done, "make sft"))
    assert done.on_gpus["fp16"].value is True
