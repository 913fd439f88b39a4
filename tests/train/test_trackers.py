"""--report_to with the real packages, offline: each has all numbers of metrics.jsonl and the run's arguments."""

import importlib.util
import json
import re
import struct

import pytest
from conftest import TINY, Run, recipe_process, run_world

FLAGS = ["--data", str(TINY / "train.jsonl"), "--eval_data", str(TINY / "eval.jsonl"), "--max_samples", "32",
         "--effective_batch_size", "8", "--max_steps", "3", "--logging_steps", "1", "--num_samples", "0",
         "--eval_strategy", "no", "--save_strategy", "no", "--lora_r", "3"]  # fmt: skip

pytestmark = pytest.mark.slow


def needs(tracker):
    """Skip where the tracker's package, which no extra of the kit provides, is not installed."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"pip install {tracker}")


def trained(tmp_path, tracker, **env):
    """A LoRA run with a tracker, whose files are below tmp_path; skip where its package is not installed."""
    needs(tracker)
    words = [*FLAGS, "--report_to", tracker, "--output_dir", str(tmp_path / "my-run"), "--hub_token", "hf_secret"]
    done = recipe_process("lora", *words, cwd=tmp_path, HOME=str(tmp_path), **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return Run(tmp_path / "my-run")


def expected(run):
    """{(metric as trackers name it, step): value} of metrics.jsonl."""
    return {
        (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", line["step"]): value
        for line in run.metrics
        for name, value in line.items()
        if name != "step"
    }


def check(run, numbers, arguments):
    """Compare a tracker's {(metric, step): value} and {argument: value} with the run folder's."""
    wanted = expected(run)
    assert ("eval/loss", 3) in wanted  # after the end of training
    assert len(wanted) > 20 and wanted.keys() <= numbers.keys(), wanted.keys() - numbers.keys()
    assert {key: numbers[key] for key in wanted} == {
        key: pytest.approx(value, rel=1e-6) for key, value in wanted.items()
    }
    for name in ("zero", "offload", "effective_batch_size", "lora_r", "learning_rate", "decisions"):
        assert name in arguments, name
    assert "hf_secret" not in str(arguments)
    assert str(arguments["lora_r"]) == "3" and str(arguments["zero"]) == "0"
    assert run.json("run.json")["decisions"][0] in str(arguments["decisions"])


def test_tensorboard(tmp_path):
    run = trained(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers, texts = {}, {}
    for file in run.folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        for name in events.Tags()["scalars"]:
            numbers |= {(name, event.step): event.value for event in events.Scalars(name)}
        for name in events.Tags()["tensors"]:
            texts[name] = events.Tensors(name)[0].tensor_proto.string_val[0].decode()
    check(run, numbers, json.loads(texts["args/text_summary"]))


def wandb_records(data):
    """Yield the records of a .wandb file: LevelDB's log format after a head of 7 bytes."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # no head of a record fits into the block
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_wandb(tmp_path):
    run = trained(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    from wandb.proto import wandb_internal_pb2

    numbers, arguments, name = {}, {}, None
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    for record in map(wandb_internal_pb2.Record.FromString, wandb_records(file.read_bytes())):
        if record.HasField("run"):
            name = record.run.display_name
        entry = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        numbers |= {(metric, entry["train/global_step"]): value for metric, value in entry.items()}
        for update in (*record.run.config.update, *record.config.update):
            arguments[update.key or update.nested_key[0]] = json.loads(update.value_json)
    check(run, numbers, arguments)
    assert name == "my-run"


def test_mlflow(tmp_path):
    run = trained(tmp_path, "mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tracked,) = client.search_runs(["0"])
    numbers = {}
    for metric in tracked.data.metrics:
        name = f"eval/{metric[5:]}" if metric.startswith("eval_") else f"train/{metric}"
        numbers |= {(name, point.step): point.value for point in client.get_metric_history(tracked.info.run_id, metric)}
    check(run, numbers, tracked.data.params)
    assert tracked.info.run_name == "my-run" and tracked.info.status == "FINISHED"


def test_trackio(tmp_path):
    run = trained(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    import sqlite3

    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        logged = database.execute("SELECT run_name, metrics FROM metrics").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
    numbers = {}
    for _, text in logged:
        entry = json.loads(text)
        numbers |= {(metric, entry["train/global_step"]): value for metric, value in entry.items()}
    check(run, numbers, json.loads(config))
    assert re.match("my-run", logged[0][0])


# --- one curve after a resume ---


def resumed(tmp_path, tracker, **env):
    """A run of three steps that is continued from its second step to the fifth, in the same folder."""
    needs(tracker)
    words = [*FLAGS, "--report_to", tracker, "--output_dir", str(tmp_path / "my-run"), "--save_strategy", "steps",
             "--save_steps", "1", "--save_total_limit", "5"]  # fmt: skip
    on = ["--resume_from_checkpoint", str(tmp_path / "my-run" / "checkpoint-2"), "--max_steps", "5"]
    for more in ([], on):
        done = recipe_process("lora", *words, *more, cwd=tmp_path, HOME=str(tmp_path), **env)
        assert done.returncode == 0, done.stderr[-4000:]
    return Run(tmp_path / "my-run")


def test_tensorboard_has_one_curve_after_a_resume(tmp_path):
    run = resumed(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {file.parent for file in run.folder.rglob("events.out.tfevents.*")}
    assert folders == {run.folder / "runs"}
    events = EventAccumulator(str(run.folder / "runs"), size_guidance={"scalars": 0}).Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]  # step 3 once: that of the second start
    assert [value for _, value in points] == pytest.approx(run.losses, rel=1e-6)


def test_two_ranks_have_one_curve_at_each_stage(tmp_path):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*FLAGS, "--report_to", "tensorboard", "--save_strategy", "steps", "--save_steps", "1"]
    words += ["--save_total_limit", "5", "--per_device_train_batch_size", "4"]
    run_world(2, {zero: ("lora", [*words, "--zero", zero]) for zero in ("0", "2", "3")}, tmp_path)
    on = {
        zero: ("lora", [*words, "--zero", zero, "--max_steps", "4", "--resume_from_checkpoint",
                        str(tmp_path / zero / "checkpoint-2")])
        for zero in ("0", "2", "3")
    }  # fmt: skip
    for zero, run in run_world(2, on, tmp_path).items():
        assert run.json("result.json")["world_size"] == 2
        events = EventAccumulator(str(tmp_path / zero / "runs"), size_guidance={"scalars": 0}).Reload()
        assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4], zero


def test_wandb_has_one_run_after_a_resume(tmp_path):
    run = resumed(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    from wandb.proto import wandb_internal_pb2

    ids = set()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    for file in files:
        for record in map(wandb_internal_pb2.Record.FromString, wandb_records(file.read_bytes())):
            if record.HasField("run"):
                ids.add(record.run.run_id)
    assert len(files) == 2 and ids == {run.json("run.json")["trackers"]["wandb"]}


def test_mlflow_has_one_run_after_a_resume(tmp_path):
    run = resumed(tmp_path, "mlflow", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (tracked,) = client.search_runs(["0"])
    assert tracked.info.run_id == run.json("run.json")["trackers"]["mlflow"]
    assert max(point.step for point in client.get_metric_history(tracked.info.run_id, "loss")) == 5


def test_trackio_has_one_run_after_a_resume(tmp_path):
    resumed(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    import sqlite3

    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        names = {name for (name,) in database.execute("SELECT run_name FROM metrics")}
    assert names == {"my-run"}
