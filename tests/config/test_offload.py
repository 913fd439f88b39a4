"""NVMe, the ratio, ZeRO++, ZenFlow and SuperOffload: refusals and reasons, the JSON, and equal losses where it runs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import TINY, run_world

from zerofit.base.errors import UserError
from zerofit.config import deepspeed_json, nvme, offload, resolve
from zerofit.train import deepspeed_ops


def parse(*flags, ranks=2):
    return resolve.resolve_settings("sft", list(flags), ranks)


@pytest.fixture
def libaio(monkeypatch):
    """As if libaio were installed."""
    monkeypatch.setattr(nvme, "check_libaio", lambda: None)


@pytest.fixture
def disk(tmp_path_factory):
    """A folder whose file system has direct I/O."""
    folder = tmp_path_factory.mktemp("disk")
    try:
        nvme.check_folder("test", folder)
    except UserError:
        pytest.skip(f"{folder} is on a file system without direct I/O")
    return folder


def written(tmp_path, section, **top):
    file = tmp_path / "my.json"
    file.write_text(json.dumps({"zero_optimization": section, **top}))
    return str(file)


# --- what is refused ---


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--offload_path", "/"], "--offload_path /: offload is off; add --offload optimizer"),
        (["--offload", "optimizer", "--zero", "2", "--offload_path", "/"], "--offload_path / with ZeRO stage 2"),
        (["--offload", "optimizer", "--offload_path", "/no/where"], "--offload_path /no/where: folder not found"),
        (["--offload", "optimizer", "--offload_path", __file__], "is a file; use a folder"),
        (["--offload", "optimizer", "--offload_path", "/proc"], "--offload_path /proc: is not writable"),
    ],
)
def test_flags_refused(flags, says):
    with pytest.raises(UserError) as caught:
        parse(*flags)
    assert says in str(caught.value) and "\n" not in str(caught.value)


CPU = {"device": "cpu", "pin_memory": False}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("section", "top", "flags", "says"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, {}, [], 'device is "nvme" but nvme_path is missing'),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/no/where"}},
            {},
            [],
            "my.json: offload_optimizer.nvme_path = /no/where: folder not found",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/"}},
            {},
            [],
            'my.json: zero_optimization.offload_optimizer.device = "nvme" needs stage 3',
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
            {},
            ["--offload_path", "/b"],
            'nvme_path = "/a", but --offload_path is /b',
        ),
        (
            {"stage": 3, "offload_optimizer": CPU},
            {"zero_force_ds_cpu_optimizer": False},
            ["--offload_path", "/b"],
            'offload_optimizer.device = "cpu", but --offload_path is /b',
        ),
        (
            {"stage": 2, "offload_optimizer": {**CPU, "ratio": 0.3}},
            {},
            [],
            "Partial offloading only supported for ZeRO",
        ),
        (
            {"stage": 3, "offload_optimizer": {"ratio": 0.3}},
            {},
            [],
            "zero_optimization.offload_optimizer.ratio = 0.3: offload is off",
        ),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 1.5}}, {}, [], "ratio"),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.0}}, {}, [], "ratio = 0.0: the fraction"),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.3}},
            {},
            ["--optim", "adafactor"],
            "--optim adafactor with offload_optimizer.ratio: accelerate would silently replace it",
        ),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.3}},
            {},
            ["--resume_from_checkpoint", "true"],
            "offload_optimizer.ratio = 0.3 with --resume_from_checkpoint",
        ),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.3}},
            {"zero_force_ds_cpu_optimizer": False},
            [],
            "zero_force_ds_cpu_optimizer = false, but the former needs DeepSpeed's CPU Adam",
        ),
        (
            {"stage": 2, "offload_optimizer": CPU},
            {},
            ["--optim", "adafactor"],
            "--optim adafactor with zero_force_ds_cpu_optimizer = true (DeepSpeed's default)",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 3}, {}, [], "zero_hpz_partition_size = 3: must divide the 2 ranks"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, {}, [], "zero_hpz_partition_size = 0: must divide the 2 ranks"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, {}, [], "zero_hpz_partition_size = 2 needs stage 3"),
        (
            {"stage": 3, "zero_quantized_gradients": True},
            {},
            [],
            "my.json: zero_optimization.zero_quantized_gradients = true: DeepSpeed's quantizer needs a GPU",
        ),
        ({"stage": 3, "zero_quantized_weights": True}, {}, [], "my.json: zero_optimization.zero_quantized_weights"),
        (
            {"stage": 3, "zero_quantized_nontrainable_weights": True},
            {},
            [],
            "my.json: zero_optimization.zero_quantized_nontrainable_weights = true: DeepSpeed's quantizer",
        ),
        ({"stage": 3, "offload_optimizer": {**CPU, "super_offload": True}}, {}, [], "needs an NVIDIA GPU"),
        ({"stage": 2, "offload_optimizer": CPU, "zenflow": {}}, {}, [], "my.json: zero_optimization.zenflow"),
    ],
)
def test_files_refused(tmp_path, section, top, flags, says):
    with pytest.raises(UserError) as caught:
        parse("--deepspeed", written(tmp_path, section, **top), *flags)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("section", "top", "says"),
    [
        ({"stage": "3"}, {}, 'my.json: zero_optimization.stage = "3": write a number, without quotes.'),
        ({"stage": True}, {}, "zero_optimization.stage = true: write a number"),
        (
            {"stage": 3, "offload_optimizer": {**CPU, "ratio": "0.5"}},
            {},
            'offload_optimizer.ratio = "0.5": write a number',
        ),
        ({"stage": 3, "zero_hpz_partition_size": "2"}, {}, 'zero_hpz_partition_size = "2": write a number'),
        ({"stage": 3, "stage3_prefetch_bucket_size": "9"}, {}, 'stage3_prefetch_bucket_size = "9": write a number'),
        ({"stage": 2}, {"bf16": {"enabled": "false"}}, 'bf16.enabled = "false": write true or false, without quotes.'),
    ],
)
def test_values_in_quotes_are_refused(tmp_path, section, top, says):
    """DeepSpeed would convert them; here "false" was true, and "0.5" a traceback."""
    with pytest.raises(UserError) as caught:
        parse("--deepspeed", written(tmp_path, section, **top))
    assert says in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(("aio", "says"), [(None, None), ([1], "my.json: aio must be an object")])
def test_an_aio_section_that_is_none(tmp_path, libaio, disk, aio, says):
    section = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(disk)}}
    file = written(tmp_path, section, aio=aio)
    if says is None:
        assert parse("--deepspeed", file).zero == 3
        return
    with pytest.raises(UserError, match=says):
        parse("--deepspeed", file)


def test_harmless_literals_need_no_stage_3(tmp_path):
    """DeepSpeed's own defaults, written out: nothing of them is asked for."""
    section = {
        "stage": 2,
        "offload_optimizer": {**CPU, "ratio": 1.0, "super_offload": False},
        "zero_hpz_partition_size": 1,
    }
    found = parse("--deepspeed", written(tmp_path, section, zero_force_ds_cpu_optimizer=False))
    assert offload.enabled_keys(found.deepspeed) == {} and found.zero == 2


@pytest.mark.bad_input
def test_node_that_hpz_does_not_divide(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = parse("--deepspeed", written(tmp_path, {"stage": 3, "zero_hpz_partition_size": 2}), ranks=8)
    assert offload.hpz(found) == 2
    with pytest.raises(UserError, match="must divide the 2 ranks of this node"):
        parse("--deepspeed", written(tmp_path, {"stage": 3, "zero_hpz_partition_size": 4}), ranks=8)


@pytest.mark.bad_input
def test_a_flag_that_is_a_key_by_now_names_the_key():
    with pytest.raises(UserError, match=r'--offload_ratio; did you mean "ratio" in deepspeed_configs/offload_opt'):
        parse("--offload", "optimizer", "--offload_ratio", "0.3")


@pytest.mark.bad_input
def test_missing_libaio_is_one_sentence(monkeypatch, disk):
    from deepspeed.ops import op_builder

    monkeypatch.setattr(op_builder.AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(UserError, match=r"libaio was not found.*apt install libaio-dev"):
        parse("--offload", "all", "--offload_path", str(disk))


@pytest.mark.bad_input
def test_file_system_without_direct_io_is_refused(monkeypatch, tmp_path):
    really_open = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(path, flags, *more)

    monkeypatch.setattr(nvme.os, "open", refuse)
    with pytest.raises(UserError, match="direct I/O"):
        nvme.check_folder("--offload_path", tmp_path)
    assert not list(tmp_path.iterdir())


# --- the JSON ---


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_nvme_json(libaio, disk, what):
    found = parse("--offload", what, "--offload_path", str(disk))
    assert found.zero == 3 and found.source["zero"] == "decided"
    overlay = deepspeed_json.read_json(deepspeed_json.CONFIGS / f"offload_{what}_nvme.json")
    keys = [k for k in overlay["zero_optimization"] if k.startswith("offload_")]
    assert keys == (["offload_optimizer"] if what == "optimizer" else ["offload_optimizer", "offload_param"])
    for key in keys:
        assert found.deepspeed["zero_optimization"][key] == overlay["zero_optimization"][key] | {"nvme_path": str(disk)}
    assert found.deepspeed["aio"] == overlay["aio"]
    assert deepspeed_ops.required_ops(found.deepspeed) == [
        "PinMemoryBuilder",
        "AsyncIOBuilder",
    ]  # torch's AdamW: no CPU Adam
    deepspeed_json.lint(found.deepspeed, "resolved")


def test_nvme_from_the_file(libaio, disk, tmp_path):
    section = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(disk)}}
    found = parse("--deepspeed", written(tmp_path, section, zero_force_ds_cpu_optimizer=False))
    assert (found.offload, found.offload_path, found.source["offload_path"]) == (
        "optimizer",
        str(disk),
        "deepspeed JSON",
    )
    with pytest.raises(UserError, match=r"unknown key 'aio.blocksize'"):
        parse("--deepspeed", written(tmp_path, section, zero_force_ds_cpu_optimizer=False, aio={"blocksize": 1}))
    section["offload_optimizer"].pop("nvme_path")
    found = parse(
        "--deepspeed", written(tmp_path, section, zero_force_ds_cpu_optimizer=False), "--offload_path", str(disk)
    )
    assert found.deepspeed["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(disk)


@pytest.fixture
def ratio(tmp_path, monkeypatch):
    """The flags of a run with a ratio of 0.3 in the file of --offload optimizer."""
    folder = tmp_path / "deepspeed_configs"
    shutil.copytree(deepspeed_json.CONFIGS, folder)
    file = folder / "offload_optimizer.json"
    config = json.loads(file.read_text())
    config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.3
    file.write_text(json.dumps(config))
    monkeypatch.setattr(deepspeed_json, "CONFIGS", folder)
    return ["--offload", "optimizer", "--zero", "3"]


@pytest.mark.bad_input
def test_the_file_of_a_key_beside_the_offload_is_named(ratio):
    with pytest.raises(
        UserError, match=r"deepspeed_configs/offload_optimizer\.json: zero_opt\S+ratio = 0\.3 with --res"
    ):
        parse(*ratio, "--resume_from_checkpoint", "true")


def test_ratio_json(ratio):
    found = parse(*ratio)
    assert found.deepspeed["zero_optimization"]["offload_optimizer"]["ratio"] == 0.3
    assert found.deepspeed["zero_force_ds_cpu_optimizer"] is True
    assert any("checkpoints cannot be resumed" in d for d in found.decisions)
    assert deepspeed_ops.required_ops(found.deepspeed) == ["CPUAdamBuilder"]


def test_no_op_is_compiled_for_plain_offload():
    assert deepspeed_ops.required_ops(parse("--offload", "optimizer").deepspeed) == []


def test_what_depends_on_the_size(libaio, disk, monkeypatch, ratio):
    net = torch.nn.Sequential(torch.nn.Linear(100, 400, bias=False), torch.nn.Linear(400, 10, bias=False))
    net[1].weight.requires_grad = False
    found = parse("--offload", "all", "--offload_path", str(disk), "--bf16", "true")
    found.unseal()
    wanted = 16 * 40000 + 2 * 44000  # both ranks are on this node
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda _: usage(0, 0, wanted - 1))
    with pytest.raises(UserError, match="GB are free, but"):
        offload.check_sizes(found, net)
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda _: usage(0, 0, wanted))
    offload.check_sizes(found, net)
    section = found.deepspeed["zero_optimization"]["offload_param"]
    assert (section["buffer_size"], section["buffer_count"]) == (20000, 4)  # no numbered layers here
    found.deepspeed["zero_optimization"]["offload_param"]["buffer_size"] = 19999
    with pytest.raises(UserError, match="buffer_size is 19999, but the shard"):
        offload.check_sizes(found, net)
    found = parse(*ratio)
    found.unseal()
    offload.check_sizes(found, net)
    assert found.deepspeed["zero_optimization"]["sub_group_size"] == 1000


def test_each_disk_needs_room_for_what_is_written_there(tmp_path, monkeypatch):
    sections = {"offload_optimizer": str(tmp_path), "offload_param": "/dev/shm"}
    zero = {name: {"device": "nvme", "nvme_path": path} for name, path in sections.items()}
    config, usage = {"zero_optimization": zero, "bf16": {"enabled": True}}, namedtuple("usage", "total used free")
    free = {str(tmp_path): 16_000, "/dev/shm": 2_000}
    monkeypatch.setattr(nvme.shutil, "disk_usage", lambda folder: usage(0, 0, free[folder]))
    nvme.check_room(config, 1000, 1000, 2, 2)
    free["/dev/shm"] -= 1
    with pytest.raises(UserError, match=r"--offload_path /dev/shm: 0\.0 GB are free"):
        nvme.check_room(config, 1000, 1000, 2, 2)
    zero["offload_param"]["nvme_path"] = str(tmp_path / "other")  # on the same disk
    (tmp_path / "other").mkdir()
    for size, fits in ((18_000, True), (17_999, False)):
        free[str(tmp_path)] = free[str(tmp_path / "other")] = size
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="GB are free, but"):
            nvme.check_room(config, 1000, 1000, 2, 2)


# --- compiled ops ---


@pytest.mark.fault
def test_a_lock_left_by_a_killed_build(tmp_path, capsys):
    lock = tmp_path / "lock"
    lock.touch()
    deepspeed_ops.clear_stale_lock(tmp_path, ours=True)
    assert not lock.exists() and f"removed {lock} of a killed build" in capsys.readouterr().out

    lock.touch()
    with pytest.raises(UserError, match=r"another program compiles there or was killed.*TORCH_EXTENSIONS_DIR"):
        deepspeed_ops.clear_stale_lock(tmp_path, ours=False)
    assert lock.exists()


def test_folder_of_compiled_ops(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert deepspeed_ops.ops_folder() == (tmp_path, False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    folder, ours = deepspeed_ops.ops_folder()
    assert ours and torch.__version__ in folder.name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))  # as the ranks see it, after one of them has set it
    assert deepspeed_ops.ops_folder() == (folder, True)


# --- equal losses ---

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "60", "--num_train_epochs", "1", "--effective_batch_size",
    "8", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0",
    "--bf16", "false",
]  # fmt: skip
RATE = {"sft": "1e-4", "lora": "2e-3"}


def losses(tmp_path, *techniques, more=()):
    """{recipe: {technique: losses}}, two ranks, with the schedule's warm-up and decay; "" is plain stage 3."""
    cases = {
        f"{recipe}{i}": (recipe, [*COMMON, "--learning_rate", RATE[recipe], "--zero", "3", *flags, *more])
        for recipe in RATE
        for i, flags in enumerate([[], *techniques])
    }
    runs = run_world(2, cases, tmp_path)
    return {r: [runs[f"{r}{i}"].losses for i in range(len(techniques) + 1)] for r in RATE}, runs


@pytest.mark.slow
def test_hpz_has_the_losses_of_stage_3(tmp_path):
    section = {"stage": 3, "zero_hpz_partition_size": 2}
    found, runs = losses(tmp_path, ["--deepspeed", written(tmp_path, section)])
    for recipe, (plain, hpz) in found.items():
        assert len(plain) == 8
        torch.testing.assert_close(torch.tensor(hpz), torch.tensor(plain), rtol=1e-6, atol=0)
        assert runs[f"{recipe}1"].json("deepspeed.json")["zero_optimization"]["zero_hpz_partition_size"] == 2


@pytest.mark.slow  # compiles DeepSpeed's CPU Adam, minutes on a busy machine
def test_ratio_follows_the_schedule_on_both_sides(tmp_path, monkeypatch):
    """On a machine without a GPU its share is stepped on the host under another name; DeepSpeed's own AdamW for that
    share keeps the learning rate of the first step unless `after_start` mends it (then the second loss is 7 % off)."""
    monkeypatch.setenv("ZEROFIT_TEST_ACCELERATOR", "cpu:0")
    section = {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.3}}
    found, runs = losses(tmp_path, ["--deepspeed", written(tmp_path, section)])
    for recipe, (plain, ratio) in found.items():
        torch.testing.assert_close(torch.tensor(ratio), torch.tensor(plain), rtol=1e-5, atol=0)
        log = (runs[f"{recipe}1"].folder / "logs" / "rank0.log").read_text()
        assert "of rank 0's optimizer is stepped on the CPU" in log


def has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first of them compiles DeepSpeed's async_io
@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_nvme_has_the_losses_of_stage_3(tmp_path, disk, what):
    """On a model whose shards are over the 1 MB below which DeepSpeed keeps a tensor in memory."""
    if not has_libaio():
        pytest.skip("libaio is not installed")
    config = json.loads((TINY / "model" / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((TINY / "model" / name).read_text())
    wide = config | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    big = ["--model", str(tmp_path), "--random_init"]
    found, runs = losses(tmp_path, ["--offload", what, "--offload_path", str(disk)], more=big)
    for recipe, (plain, swapped) in found.items():
        torch.testing.assert_close(torch.tensor(swapped), torch.tensor(plain), rtol=1e-6, atol=0)
        log = (runs[f"{recipe}1"].folder / "logs" / "rank0.log").read_text()
        files = int(re.search(r"offload_path: [\d.,]+ MB in (\d+) files", log)[1])
        assert files > 0 or (recipe, what) == ("lora", "optimizer")  # the adapter's states are below 1 MB
    assert not list(disk.iterdir())  # taken away when the runs end


@pytest.mark.injection
def test_what_others_left_is_left_alone(tmp_path):
    """A folder that every user writes to: another user's folder, and links where a lock or a folder would be."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "in_use.lock").write_text("precious")
    disk = tmp_path / "disk"
    (disk / "zerofit-link").mkdir(parents=True)
    (disk / "zerofit-link" / "in_use.lock").symlink_to(precious / "in_use.lock")
    (disk / "zerofit-folder").symlink_to(precious)
    (disk / "zerofit-other").mkdir()
    (disk / "zerofit-other" / "in_use.lock").touch()
    if os.geteuid() == 0:
        os.chown(disk / "zerofit-other", 54321, 54321)
    (disk / "zerofit-own").mkdir()
    (disk / "zerofit-own" / "in_use.lock").touch()
    nvme._remove_leftovers(disk)
    left = {"zerofit-link", "zerofit-folder"} | ({"zerofit-other"} if os.geteuid() == 0 else set())
    assert {f.name for f in disk.iterdir()} == left
    assert (precious / "in_use.lock").read_text() == "precious"


@pytest.mark.bad_input
def test_compiled_ops_where_nothing_can_be_written(monkeypatch, ratio):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/ops")
    settings = parse(*ratio)
    with pytest.raises(UserError, match=r"/proc/ops/\w+: No such file .*set TORCH_EXTENSIONS_DIR to another folder"):
        deepspeed_ops.prepare(settings)


def test_two_runs_never_share_a_folder(tmp_path, disk, libaio):
    settings = parse("--offload", "optimizer", "--offload_path", str(disk))
    code = (
        "import sys; from pathlib import Path; from zerofit.config import nvme; nvme._reserve(Path(sys.argv[1])); "
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(disk / "zerofit-other")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        (disk / "zerofit-killed").mkdir()
        (disk / "zerofit-killed" / "in_use.lock").touch()
        (disk / "mine").mkdir()
        nvme.reserve_folder(settings)
        own = settings.deepspeed["zero_optimization"]["offload_optimizer"]["nvme_path"]
        assert {f.name for f in disk.iterdir()} == {"mine", "zerofit-other", Path(own).name}
    finally:
        other.communicate("\n")
    assert not (disk / "zerofit-other").exists()
