"""A run goes on at another ZeRO stage, rank count or offload as if nothing had been changed."""

import contextlib
import itertools
import json
import logging
import math
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Run, python, run_python, run_world, runs_slow, slow_but, two_layers
from transformers import PreTrainedConfig, trainer_utils

from zerofit.base import log_filters
from zerofit.base.errors import UserError
from zerofit.checkpoint import differences, reshard, zero_shards
from zerofit.commands import resume
from zerofit.config import resolve
from zerofit.job.request import Request
from zerofit.train.trainer import ZerofitTrainer

FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8", "--num_samples", "0",
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--max_steps", "6", "--logging_steps", "1",
    "--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "2", "--weight_decay", "0.1",
]  # fmt: skip
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # as docs/certificate.md between stages and ranks


def saving(recipe: str, zero: str, *more: str):
    return recipe, [*FLAGS, "--model", two_layers(), "--zero", zero, *more]


def resuming(source: Path, recipe: str, zero: str, *more: str):
    words = ["--resume_from_checkpoint", str(source / "checkpoint-4"), "--save_strategy", "no"]
    return recipe, [*FLAGS, "--model", two_layers(), "--zero", zero, *words, *more]


def check(before, after, tolerance=TOLERANCE["fp32"]):
    """The rest of the undisturbed run (from within its second epoch), the same learning rates, and the same model."""
    wanted, found = before.metrics[4:], after.metrics
    assert [line["step"] for line in found] == [5, 6]
    assert [line["learning_rate"] for line in found] == [line["learning_rate"] for line in wanted]
    assert after.losses == pytest.approx(before.losses[4:], rel=tolerance)
    norms = [[line["grad_norm"] for line in lines] for lines in (found, wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance * 20)
    logits = [torch.load(run.folder / "logits.pt")["logits"] for run in (before, after)]
    assert torch.allclose(*logits, atol=tolerance * 10 * logits[0].abs().max().item())


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Saved on one rank and on two; each gone on with on two ranks and on one."""
    folder = tmp_path_factory.mktemp("resumed")
    bf16, dropout = ["--bf16", "true"], ["--lora_dropout", "0.1"]
    one = run_world(1, {"1-2": saving("sft", "2", *bf16)}, folder)
    shutil.copytree(folder / "1-2" / "checkpoint-4", folder / "foreign" / "checkpoint-4")
    (folder / "foreign" / "checkpoint-4" / "zerofit.json").unlink()
    cases = {
        "0": saving("sft", "0"), "3": saving("sft", "3"),
        "0>3": resuming(folder / "0", "sft", "3"), "3>0": resuming(folder / "3", "sft", "0"),
        "1-2>foreign>3": resuming(folder / "foreign", "sft", "3", *bf16),
        "dropout": saving("lora", "2", *dropout),
        "dropout>": resuming(folder / "dropout", "lora", "2", *dropout, "--save_strategy", "steps"),
    }  # fmt: skip
    workers = [*dropout, "--dataloader_num_workers", "2", "--dataloader_persistent_workers", "true"]
    if runs_slow(request):
        cases |= {
            "lora-3": saving("lora", "3"), "lora-3>0": resuming(folder / "lora-3", "lora", "0"),
            "1-2>2": resuming(folder / "1-2", "sft", "2", *bf16),
            "1-2>1-offload": resuming(folder / "1-2", "sft", "1", *bf16, "--offload", "optimizer"),
            "3>3-sp": resuming(folder / "3", "sft", "3", "--sp_size", "2"),
            "lora-sp": saving("lora", "2", "--sp_size", "2"), "lora-sp>1": resuming(folder / "lora-sp", "lora", "1"),
            "workers": saving("lora", "2", *workers),
            "workers>": resuming(folder / "workers", "lora", "2", *workers),
        }  # fmt: skip
    return one | run_world(2, cases, folder)


SHORT = ("0>3", "3>0", "1-2>foreign>3")


@pytest.mark.parametrize("name", slow_but([*SHORT, "1-2>2", "1-2>1-offload", "lora-3>0"], SHORT))
def test_it_goes_on(runs, name):
    """Also from a checkpoint that another program might have saved, whose files alone tell stage and ranks."""
    before = runs[name.split(">")[0]]
    check(before, runs[name], TOLERANCE["bf16" if name.startswith("1-2>") else "fp32"])
    said = runs[name].json("run.json")["decisions"]
    assert any("checkpoint-4 was saved with ZeRO" in line for line in said)
    source, ranks = before.json("run.json"), 1 + ("1-2" not in name)
    stage, now = source["arguments"]["zero"]["value"], runs[name].json("run.json")["arguments"]["zero"]["value"]
    stretches = f"ZeRO stage {stage} on {ranks} rank{'s' * (ranks > 1)} to step 4, then stage {now} on 2 ranks"
    assert stretches in (runs[name].folder / "final" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3>3-sp", "lora-sp>1"])
def test_it_goes_on_at_another_sp_size(runs, name):
    check(runs[name.split(">")[0]], runs[name])


@pytest.mark.slow
def test_data_workers_change_no_bit(runs):
    """Two epochs, in which workers live on, and a run that goes on within the second."""
    assert runs["workers"].losses == runs["dropout"].losses
    assert runs["workers>"].losses == runs["dropout"].losses[4:]


def test_each_rank_draws_its_own_dropout_and_goes_on_with_it(runs):
    def states(name, step):
        files = [runs[name].folder / f"checkpoint-{step}" / f"rng_state_{rank}.pth" for rank in (0, 1)]
        return [torch.load(file, weights_only=False) for file in files]

    first, second = states("dropout", 4)
    assert not torch.equal(first["cpu"], second["cpu"]) and first["python"] != second["python"]
    assert runs["dropout>"].losses == runs["dropout"].losses[4:]
    for before, after in zip(states("dropout", 6), states("dropout>", 6), strict=True):
        assert torch.equal(before["cpu"], after["cpu"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["sft", "lora"])
@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (4, 2), (1, 4)])
def test_every_stage_and_rank_count_to_every_other(tmp_path, recipe, counts):
    """Effective batch 24: a multiple of every rank count."""
    more = ["--effective_batch_size", "24", "--per_device_train_batch_size", "1"]
    saved, resumed = {}, {}
    for n in counts:
        saved |= run_world(n, {f"{n}-{z}": saving(recipe, z, *more) for z in "0123"}, tmp_path)
    for n in counts:
        cases = {f"{s}>{n}-{z}": resuming(tmp_path / s, recipe, z, *more) for s, z in itertools.product(saved, "0123")}
        resumed |= run_world(n, cases, tmp_path)
    for name, run in resumed.items():
        check(saved[name.split(">")[0]], run)


def shards_of(ranks: int) -> zero_shards.OptimizerStates:
    """States of three parameters in pieces of `ranks` ranks as stage 3 saves them, the last piece padded."""
    shapes, pieces = {"a": (4, 5), "b": (7,), "c": (3, 3, 3)}, {}
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        share = -(-math.prod(shape) // ranks)
        pieces[name] = {key: list(torch.randn(share * ranks, generator=generator).split(share)) for key in KEYS}
    return zero_shards.OptimizerStates(shapes, pieces)


KEYS = ("fp32", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("saved_by", [1, 2, 5])
def test_a_range_of_a_state_is_that_of_the_whole(saved_by):
    states = shards_of(saved_by)
    for name, key in itertools.product(states.shapes, KEYS):
        flat = torch.cat(states.pieces[name][key])[: math.prod(states.shapes[name])]
        assert torch.equal(states.full(name, key), flat.view(states.shapes[name]))
        for start, stop in itertools.combinations_with_replacement(range(len(flat) + 4), 2):
            assert torch.equal(states.part(name, key, start, stop), flat[start:stop])
    states.pieces["b"]["exp_avg"] = [states.pieces["b"]["exp_avg"][0][:1]]
    with pytest.raises(UserError, match="b: the shards hold 1 of the 7 numbers of its exp_avg"):
        states.part("b", "exp_avg", 0, 1)


@pytest.mark.parametrize(("saved_by", "ranks"), [(1, 3), (2, 3), (5, 2), (4, 4)])
def test_each_rank_reads_its_share_of_stage_3(monkeypatch, saved_by, ranks):
    """Not the whole checkpoint: one number more for each parameter and state at the most, and bit for bit the same."""
    states, read = shards_of(saved_by), []
    part = states.part

    def counted(*words):
        read.append(part(*words))
        return read[-1]

    states.part, found = counted, {(name, key): [] for name in states.shapes for key in KEYS}
    total = sum(math.prod(shape) for shape in states.shapes.values()) * len(KEYS)
    for rank in range(ranks):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in states.shapes}
        for name, p in parameters.items():
            share = -(-math.prod(states.shapes[name]) // ranks)
            p.ds_tensor, p.partition_numel = torch.zeros(share), lambda share=share: share
        flat = torch.zeros(sum(p.partition_numel() for p in parameters.values()))
        zero = SimpleNamespace(
            fp32_partitioned_groups_flat=[flat], fp16_groups=[list(parameters.values())], sub_group_to_group_id=[0],
            checkpoint_event_prologue=lambda: None, checkpoint_event_epilogue=lambda: None,
        )  # fmt: skip
        optimizer, names = torch.optim.AdamW([flat]), {id(p): name for name, p in parameters.items()}
        read.clear()
        reshard._into_partitions(zero, optimizer, states, names, list(KEYS[1:]), {})
        assert sum(len(piece) for piece in read) <= total / ranks + len(found)
        own = {"fp32": flat, **{key: optimizer.state[flat][key] for key in KEYS[1:]}}
        for key in KEYS:
            shares = own[key].split([p.partition_numel() for p in parameters.values()])
            for name, piece in zip(parameters, shares, strict=True):
                found[name, key].append(piece)
        assert torch.equal(torch.cat([p.ds_tensor for p in parameters.values()]), flat)
    for (name, key), pieces in found.items():
        whole = states.full(name, key)
        assert torch.equal(torch.cat(pieces)[: whole.numel()].view_as(whole), whole)


@pytest.mark.parametrize(("zero", "saved", "anew"), [
    (2, {"zero": "2"}, False), (3, {"zero": "2"}, True), (2, {"zero": "2", "world_size": 4}, True),
    (2, {"zero": "2", "precision": "bf16"}, True), (2, {"zero": "0"}, True), (0, {"zero": "0", "world_size": 4}, False),
    (2, None, False),
])  # fmt: skip
def test_how_the_best_step_is_loaded(monkeypatch, zero, saved, anew):
    """DeepSpeed loads its shards only at the stage and rank count that they were saved at."""
    from transformers import Trainer

    from zerofit.train import trainer as module

    seen = []
    known = saved and {"world_size": 2, "offload": "none", "optim": "adamw_torch", "precision": "fp32"} | saved
    monkeypatch.setattr(module, "read_facts", lambda folder: known)
    monkeypatch.setattr(module.reshard, "load_weights", lambda trainer, folder: seen.append(("anew", folder)))
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self: seen.append(("as it is", None)))
    trainer = object.__new__(module.ZerofitTrainer)
    trainer.state = SimpleNamespace(best_model_checkpoint="run/checkpoint-2")
    trainer.is_deepspeed_enabled, trainer.model = zero > 0, torch.nn.Linear(1, 1)
    written = {"zero": str(zero), "offload": "none"}
    trainer.settings = SimpleNamespace(
        world_size=2, optim="adamw_torch", precision="fp32", zero=zero, written=lambda: written
    )
    trainer._load_best_model()
    assert seen == [("anew", Path("run/checkpoint-2")) if anew else ("as it is", None)]


@pytest.mark.slow
def test_the_best_step_was_saved_at_another_stage(tmp_path):
    """A larger loss is said to be better here: step 2's, which two ranks have saved."""
    words = [
        "--load_best_model_at_end", "true", "--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps",
        "--eval_steps", "2", "--save_steps", "2", "--greater_is_better", "true", "--warmup_steps", "0",
        "--save_total_limit", "5",
    ]  # fmt: skip
    before = run_world(2, {"2": saving("sft", "2", *words), "lora": saving("lora", "1", *words)}, tmp_path)
    goes_on = ["--resume_from_checkpoint", str(tmp_path / "2" / "checkpoint-4")]
    lora = ["--resume_from_checkpoint", str(tmp_path / "lora" / "checkpoint-4")]
    after = run_world(
        1,
        {
            "2>2": saving("sft", "2", *words, *goes_on),
            "2>3": saving("sft", "3", *words, *goes_on),
            "2>0": saving("sft", "0", *words, *goes_on),
            "lora>2": saving("lora", "2", *words, *lora),
        },
        tmp_path,
    )
    for name, run in after.items():
        first = before["lora" if name == "lora>2" else "2"]
        at_2 = next(line["eval_loss"] for line in first.metrics if "eval_loss" in line)
        assert run.json("result.json")["eval_loss"] == pytest.approx(at_2, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_same_world_goes_on_bit_for_bit(tmp_path):
    """Every stage, with offload, LoRA with dropout, packing, streaming."""
    ways = {f"{recipe}-{z}": saving(recipe, z) for recipe in ("sft", "lora") for z in "0123"}
    ways |= {f"offload-{z}": saving("sft", z, "--offload", "optimizer") for z in "123"}
    ways |= {
        "offload-all": saving("sft", "3", "--offload", "all"),
        "dropout": saving("lora", "2", "--lora_dropout", "0.1"),
    }
    for z in "03":
        ways[f"packing-{z}"] = saving("sft", z, "--packing", "--max_length", "64")
        ways[f"streaming-{z}"] = saving("sft", z, "--streaming")
    again = {
        f"{name}>": (recipe, [*flags, "--resume_from_checkpoint", str(tmp_path / name / "checkpoint-4")])
        for name, (recipe, flags) in ways.items()
    }
    runs = run_world(2, ways | again, tmp_path)
    for name in ways:
        assert runs[f"{name}>"].losses == runs[name].losses[4:], name
        assert runs[f"{name}>"].grad_norms == runs[name].grad_norms[4:], name


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_a_checkpoint_of_plain_transformers(tmp_path, zero):
    """Made by transformers.Trainer alone; at a learning rate of 0 it must stay as it is, moments and all."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(5, 25) + i, "labels": torch.arange(5, 25) + i} for i in range(48)]
    arguments = TrainingArguments(
        str(tmp_path / "plain"), max_steps=4, save_steps=4, use_cpu=True, report_to="none", learning_rate=1e-3,
        logging_steps=1, per_device_train_batch_size=8, weight_decay=0.1,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_pretrained(two_layers(), dtype=torch.float32)
    Trainer(net, arguments, train_dataset=rows).train()
    scheduler = torch.load(tmp_path / "plain" / "checkpoint-4" / "scheduler.pt")
    scheduler["base_lrs"] = scheduler["_last_lr"] = [0.0] * len(scheduler["base_lrs"])
    torch.save(scheduler, tmp_path / "plain" / "checkpoint-4" / "scheduler.pt")
    run = run_world(1, {"on": resuming(tmp_path / "plain", "sft", zero)}, tmp_path)["on"]
    assert [line["step"] for line in run.metrics] == [5, 6] and run.metrics[0]["learning_rate"] == 0
    was, now = (load_file(f / "model.safetensors") for f in (tmp_path / "plain" / "checkpoint-4", run.folder / "final"))
    assert all(torch.equal(was[name], now[name]) for name in was)


OPTIMIZERS = {"sgd": "0.1", "sophia": "4e-4", "lion_32bit": "3e-4", "adamw_8bit": "5e-4"}


@pytest.mark.slow
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_states_of_other_optimizers(tmp_path, optim):
    more = ["--optim", optim, "--learning_rate", OPTIMIZERS[optim]]
    before = run_world(2, {"2": saving("sft", "2", *more)}, tmp_path)["2"]
    cases = {f"on-{z}": resuming(tmp_path / "2", "sft", z, *more) for z in "023"}
    for run in run_world(1, cases, tmp_path).values():
        if optim == "adamw_8bit":  # its blocks are cut differently: states are reset, which is reported
            assert (
                "are reset: state1 of adamw_8bit does not have one number per weight"
                in (run.folder / "logs" / "rank0.log").read_text()
            )
        else:
            check(before, run)


def test_make_resume_on_another_number_of_processes(runs, tmp_path):
    """make resume GPUS=1 ZERO=3 of a run on two ranks at stage 2; lines after the checkpoint are made again."""
    folder = tmp_path / "run"
    shutil.copytree(runs["3"].folder, folder)
    for name in ("checkpoint-6", "final"):
        shutil.rmtree(folder / name)
    (folder / "result.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # what a kill leaves
    words = [
        "make",
        "-C",
        str(ROOT),
        "ENV=active",
        f"PYTHON={python()}",
        "resume",
        f"RUN={folder}",
        "GPUS=1",
        "ZERO=0",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "zerofit sft: 1 process, ZeRO 0" in done.stdout and ", resumed from checkpoint-4\n" in done.stdout
    assert "missing keys" not in done.stdout + done.stderr  # of the head, which is tied
    assert "checkpoint-4 was saved with ZeRO 3, 2 ranks, offload none" in done.stdout
    assert "effective batch 8 = per_device_train_batch_size 4 x gradient_accumulation_steps 2 x 1 rank" in done.stdout
    assert [line["step"] for line in Run(folder).metrics] == [1, 2, 3, 4, 5, 6]
    assert Run(folder).losses == pytest.approx(runs["3"].losses, rel=TOLERANCE["fp32"])


OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}

# What the JSON of the saved run has, what that of the resumed run has -> what is said; "": it goes on.
OWN = {
    "the scheduler is gone": (
        SCHEDULER,
        {},
        "saved with WarmupLR in its DeepSpeed JSON, this run has no scheduler .*--deepspeed",
    ),
    "the optimizer is gone": (
        OPTIMIZER,
        {},
        "saved with AdamW in its DeepSpeed JSON, this run has no optimizer .*--deepspeed",
    ),
    "a scheduler is new": ({}, SCHEDULER, "saved with no scheduler in .* has WarmupLR in .*remove this section"),
    "the same": (OPTIMIZER | SCHEDULER, OPTIMIZER | SCHEDULER, ""),
    "none": ({}, {}, ""),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("what", OWN)
def test_a_resume_needs_the_optimizer_and_scheduler_of_the_runs_json(tmp_path, what, facts):
    """transformers looked for a scheduler.pt, which such a run does not save: a traceback."""
    saved, resumed, said = OWN[what]
    settings = []
    for name, sections in (("saved", saved), ("resumed", resumed)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | sections))
        settings.append(resolve.resolve_settings("sft", ["--data", "none", "--deepspeed", str(file)], 1))
    if "scheduler" not in saved:
        (tmp_path / "scheduler.pt").touch()
    known = {"of_json": differences.json_components(settings[0])} if facts else {}
    seen = said and (facts or (what == "the scheduler is gone"))  # by files alone, only the scheduler's is missing
    with pytest.raises(UserError, match=said if facts else "no scheduler") if seen else contextlib.nullcontext():
        differences.check_json_components(settings[1], tmp_path, known, "--resume_from_checkpoint x")
    if not facts and not seen:
        assert settings[1].decisions[-1].startswith("--resume_from_checkpoint x: does not record its optimizer")


@pytest.mark.bad_input
def test_an_effective_batch_that_cannot_be_dealt_out(runs):
    (runs["0"].folder / "result.json").unlink()
    done = run_python(["-m", "zerofit", "resume", "--gpus", "3", str(runs["0"].folder)])
    assert done.returncode == 2 and "effective batch of 8 is not a multiple of it" in done.stderr
    assert "use 1, 2, 4, 8 processes" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "new", "offload", "wanted"),
    [
        ({"offload": "all", "seed": 1}, {"zero": 0}, "all", {"seed": 1, "offload": "none"}),
        ({"offload": "all", "offload_path": "/x"}, {"zero": "0"}, "all", {"offload": "none"}),
        ({"config": "x.yaml"}, {"zero": 2}, "all", {"config": "x.yaml", "offload": "optimizer"}),
        ({"offload": "optimizer"}, {"zero": 2}, "optimizer", {"offload": "optimizer"}),
        ({"offload": "all"}, {"zero": 0, "offload": "all"}, "all", {"offload": "all"}),
        ({"offload": "all"}, {"zero": 3}, "all", {"offload": "all"}),
        ({"offload": "all"}, {}, "all", {"offload": "all"}),
    ],
)
def test_an_offload_that_the_new_stage_does_not_have_is_dropped(capsys, flags, new, offload, wanted):
    asked = Request("sft").put(**flags)
    assert resume.keep_supported_offload(asked, Request("sft").put(**new), offload).values == wanted
    said = capsys.readouterr().out
    assert ("does not support --offload all: continuing with --offload" in said) == (wanted != flags)


def test_what_a_resume_says_itself_is_not_said_again_by_transformers(monkeypatch):
    """The functions of transformers warn; generation.stop_at_ends has aligned the tokens, and a run says its ends."""
    logger, heard = logging.getLogger("transformers.trainer_utils"), []
    monkeypatch.setattr(logger, "filters", [])
    log_filters.libraries()
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(listener)
    try:
        now = SimpleNamespace(logging_steps=5, eval_steps=None, save_steps=7, per_device_train_batch_size=16, n_gpu=0)
        then = SimpleNamespace(logging_steps=10, eval_steps=None, save_steps=8, train_batch_size=32)
        trainer_utils.compare_trainer_and_checkpoint_args(now, then)
        for pad, eos in ((9, 1), (9, 8)):
            config = PreTrainedConfig(pad_token_id=None, eos_token_id=1, bos_token_id=2)
            tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=eos, bos_token_id=2)
            trainer_utils.align_special_tokens(SimpleNamespace(config=config, generation_config=None), tokenizer)
    finally:
        logger.removeHandler(listener)
    assert not heard


@pytest.mark.injection
def test_a_checkpoint_that_lacks_weights_is_not_resumed():
    """transformers warns and goes on with the base's numbers in their place."""
    keys = namedtuple("Keys", "missing_keys unexpected_keys")
    trainer = SimpleNamespace(model=SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "embed.weight"}))
    ZerofitTrainer._issue_warnings_after_load(trainer, keys(["lm_head.weight"], []))  # held as the embedding
    with pytest.raises(UserError, match=r"lacks norm\.weight; it is incomplete or of another model"):
        ZerofitTrainer._issue_warnings_after_load(trainer, keys(["lm_head.weight", "norm.weight"], []))
    with pytest.raises(UserError, match=r"unexpected weights: other\.weight"):
        ZerofitTrainer._issue_warnings_after_load(trainer, keys([], ["other.weight"]))
