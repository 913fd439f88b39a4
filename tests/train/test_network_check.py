"""The exchange of numbers before the model is loaded, on three real ranks."""

import subprocess
import sys

import pytest
from conftest import TINY

from zerofit import recipe
from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.train import network_check

RANK = """
import sys
import torch.distributed as dist
from zerofit.train import network_check
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
network_check.distributed.size, network_check.distributed.rank = dist.get_world_size, dist.get_rank
opened, destroyed = [], []
new_group, destroy = dist.new_group, dist.destroy_process_group
dist.new_group = lambda *a, **k: opened.append(new_group(*a, **k)) or opened[-1]
dist.destroy_process_group = lambda group=None: destroyed.append(group) or destroy(group)
dist.all_to_all_single = None  # NCCL would keep channels to every peer
network_check._exchange(use_cpu=True)
assert len(opened) == 1 and destroyed == opened, (opened, destroyed)
send_and_receive = dist.batch_isend_irecv
if rank == 1:
    def with_a_wrong_number(operations):
        for work in send_and_receive(operations):
            work.wait()
        operations[1].tensor.fill_(7)
        return []
    dist.batch_isend_irecv = with_a_wrong_number
try:
    network_check._exchange(use_cpu=True)
    print("right")
except RuntimeError as error:
    print(error)
dist.barrier()
"""


@pytest.mark.slow
def test_ranks_exchange_numbers_in_a_group_of_their_own(tmp_path):
    """And the rank that receives a wrong number says so."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert said == ["right", "rank 1 received [0, 1, 2] from all ranks and 7 from rank 0.", "right"]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]


def test_the_node_with_slow_links_is_named():
    even, slow = [(10.0, "node 0 (a)"), (9.5, "node 1 (b)")], (7.0, "node 2 (c)")
    sentence = network_check._speed_sentence("within a node", even, 8, "nccl")
    assert sentence == "links within a node: 9.50 GB/s per rank (8 ranks, nccl, all-reduce)"
    sentence = network_check._speed_sentence("within a node", [*even, slow], 8, "nccl")
    assert sentence.endswith("7.00 GB/s per rank (8 ranks, nccl, all-reduce); node 2 (c) is the slowest")


def test_gpus_of_several_kinds_are_said():
    (sentence,) = network_check._gpu_kinds(["A100"] * 4 + ["H100"] * 8)
    assert sentence.startswith("GPUs of several kinds (8 x H100, 4 x A100): each step waits for the slowest")
    assert network_check._gpu_kinds(["H100"] * 8) == []


def test_nothing_is_exchanged_before_all_ranks_have_answered(monkeypatch):
    """Else a broken link between GPUs would end a run by --ddp_timeout, half an hour, and without a second try."""

    def no_answer(settings):
        raise UserError("no answer")

    monkeypatch.setattr(recipe.distributed, "start", lambda *_: None)
    for name in ("all_gather", "broadcast"):
        monkeypatch.setattr(recipe.distributed, name, lambda *_: pytest.fail("exchanged"))
    monkeypatch.setattr(recipe, "_choose", lambda *_: None)
    monkeypatch.setattr(network_check, "answer", no_answer)
    settings = resolve.resolve_settings(
        "sft", ["--model", str(TINY / "model"), "--data", "none"], 2, hardware.GPUS["h100-80g"]
    )
    with pytest.raises(UserError, match="no answer"):
        recipe.start_processes(settings, None, None)
