"""A way to share rows that is defined outside of the kit: ranks, batch, checkpoints and plans follow from it."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from conftest import ROOT

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.checkpoint import differences, next_settings, resumable, save
from zerofit.commands import resume
from zerofit.config import parse, resolve
from zerofit.job import parallel_dims, program
from zerofit.job.technique import Conflict
from zerofit.parallel.interface import Parallel
from zerofit.plan import candidates
from zerofit.plan.answer import answer_text, run_line

MODEL = ["--model", str(ROOT / "tests" / "configs" / "llama3.1-8b"), "--data", "unread"]


@dataclass
class TwinArguments:
    """Twins: ranks that compute the same rows, to compare their results."""

    _argument_group_name = "twins"
    twin_size: int = field(default=1, metadata={"help": "This many ranks of a node compute the same rows."})


def _check(settings) -> None:
    if settings.twin_size > 2:
        raise UserError(f"--twin_size {settings.twin_size}: twins are two; use 2.")


TWINS = Parallel(
    name="twins",
    flag="twin_size",
    example="--twin_size 2",
    exchanges="its results",
    groups="compare their results",
    arguments=TwinArguments,
    conflicts=(Conflict("optim", ("muon",), "twins would differ", "use another optimizer"),),
    resolve=_check,
)


@pytest.fixture(params=[TWINS, replace(TWINS, neighbors=False)], ids=["neighbors", "far apart"])
def twins(request):
    """The way, registered; its flag is one of recipes/sft.py."""
    sft = program.recipe_of("sft")
    object.__setattr__(sft, "arguments", (TwinArguments,))  # as a recipe's own; the parser is kept by recipe
    request.addfinalizer(lambda: object.__setattr__(sft, "arguments", ()))
    parse.build_parser.cache_clear()
    request.addfinalizer(parse.build_parser.cache_clear)
    parallel_dims.register(request.param)
    yield request.param
    parallel_dims.remove(next(way for way in parallel_dims.registered() if way.flag == request.param.flag))


def settings_of(*flags: str, ranks: int = 4):
    return resolve.resolve_settings("sft", ["--zero", "2", *flags], ranks)


def test_rows_and_batch_are_those_of_two_data_ranks(twins):
    settings = settings_of("--twin_size", "2", "--effective_batch_size", "8", "--per_device_train_batch_size", "1")
    assert (settings.ranks_per_row, settings.data_ranks, settings.gradient_accumulation_steps) == (2, 2, 4)
    expected = [0, 0, 1, 1] if twins.neighbors else [0, 1, 0, 1]
    assert [settings.data_rank(rank) for rank in range(4)] == expected
    assert settings.parallel_size("tokens", "matrices", "layers") == 1
    assert any("4 x 2 data ranks (4 ranks / twin_size 2)" in line for line in settings.decisions)
    alone = settings_of()
    assert (alone.data_ranks, [alone.data_rank(rank) for rank in range(4)]) == (4, [0, 1, 2, 3])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--twin_size", "3"], "--twin_size 3: must divide the 4 ranks of this job."),
        (["--twin_size", "0"], "--twin_size is 0: it must be 1 or more."),
        (["--twin_size", "4"], "--twin_size 4: twins are two; use 2."),
        (["--twin_size", "2", "--optim", "muon"], "--twin_size 2 with --optim muon: twins would differ; "),
        (["--twin_size", "4", "--sp_size", "4"], "--twin_size 4 with --sp_size 4: their rank groups overlap; "),
    ],
)
def test_what_it_excludes_is_refused(twins, flags, says):
    with pytest.raises(UserError) as error:
        settings_of(*flags)
    assert str(error.value).startswith(says)


@pytest.mark.bad_input
def test_a_group_of_neighbors_stays_on_one_node(twins, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    if not twins.neighbors:
        assert settings_of("--twin_size", "2").data_ranks == 2
        return
    with pytest.raises(UserError, match="--twin_size 2: a group exchanges its results in every layer and must be on"):
        settings_of("--twin_size", "2")


def test_a_checkpoint_says_it_and_a_resumed_run_counts_it(twins, monkeypatch):
    settings = settings_of("--twin_size", "2")
    trainer = SimpleNamespace(settings=settings, state=SimpleNamespace(global_step=3), is_deepspeed_enabled=True)
    facts = save._facts(trainer)
    assert facts["twin_size"] == 2 and "twin_size" not in differences.record(settings)
    resumable.check_split(settings_of("--twin_size", "1"), facts, "x")  # each rank has the whole model
    old = {"twin_size": 2}
    assert (
        parallel_dims.ranks_per_row(resume._sizes({}, old)) == 2
        and parallel_dims.ranks_per_row(resume._sizes({"twin_size": 1}, old)) == 1
    )
    with pytest.raises(UserError, match=r"not a multiple of .*\b2\b.*ranks that share each row .*--twin_size"):
        next_settings.keep_effective_batch(8, 2, 3, settings.ranks_per_row)


@pytest.mark.bad_input
def test_one_that_splits_the_model_goes_on_only_as_it_was_saved(twins):
    parallel_dims.register(replace(twins, splits="matrices"))
    facts = {"zero": "2", "world_size": 4, "offload": "none", "twin_size": 2}
    with pytest.raises(UserError, match="x: --twin_size can only be resumed with the saved layout; use --twin_size 2 "):
        resumable.check_split(settings_of(), facts, "x")
    resumable.check_split(settings_of("--twin_size", "2"), facts, "x")


def test_a_plan_counts_the_ranks_of_a_row_and_searches_them(twins):
    gpu, flags = hardware.GPUS["h100-80g"], [*MODEL, "--effective_batch_size", "8", "--max_length", "2048"]
    asked = parse.request("sft", [*flags, "--twin_size", "2", "--sp_size", "1"])
    found = candidates.candidates("sft", asked, 8, gpu)
    assert {candidate.setting.ranks_per_row for candidate in found} == {2}
    assert {candidate.setting.micro * candidate.setting.accumulation for candidate in found} == {2}
    first = found[0]
    assert ", twin_size 2" in first.label and "--twin_size 2" in run_line.command_of(first)
    assert first.tokens_per_second == pytest.approx(8 * 2048 / first.seconds)
    assert answer_text._data_ranks(first.setting) == "4 groups of 2 GPUs that compare their results"
    parallel_dims.register(replace(twins, searched=(2, 4)))
    searched = candidates.candidates("sft", parse.request("sft", flags), 8, gpu)
    sizes = {{way.flag: size for way, size in c.setting.groups}.get("twin_size", 1) for c in searched}
    assert sizes == {1, 2}  # 4 is refused by the way itself
