"""The files of examples/extending, with not one edit in src: they train, are planned, and refuse what cannot be."""

import contextlib
import json
import sys
import types

import pytest
from conftest import ROOT, TINY, Run, run_python, run_world

from zerofit import cli
from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import help, parse, resolve
from zerofit.job import program
from zerofit.plan import simulate

EXTENDING = ROOT / "examples" / "extending"
SHORT = ["--max_steps", "4", "--logging_steps", "1", "--num_samples", "0", "--save_strategy", "no"]


@pytest.fixture(autouse=True)
def program_as_before(monkeypatch):
    """Restore the program that this process starts: a later test of the same worker would take it for its own."""
    monkeypatch.setattr(program, "_started", program._started)


def train(name, folder, *flags, ranks=0):
    done = run_python([str(EXTENDING / f"{name}.py"), *SHORT, *flags, "--output_dir", str(folder)], ranks=ranks)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return Run(folder)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    return run_world(1, {"sft": ("sft", [*SHORT, "--zero", "0"])}, folder)["sft"]


@pytest.mark.slow
def test_the_loss_that_counts_all_tokens_alike_is_the_usual_one(stock, tmp_path):
    same = train("loss", tmp_path / "a", "--focal_gamma", "0")
    assert same.losses == pytest.approx(stock.losses, rel=1e-5)
    assert same.json("result.json")["eval_loss"] == pytest.approx(stock.json("result.json")["eval_loss"], rel=1e-4)
    focal = train("loss", tmp_path / "b")
    assert all(ours < theirs for ours, theirs in zip(focal.losses, stock.losses, strict=True))


@pytest.mark.slow
def test_the_loss_is_the_same_on_two_ranks(stock, tmp_path):
    two = train("loss", tmp_path / "two", "--focal_gamma", "0", "--zero", "2", ranks=2)
    assert two.json("run.json")["world_size"] == 2
    assert two.losses == pytest.approx(stock.losses, rel=1e-4)


def test_rows_of_the_format_are_read_and_a_bad_one_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"dialog": ["Hi?", "Hello."], "system": "Be kind."}\n{"dialog": ["Bye?", "Bye.", "Now?", "Yes."]}\n'
    )
    flags = ["--model", str(TINY / "model"), "--data", str(rows), "--effective_batch_size", "2"]
    facts = train("data_format", tmp_path / "run", *flags).json("run.json")["data"]["training"]
    assert facts["format"] == "dialog" and facts["kept"] == 2 and facts["columns_not_used"] == {}
    rows.write_text('{"dialog": ["Hi?"]}\n')
    done = run_python([str(EXTENDING / "data_format.py"), *SHORT, *flags, "--output_dir", str(tmp_path / "bad")])
    assert done.returncode == 2 and f"{rows}:1: the last turn is not an assistant turn" in done.stderr


@pytest.mark.slow
def test_the_optimizer_is_the_one_that_steps(tmp_path):
    plain = train("optimizer", tmp_path / "0", "--zero", "0", "--learning_rate", "1e-3")
    assert plain.losses[-1] < plain.losses[0] - 0.5
    sharded = train("optimizer", tmp_path / "2", "--zero", "2", "--learning_rate", "1e-3", ranks=2)
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-3)  # each element by itself: slices do not matter


def test_an_optimizer_says_what_it_cannot():
    recipe = program.from_file(EXTENDING / "optimizer.py").recipe
    with pytest.raises(UserError, match="--optim signum with --offload optimizer: it does not have a CPU step; "):
        resolve.resolve_settings(recipe, ["--zero", "2", "--offload", "optimizer"], 2)
    assert resolve.resolve_settings(recipe, ["--optim", "sgd"], 1).optim == "sgd"


@pytest.mark.slow
def test_the_technique_is_installed_and_counted(stock, tmp_path):
    frozen = train("technique", tmp_path / "run", "--freeze_layers", "2")
    result = frozen.json("result.json")
    assert result["trainable_parameters"] < stock.json("result.json")["trainable_parameters"]
    assert frozen.losses[0] == pytest.approx(stock.losses[0], rel=1e-5) and frozen.losses[-1] > stock.losses[-1]


@pytest.mark.slow
def test_the_plan_knows_the_technique():
    recipe = program.start(str(EXTENDING / "technique.py")).recipe
    flags = ["--model", str(TINY / "model"), "--data", "rows.jsonl"]
    asked = [parse.request(recipe, [*flags, "--freeze_layers", str(n)]) for n in (0, 2)]
    gpu = hardware.find("rtx4090-24g")
    whole, part = simulate.run_all([simulate.Question(request, 1, gpu=gpu) for request in asked])
    assert part["trainable"] < whole["trainable"] == whole["parameters"]
    assert part["peak"]["step"]["optimizer"] < whole["peak"]["step"]["optimizer"]


RECOMPUTED = ROOT / "tests" / "launch" / "recomputed.py"


@pytest.mark.slow
@pytest.mark.oracle
def test_a_technique_is_one_file_with_its_flag_its_self_test_and_its_bytes(tmp_path):
    """Bytes: of each MLP its gate, its activation, the other half and their product are not kept for the backward."""
    done = run_python(
        [str(RECOMPUTED), *SHORT, "--recomputed", "true", "--max_steps", "2", "--output_dir", str(tmp_path)]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recomputed: MLPs compute here what they do without it" in Run(tmp_path).json("run.json")["decisions"]
    recipe = program.start(str(RECOMPUTED)).recipe
    flags = ["--model", str(TINY / "model"), "--data", "rows.jsonl", "--max_length", "512", "--zero", "0"]
    flags += ["--per_device_train_batch_size", "8", "--effective_batch_size", "8"]
    asked = [parse.request(recipe, [*flags, "--recomputed", word]) for word in ("false", "true")]
    usual, less = simulate.run_all(
        [simulate.Question(request, 1, gpu=hardware.find("rtx4090-24g")) for request in asked]
    )
    config = json.loads((TINY / "model" / "config.json").read_text())
    kept = 4 * config["num_hidden_layers"] * 8 * 512 * config["intermediate_size"] * 2
    before, after = (one["peak"]["forward"]["activations"] for one in (usual, less))
    assert before - after == pytest.approx(kept, rel=0.01)


@pytest.mark.bad_input
def test_a_technique_that_fails_its_self_test_is_refused(tmp_path):
    words = [str(RECOMPUTED), "--recomputed", "true", "--wrong", "0.1", "--output_dir", str(tmp_path / "run")]
    done = run_python(words)
    assert done.returncode == 2 and "--recomputed: it is 1.0e-01 off torch's; leave it out." in done.stderr


def test_a_verb_is_a_file_and_a_line_of_the_list(monkeypatch, capsys):
    verb = types.ModuleType("zerofit.commands.count")
    exec("def main(argv):\n    print(len(argv), 'words')", vars(verb))
    monkeypatch.setitem(sys.modules, verb.__name__, verb)
    monkeypatch.setitem(cli.VERBS, "count", "commands.count")
    for words, said in ((["count", "a", "b"], "2 words"), (["cuont"], "did you mean count?")):
        monkeypatch.setattr(sys, "argv", ["zerofit", *words])
        with contextlib.suppress(SystemExit):
            cli.main()
        assert said in "".join(capsys.readouterr())


def test_its_flag_is_in_the_help_and_its_limits_hold():
    recipe = program.from_file(EXTENDING / "technique.py").recipe
    assert "--freeze_layers" in help.text(recipe, every_flag=True)
    settings = resolve.resolve_settings(recipe, ["--freeze_layers", "9"], 1)
    with pytest.raises(UserError, match="--freeze_layers 9: must be 0 to 3 with this model"):
        resolve.resolve_for_model(settings)
    with pytest.raises(
        UserError, match="--freeze_layers 1 with --new_tokens <a>: their embeddings would stay untrained; "
    ):
        resolve.resolve_settings(recipe, ["--freeze_layers", "1", "--new_tokens", "<a>"], 1)


@pytest.mark.slow
@pytest.mark.oracle
def test_the_metric_is_that_of_a_loop_over_the_rows(tmp_path):
    """Row by row, with the answer's tokens found by hand, of the model that was saved."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = ["--max_steps", "2", "--learning_rate", "3e-3", "--eval_data", str(tmp_path / "eval.jsonl")]
    rows = (TINY / "eval.jsonl").read_text().splitlines()[:7]
    (tmp_path / "eval.jsonl").write_text("\n".join(rows))
    model = ["--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--per_device_eval_batch_size", "3"]
    run = train("metric", tmp_path / "run", *model, *flags)
    model = AutoModelForCausalLM.from_pretrained(run.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    right, count = 0, 0
    for row in map(json.loads, rows):
        question, answer = (turn["content"] for turn in row["messages"])
        prompt = f"<|user|>\n{question}<|end|>\n<|assistant|>\n"
        start, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt}{answer}<|end|>", return_tensors="pt")
        found = model(**ids).logits[0, start - 1 : -1].argmax(-1)
        right, count = right + (found == ids["input_ids"][0, start:]).sum().item(), count + len(found)
    measured = [line["eval_token_accuracy"] for line in run.metrics if "eval_token_accuracy" in line]
    assert measured[-1] == pytest.approx(right / count, abs=1e-9) and 0 < right < count


def answers(file, labels):
    """Write the bundled questions and answers, with these labels in turn, and return the flags of a run on them."""
    rows = [json.loads(line)["messages"] for line in (TINY / "train.jsonl").read_text().splitlines()[:48]]
    rows = [{"prompt": question["content"], "completion": answer["content"]} for question, answer in rows]
    rows = [row | ({"label": labels[i % len(labels)]} if labels else {}) for i, row in enumerate(rows)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return ["--model", str(TINY / "model"), "--data", str(file), "--eval_data", str(file), "--zero", "0"]


@pytest.mark.oracle
def test_an_objective_has_rows_a_loss_and_a_metric_of_its_own(tmp_path):
    """One file: the metrics are those of a loop over the rows of the saved model, token by token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = answers(tmp_path / "rows.jsonl", [True, False, True])
    run = train("objective", tmp_path / "run", *flags, "--max_steps", "2", "--learning_rate", "1e-3")
    facts = run.json("run.json")
    assert facts["objective"] == "unlikelihood" and facts["data"]["training"]["wanted"] == 32
    model = AutoModelForCausalLM.from_pretrained(run.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    loss, count, probabilities = 0.0, 0, {True: [], False: []}
    for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()):
        prompt = f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n"
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(f"{prompt}{row['completion']}<|end|>", return_tensors="pt")
        chances = model(**ids).logits[0, start - 1 : -1].softmax(-1)
        chances = chances.gather(-1, ids["input_ids"][0, start:, None])[:, 0]
        loss += -(chances if row["label"] else 1 - chances).log().sum().item()
        count += len(chances)
        probabilities[row["label"]] += chances.tolist()
    measured = [line for line in run.metrics if "eval_loss" in line][-1]
    assert measured["eval_loss"] == pytest.approx(loss / count, rel=1e-5)
    for name, label in (("wanted", True), ("unwanted", False)):
        mean = sum(probabilities[label]) / len(probabilities[label])
        assert measured[f"eval_{name}_probability"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.bad_input
def test_an_objective_that_there_is_not_is_refused(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text((EXTENDING / "objective.py").read_text().replace('("Unlikelihood",)', '("Likelihood",)'))
    with pytest.raises(UserError, match=r"mine\.py: its RECIPE has objectives='Likelihood', which cannot be found"):
        resolve.resolve_settings(program.start(str(own)).recipe, [], 1)


@pytest.mark.slow
def test_an_objective_without_unwanted_answers_is_the_usual_one_on_any_ranks(tmp_path):
    usual, flags = answers(tmp_path / "plain.jsonl", []), answers(tmp_path / "rows.jsonl", [True])
    plain = run_world(1, {"sft": ("sft", [*SHORT, *usual])}, tmp_path)["sft"]
    assert train("objective", tmp_path / "one", *flags).losses == pytest.approx(plain.losses, rel=1e-5)
    two = train("objective", tmp_path / "two", *flags, "--zero", "2", ranks=2)
    assert two.json("run.json")["world_size"] == 2 and two.losses == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
def test_the_callback_ends_the_run(tmp_path):
    flags = ["--eval_strategy", "steps", "--eval_steps", "2", "--stop_below", "9"]
    run = train("callback", tmp_path / "run", *flags)
    assert run.json("result.json")["steps"] == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"] == "until"
