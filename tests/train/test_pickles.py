"""Checkpoints and model folders from elsewhere run no code: on resume at the same or another stage, and on export."""

import os
import pickle
import shutil

import pytest
import torch
from conftest import TINY

from zerofit.base.errors import UserError
from zerofit.checkpoint import integrity, pickles, resumable, zero_shards
from zerofit.config import resolve
from zerofit.export import export

SHARD = "mp_rank_00_model_states.pt"
STATES = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Touch:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def write_shards(folder, content):
    folder.mkdir(parents=True)
    torch.save({"optimizer_state_dict": content}, folder / STATES)
    torch.save({"param_shapes": []}, folder / SHARD)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of DeepSpeed on one rank, by another program, with the configuration and tokenizer of its model."""
    folder = tmp_path / "run" / "checkpoint-2"
    write_shards(folder / "global_step2", {"zero_stage": 2, "partition_count": 1})
    (folder / "latest").write_text("global_step2")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    torch.save({}, folder / "rng_state.pth")
    for file in (TINY / "model").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    return folder


def elsewhere(saved):
    """Shards beside the checkpoint whose pickle runs a command."""
    write_shards(saved.parent / "blob", Touch(saved.parent / "struck"))
    return saved.parent / "blob"


def latest_leads_out(saved):
    elsewhere(saved)
    (saved / "latest").write_text("../blob")


def latest_is_absolute(saved):
    (saved / "latest").write_text(str(elsewhere(saved)))


def latest_is_the_folder_above(saved):
    elsewhere(saved)
    (saved / "latest").write_text("..")


def folder_is_a_link(saved):
    shutil.rmtree(saved / "global_step2")
    (saved / "global_step2").symlink_to(elsewhere(saved), target_is_directory=True)


def file_is_a_link(saved):
    (saved / "global_step2" / STATES).unlink()
    (saved / "global_step2" / STATES).symlink_to(elsewhere(saved) / STATES)


def no_archive(saved):
    content = {"optimizer_state_dict": Touch(saved.parent / "struck")}
    torch.save(content, saved / "global_step2" / STATES, _use_new_zipfile_serialization=False)


def plain_pickle(saved):
    content = {"optimizer_state_dict": Touch(saved.parent / "struck")}
    (saved / "global_step2" / STATES).write_bytes(pickle.dumps(content))


def foreign_name(saved):
    torch.save({"optimizer_state_dict": Touch(saved.parent / "struck")}, saved / "global_step2" / STATES)


ATTACKS = {
    latest_leads_out: "latest does not name a folder of the checkpoint",
    latest_is_absolute: "latest does not name a folder of the checkpoint",
    latest_is_the_folder_above: "latest does not name a folder of the checkpoint",
    folder_is_a_link: "global_step2 is a link to a file outside the checkpoint",
    file_is_a_link: "is a link to a file outside the checkpoint",
    no_archive: "not an archive of torch.save",
    plain_pickle: "not an archive of torch.save",
    foreign_name: "would run posix.system when it is loaded",
}


def test_an_honest_one_is_taken(saved):
    assert integrity.find_corruption(saved) == "" and zero_shards.saved_by(saved) == ("2", 1)


@pytest.mark.injection
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs(saved, attack):
    attack(saved)
    settings = resolve.resolve_settings("sft", ["--resume_from_checkpoint", str(saved)], 1)
    with pytest.raises(UserError, match=ATTACKS[attack]):  # at every stage
        resumable.find_checkpoint(settings, saved.parent)
    with pytest.raises(UserError, match=ATTACKS[attack]):
        export.main([str(saved), "--check", "false", "--output_dir", str(saved.parent / "exported")])
    assert not (saved.parent / "struck").exists()


@pytest.mark.injection
@pytest.mark.parametrize("attack", [no_archive, plain_pickle, foreign_name])
def test_nothing_runs_where_it_was_not_looked_at_before(saved, attack):
    """The readers refuse for themselves what changed after the look: this kit's and DeepSpeed's."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    attack(saved)
    with pytest.raises(UserError, match="use another checkpoint"):
        zero_shards.read(saved)
    with pytest.raises(pickle.UnpicklingError), pickles.known_globals_only():
        TorchCheckpointEngine(None).load(str(saved / "global_step2" / STATES))
    assert not (saved.parent / "struck").exists() and pickles.FORCE not in os.environ


@pytest.mark.injection
def test_a_link_within_the_checkpoint_is_no_fault(saved):
    (saved / "global_step2").rename(saved / "shards")
    (saved / "global_step2").symlink_to("shards", target_is_directory=True)
    assert integrity.find_corruption(saved) == ""
    foreign_name(saved)
    assert "would run posix.system" in integrity.find_corruption(saved)
