"""Run many recipe command lines in one torchrun launch, so that start-up is paid once.

    torchrun --nproc_per_node 2 tests/world.py cases.json

cases.json: [{"recipe": "sft", "flags": [...]}, ...]. Every rank runs the real recipe file for each case; a case
that raises ends the launch with its traceback. In addition to the recipe's files, each run folder gets `record.json`
(facts recorded by the ranks) and `logits.pt` (the trained model's logits on one batch, for comparison with final/).
"""

import contextlib
import gc
import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from zerofit import entrypoint
from zerofit.base import distributed
from zerofit.train import run
from zerofit.train import trainer as train_trainer

ROOT = Path(__file__).resolve().parents[1]
DDP_SETTINGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def gathered(parameters):
    """Context with the full parameters gathered under ZeRO-3; does nothing otherwise."""
    if any(hasattr(p, "ds_id") for p in parameters):
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters)
    return contextlib.nullcontext()


def frozen_hash(model) -> str:
    """Return a hash over the bytes of all frozen parameters."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    digest = hashlib.sha256()
    for p in frozen:  # one by one: NVMe offload has buffers for only a few parameters
        with gathered([p]):
            digest.update(p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


class Recording:
    """A trainer that also records the rows that it trains on and a hash of the frozen parameters."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows_seen, self.frozen_before = [], frozen_hash(self.model)
        self.counted = False  # on the host, for the fused loss

    def training_step(self, net, inputs, num_items_in_batch=None):
        rows, bounds = list(inputs["labels"]), inputs.get("cu_seq_lens_q")
        if bounds is not None:
            rows = rows[0].split(bounds.diff().tolist())
        self.counted = None not in (self.label_counts or [None])
        self.rows_seen += [hash(tuple(row.tolist())) for row in rows if row.ne(-100).any()]
        return super().training_step(net, inputs, num_items_in_batch)


class RecordingTrainer(Recording, train_trainer.ZerofitTrainer):
    pass


def storages(tensors) -> dict[int, int]:
    """Return {address: bytes} of the tensors' storages; a quantized state consists of several tensors."""
    found = {}
    for t in tensors:
        if hasattr(t, "__tensor_flatten__"):
            found |= storages(getattr(t, name) for name in t.__tensor_flatten__()[0])
        elif isinstance(t, torch.Tensor) and t.numel():
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return found


def bytes_by_part(trainer) -> dict[str, int]:
    """Return the exact bytes of this rank's parameters, fp32 (or bf16) master copy and optimizer states."""
    parameters = storages(getattr(p, "ds_tensor", p) for p in trainer.model.parameters())
    optimizer, master = trainer.optimizer, {}
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's, then the optimizer itself
        optimizer = optimizer.optimizer
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            master |= storages(getattr(optimizer, name, []))
    states = storages(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    master = {k: n for k, n in master.items() if k not in parameters}
    parts = {"parameters": parameters, "master": master, "states": states}
    return {name: sum(sizes.values()) for name, sizes in parts.items()}


def innermost(optimizer):
    return innermost(optimizer.optimizer) if hasattr(optimizer, "optimizer") else optimizer


def record(trainer: RecordingTrainer) -> None:
    folder, model = Path(trainer.args.output_dir), trainer.model
    after = frozen_hash(model)  # first: a forward outside the engine may leave ZeRO-3's next parameter in flight
    ids = torch.tensor([trainer.tokens.dataset[0]["input_ids"]])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    per_rank = [None] * dist.get_world_size() if dist.is_initialized() else [trainer.rows_seen]
    if dist.is_initialized():
        dist.all_gather_object(per_rank, trainer.rows_seen)
    if trainer.args.process_index == 0:
        torch.save({"input_ids": ids, "logits": logits}, folder / "logits.pt")
        facts = {
            "engine": type(trainer.model_wrapped).__name__,
            "rows_per_rank": [len(rows) for rows in per_rank],
            "distinct_rows": len({row for rows in per_rank for row in rows}),
            "shared_rows": len(set.intersection(*map(set, per_rank))) if len(per_rank) > 1 else 0,
            "frozen_before": trainer.frozen_before,
            "labels_counted": trainer.counted,
            "frozen_after": after,
            "ddp": {k: getattr(trainer.model_wrapped, k, None) for k in DDP_SETTINGS},
            "bytes": bytes_by_part(trainer),
            "optimizer": type(innermost(trainer.optimizer)).__name__,
            "checks": {check.name: [check.holds, check.numbers] for check in trainer.settings.checks},
        }
        (folder / "record.json").write_text(json.dumps(facts))


def main() -> None:
    if os.environ.get("ZEROFIT_TEST_AS_ON_A_GPU"):
        import as_on_a_gpu  # noqa: F401
    write_result = run.write_result
    if os.environ.get("ZEROFIT_TEST_NAN_BASE"):
        import nan_base  # noqa: F401
    if os.environ.get("ZEROFIT_TEST_REDUCE_IN_PLACE"):
        import reduce_in_place  # noqa: F401
    if os.environ.get("ZEROFIT_TEST_HASHES"):
        import hash_counts  # noqa: F401
    if name := os.environ.get("ZEROFIT_TEST_ACCELERATOR"):
        # "cpu:0" is another name of the CPU: DeepSpeed treats it as a GPU next to the CPU (test_offload.py)
        from deepspeed.accelerator import get_accelerator

        get_accelerator()._name = name

    def write_and_record(trainer, metrics):
        write_result(trainer, metrics)
        if not trainer.settings.recipe.stages:  # no rank has the whole model
            record(trainer)

    entrypoint.report = lambda told=False: None  # one page of many cases is drawn by tests/export/test_report.py
    train_trainer.ZerofitTrainer, run.write_result = RecordingTrainer, write_and_record
    launched = {name: os.environ[name] for name in distributed.LAUNCHER_SETS if name in os.environ}
    stop, distributed.stop = distributed.stop, lambda wait=True: None  # the process group is needed for the next case
    for case in json.loads(Path(sys.argv[1]).read_text()):
        began, streams, words = time.time(), (sys.stdout, sys.stderr), sys.argv
        os.environ.update(launched)  # a case with one process at stage 0 removes them
        sys.argv = [case["recipe"], *case["flags"]]
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{case['recipe']}.py"), run_name="__main__")
        finally:
            sys.argv = words
            sys.stdout, sys.stderr = streams
        if "deepspeed.utils.groups" in sys.modules:  # hpZ's group: DeepSpeed allows one per process
            sys.modules["deepspeed.utils.groups"]._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        gc.collect()  # the last case's engine must not keep its configuration registered
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"case {'  '.join([case['recipe'], *case['flags']])}: {time.time() - began:.1f} s", flush=True)
    stop()


if __name__ == "__main__":
    main()
