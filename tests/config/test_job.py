"""job.json: what is written is what is read, the ranks resolve nothing again, and somebody else's file is refused."""

import json
import math
import sys

import pytest
from conftest import ROOT

from zerofit import recipe
from zerofit.base.errors import UserError
from zerofit.checkpoint import next_settings
from zerofit.commands import resume
from zerofit.config import parse, resolve
from zerofit.job import job, program
from zerofit.launch import launch as launcher
from zerofit.train import trial

FLAGS = {
    "sft": ["--zero", "3", "--offload", "optimizer", "--learning-rate=1e-4", "--gradient_checkpointing", "false"],
    "lora": ["--zero", "2", "--packing", "--lora_target_modules", "q_proj", "v_proj", "--run_name=-a b"],
    "dpo": ["--zero", "0", "--beta", "0.25", "--lr_scheduler_kwargs", '{"num_cycles": 2}'],
    "pipeline": ["--pp_size", "2"],
}

FIELDS = ("values", "source", "decisions", "deepspeed", "world_size", "explicit", "request", "knows_model")


def resolved(asked, ranks=2):
    settings = resolve.resolve(asked, ranks)
    resolve.resolve_for_model(settings)
    return settings


def written(settings, folder, **more):
    """The file of a job, as the launcher writes it."""
    file = folder / job.FILE
    facts = program.find(str(settings.recipe)).facts
    job.write(file, job.Job(settings.request, settings, facts, "python recipes/sft.py", **more))
    return file


def same(one, other):
    """Whether two values are equal and of equal types, also inside."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.parametrize("name", program.names())
def test_what_is_read_is_what_was_resolved(tmp_path, name):
    settings = resolved(parse.request(name, FLAGS[name]))
    file = written(settings, tmp_path, facts={"plan": {"peak_bytes": 1}})
    assert job.read(file).settings.recipe == name  # somebody else's file chooses no recipe
    found = job.read(file, settings.recipe)
    for field in FIELDS:
        assert getattr(found.settings, field) == getattr(settings, field), field
    assert same(dict(found.settings.values), dict(settings.values))
    assert found.settings.frozen and found.request == settings.request == found.settings.request
    assert (found.facts, found.command) == ({"plan": {"peak_bytes": 1}}, "python recipes/sft.py")
    assert parse.request(name, found.request.flags()).values == settings.request.values  # a user can type them


@pytest.mark.parametrize(
    "value",
    [
        None, math.inf, -math.inf, math.nan, 1.5e-300, 2**60, "", "$float", "a\udcffb", (), (1, ("x",)), [[], [None]],
        {"a": {"b": (1.0, math.inf)}}, {"$tuple": [1]}, {1: "x", None: 2}, True, 0, 0.0,
    ],
)  # fmt: skip
def test_odd_values_come_back_as_they_were(value):
    text = json.dumps(job._plain(value), allow_nan=False)
    assert same(job._typed(json.loads(text)), value)


def test_secrets_are_not_written(tmp_path):
    settings = resolved(parse.request("sft", ["--hub_token", "secret123", "--zero", "0"]))
    file = written(settings, tmp_path)
    assert "secret123" not in file.read_text()
    found = job.read(file)
    assert found.settings.hub_token is None and found.request.values == {"zero": 0}


@pytest.fixture
def no_job(monkeypatch):
    """This process has started no job, before the test and after it."""
    monkeypatch.setattr(job, "_running", type(job._running)(job=None))
    monkeypatch.setattr(job, "_published", {})


@pytest.mark.parametrize("name", program.names())
def test_ranks_read_the_job_and_neither_parse_nor_resolve(monkeypatch, tmp_path, no_job, name):
    settings = resolved(parse.request(name, FLAGS[name]), 1 if name != "pipeline" else 2)
    file = written(settings, tmp_path, facts={"plan": {"peak_bytes": 7}})
    monkeypatch.setenv("WORLD_SIZE", str(settings.world_size))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["recipe.py", *job.words(file, "run")])

    def refused(*args, **kwargs):
        raise AssertionError("a rank has parsed or resolved")

    for function in ("request", "parse_explicit", "settings_of"):
        monkeypatch.setattr(parse, function, refused)
    monkeypatch.setattr(resolve, "resolve", refused)
    monkeypatch.setattr(resolve, "techniques_of", refused)
    found = recipe.parse(settings.recipe)
    resolve.resolve_for_model(found)
    of_process = {"OMP_WAIT_POLICY passive: idle threads sleep, so that other processes slow the run down less"}
    added = [line for line in found.decisions if line not in of_process and not line.startswith("packages: newer")]
    assert added == settings.decisions
    for field in set(FIELDS) - {"decisions"}:
        assert getattr(found, field) == getattr(settings, field), field
    assert job.published() == {"peak_bytes": 7} and not recipe._is_to_check(found)
    assert not trial.is_canary() and not trial.is_batch_search()


def test_a_job_for_other_processes_or_of_a_changed_program(monkeypatch, tmp_path, no_job, capsys):
    settings = resolved(parse.request("sft", []))
    file = written(settings, tmp_path)
    with pytest.raises(UserError, match=r"job\.json: is a job for 2 processes, but 4 were started; start the recipe"):
        job.start(file, 4, program.recipe_of("sft"))
    monkeypatch.setattr(program, "current", lambda: program.from_file(ROOT / "recipes" / "lora.py"))
    job.start(file, 2, program.recipe_of("sft"))
    assert "sft.py (sha256 " in capsys.readouterr().out


def test_the_kind_of_a_trial_is_in_the_job(monkeypatch, tmp_path, no_job):
    settings = resolved(parse.request("sft", []), 1)
    job.start(written(settings, tmp_path, trial={trial.CANARY: "answer.json"}), 1, program.recipe_of("sft"))
    assert trial.is_canary() and not trial.is_batch_search()
    job.start(written(settings, tmp_path, trial={trial.BATCH_SEARCH: {"sizes": [1]}}), 1, program.recipe_of("sft"))
    assert trial.is_batch_search() and not trial.is_canary()


def test_the_job_of_a_retry_differs_in_what_was_changed(tmp_path):
    before = resolved(parse.request("sft", ["--zero", "2", "--per_device_train_batch_size", "4",
                                            "--effective_batch_size", "8"]))  # fmt: skip
    change, after = next_settings.next_smaller_setting(before, resolved)
    one, other = (json.loads(written(settings, tmp_path).read_text()) for settings in (before, after))
    assert change == "micro batch 2 instead of 4"

    def changed(part):
        return {name for name in one[part] if one[part][name] != other[part].get(name)}

    assert changed("request") == {"per_device_train_batch_size"}
    assert changed("arguments") == {
        "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    }  # fmt: skip
    for part in ("program", "recipe", "world_size", "deepspeed", "command"):
        assert one[part] == other[part]


# --- somebody else's file ---


@pytest.mark.bad_input
@pytest.mark.injection
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipe": ["sft"]}, "recipe is missing or has the wrong type"),
        ({"world_size": 0}, "world_size is missing or has the wrong type"),
        ({"world_size": True}, "world_size is missing or has the wrong type"),
        ({"request": []}, "request is missing or has the wrong type"),
        ({"request": {"zero": 3}}, "request: zero must have a value and a source"),
        ({"arguments": {"zero": {"value": 3}}}, "arguments: zero must have a value and a source"),
        ({"decisions": [1]}, "decisions must be pairs of strings"),
        ({"program": {"file": 1, "sha256": "x"}}, "program must have a file and a sha256"),
        ({"deepspeed": {"$exec": 1}}, "it contains an invalid value"),
        ({"facts": {"plan": {"$float": "1"}}}, "it contains an invalid value"),
    ],
)
def test_a_job_that_was_tampered_with_is_refused(tmp_path, changes, says):
    file = written(resolved(parse.request("sft", [])), tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(
        UserError, match=rf"job\.json: is not a zerofit job file: {says}; restore the file, or start"
    ) as told:
        job.read(file)
    assert "\n" not in str(told.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_damaged_job_is_refused(tmp_path, text):
    (tmp_path / job.FILE).write_text(text)
    with pytest.raises(UserError, match=r"job\.json: is not a zerofit job file: it is not"):
        job.read(tmp_path / job.FILE)
    with pytest.raises(UserError, match=r"job\.json: cannot be read: "):
        job.read(tmp_path / "none" / job.FILE)


@pytest.fixture
def resumed(monkeypatch, tmp_path):
    """What a resume of a run folder that this user has not started asks for, whose job has these flags."""
    started = []
    monkeypatch.setattr(launcher, "main", lambda words, asked: started.append((asked, int(words[1]))))
    monkeypatch.setattr(program, "_started", None)
    folder = tmp_path / "run"
    folder.mkdir()

    def resume_it(flags, *words, then=lambda: None, **changes):
        file = written(resolved(parse.request("sft", flags)), folder)
        content = json.loads(file.read_text())
        for part, values in changes.items():
            content[part] |= {name: {"value": value, "source": "flag"} for name, value in values.items()}
        file.write_text(json.dumps(content))
        (folder / "run.json").write_text(json.dumps({"program": program.find("sft").facts}))
        then()
        resume.main([str(folder), *words])
        return started.pop()

    return resume_it


def test_a_resume_reads_the_job(resumed, tmp_path, capsys):
    file, other = tmp_path / "first.yaml", tmp_path / "second.yaml"
    file.write_text("zero: 3\nmax_length: 64\nseed: 5\n")
    other.write_text("seed: 6\nlearning_rate: 0.5\n")
    flags = ["--config", str(file), "--learning_rate", "0.1", "--packing", "--hub_token", "secret"]
    own = {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto"}
    kept = {"zero": 3, "max_length": 64, "seed": 5, "learning_rate": 0.1, "packing": True}
    assert (resumed(flags)[0].values, resumed(flags)[1]) == (kept | own, 2)
    asked, _ = resumed(flags, "--seed=7", "--zero", "2")
    assert asked.values == kept | own | {"seed": 7, "zero": 2}
    assert "has changed" not in capsys.readouterr().out
    edited = file.read_text().replace("5", "9") + "bf16: true\n"
    asked, _ = resumed(flags, then=lambda: file.write_text(edited))
    assert asked.values == kept | own
    assert f"note: {file} has changed since the run began (bf16, seed); the run continues" in capsys.readouterr().out
    asked, _ = resumed(flags, "--config", str(other))  # instead of the first file, and below the flags
    wanted = {"learning_rate": 0.1, "packing": True, "seed": 6, "config": str(other)}
    assert asked.values == wanted | own and asked.source["seed"] == str(other)


@pytest.mark.injection
@pytest.mark.bad_input
def test_a_tampered_job_chooses_no_code(resumed):
    for values, says in (
        ({"trust_remote_code": True}, "its flags contain --trust_remote_code true, which runs Python code"),
        ({"attn_implementation": "somebody/kernel"}, "its flags contain --attn_implementation somebody/kernel"),
        ({"push_to_hub": True}, "its flags contain --push_to_hub true, which uploads"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"zero": "many"}, "zero"),
        ({"zero": {"a": 1}}, "zero"),
    ):
        with pytest.raises(UserError, match=says):
            resumed(["--zero", "0"], request=values)
    for values in ({"effective_batch_size": "8"}, {"sp_size": 0}, {"per_device_train_batch_size": None}):
        with pytest.raises(UserError, match=r"not a run folder \(job\.json or run\.json"):
            resumed(["--zero", "0"], arguments=values)
