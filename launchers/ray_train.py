"""Run a recipe in the workers of Ray Train (docs/multinode.md); 4:8 workers scale with the available GPUs.

python launchers/ray_train.py 8 recipes/sft.py --zero 3 --data /shared/data.jsonl --output_dir /shared/run
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(job: dict) -> None:
    """Run the recipe in this worker like torchrun; Ray has set the ranks and created their process group."""
    from zerofit.base.rank_status import StopRequest

    # Ray calls this in a thread, but Python handles signals only in the main thread, which runs the worker's calls.
    worker = ray.get_runtime_context().current_actor
    ray.get(worker.__ray_call__.remote(lambda _: signal.signal(signal.SIGTERM, lambda *_: StopRequest.ask()) and None))
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "ray")  # a restart on a different number of ranks keeps the batch
    os.chdir(job["folder"])
    sys.argv = job["words"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    workers, *words = sys.argv[1:]
    if "--resume_from_checkpoint" not in words:
        words += ["--resume_from_checkpoint", "auto"]
    # Ray's own print would send each line to its logger too, and that to the terminal and the log a second time.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    sizes = [int(size) for size in workers.split(":")]
    scaling = ScalingConfig(num_workers=sizes[0] if len(sizes) == 1 else (*sizes,), use_gpu="--use_cpu" not in words)
    run = RunConfig(failure_config=FailureConfig(max_failures=3))
    job = {"folder": str(Path.cwd()), "words": words}
    TorchTrainer(train, train_loop_config=job, scaling_config=scaling, run_config=run).fit()
