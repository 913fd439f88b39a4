"""What the README.md of final/ and of an export says."""

import os
import shutil

import pytest
from conftest import TINY, run_world
from huggingface_hub import ModelCard

from zerofit.train import model_card


def card(model, ranks=1, zero="0", steps=8, **more) -> model_card.Card:
    arguments = {name: {"value": value} for name, value in {"model": str(model), "zero": zero, "bf16": True}.items()}
    facts = {"recipe": "sft", "world_size": ranks, "arguments": arguments, **more}
    return model_card.Card(facts, "final", "LlamaForCausalLM", None, steps, "0.5000 training", "float32")


@pytest.mark.parametrize(
    ("model", "title", "base"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/data/llama-pets", "llama-pets", None),
        ("/data/model", "LlamaForCausalLM", None),  # a name that says nothing
        ("runs/pets/final", "pets", None),
        ("~/runs/pets/checkpoint-40", "pets", None),  # a folder within a run
        (TINY / "model", "zerofit's bundled tiny Llama", None),
        (TINY / "preference" / "model", "zerofit's bundled tiny Llama", None),
    ],
)
def test_the_title_names_the_base_and_no_local_path(model, title, base):
    text = model_card.text(card(model))
    read = ModelCard(text)
    assert f"# sft of {title}\n" in text and read.data.base_model == base
    assert read.data.library_name == "transformers" and read.data.tags == ["zerofit", "sft"]
    assert "/data" not in text and "runs/" not in text and str(TINY) not in text


def before(zero, ranks, step):
    return {"zero": zero, "world_size": ranks, "to_step": step}


@pytest.mark.parametrize(
    ("resumed", "steps", "said"),
    [
        ([], 8, "stage 0 on 1 rank"),
        ([before("2", 2, 4)], 8, "stage 2 on 2 ranks to step 4, then stage 0 on 1 rank"),
        ([before("3", 4, 2), before("2", 2, 4)], 8,
         "stage 3 on 4 ranks to step 2, then stage 2 on 2 ranks to step 4, then stage 0 on 1 rank"),
        ([before("0", 1, 4)], 8, "stage 0 on 1 rank"),  # only interrupted
        ([before("2", 2, 4), before("0", 1, 6)], 8, "stage 2 on 2 ranks to step 4, then stage 0 on 1 rank"),
        ([before("2", 2, 4)], 4, "stage 2 on 2 ranks"),  # the weights of an earlier checkpoint
    ],
)  # fmt: skip
def test_each_stretch_of_a_resumed_run_is_named(resumed, steps, said):
    assert f"| trained with | ZeRO {said}, bf16 |" in model_card.text(card("gpt2", steps=steps, resumed=resumed))


def test_the_losses_are_those_of_the_saved_step():
    history = [
        {"step": 2, "loss": 1.5},
        {"step": 2, "eval_loss": 1.25},
        {"step": 4, "loss": 1.0},
        {"step": 4, "eval_loss": 2.0},
    ]
    assert model_card.losses(history, 4) == "1.0000 training, 2.0000 held out"
    assert model_card.losses(history, 2) == "1.5000 training, 1.2500 held out"  # --load_best_model_at_end


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on files whose names are not UTF-8, as of a zip file from Windows, without an evaluation on the way."""
    folder = tmp_path_factory.mktemp("run")
    data, held_out = (os.fsdecode(os.fsencode(folder) + b"/" + name) for name in (b"d\xe4t.jsonl", b"\xe4.jsonl"))
    for file in (data, held_out):
        shutil.copy(TINY / "eval.jsonl", file)
    flags = [
        "--model", "tiny", "--data", data, "--eval_data", held_out, "--max_samples", "8", "--effective_batch_size", "4",
        "--max_steps", "2", "--num_samples", "0", "--eval_strategy", "no",
    ]  # fmt: skip
    return run_world(1, {"run": ("sft", flags)}, folder)["run"]


@pytest.mark.bad_input
def test_a_run_on_files_whose_names_are_not_utf_8_is_finished_with_its_card(run):
    assert run.json("result.json")["status"] == "finished"
    text = (run.folder / "final" / "README.md").read_text(encoding="utf-8")
    assert "dat.jsonl" not in text and "t.jsonl" in text


def test_the_card_has_the_loss_of_the_evaluation_at_the_end(run):
    held_out = run.json("result.json")["eval_loss"]
    assert f"{held_out:.4f} held out" in (run.folder / "final" / "README.md").read_text(encoding="utf-8")
