"""Measure how OpenMP's threads wait on a node with other work: small steps beside one busy process for each core.

python benchmarks/busy_cpu.py                # milliseconds a step by setting, idle and busy

torch ships GNU's OpenMP (torch/lib/libgomp.so.1). Its threads spin between two parallel regions, 300,000 turns unless
OMP_WAIT_POLICY or GOMP_SPINCOUNT change it. When another process holds a core, they spin for a thread that cannot run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

SETTINGS = {
    "as it comes": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "passive, 1,000 turns (zerofit's)": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


def steps(count: int) -> None:
    """Print the seconds of `count` steps of a model as small as the bundled one."""
    import torch

    net = torch.nn.Sequential(*[m for _ in range(8) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(net.parameters())
    rows = torch.randn(900, 128)
    for step in range(count + 5):
        if step == 5:
            began, spent = time.perf_counter(), time.process_time()
        net(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(time.perf_counter() - began, time.process_time() - spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        steps(given.steps)
        return
    found = {}
    for busy in (0, len(os.sched_getaffinity(0))):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            for _ in range(given.rounds):  # settings take turns: the node's other load changes
                for name, env in SETTINGS.items():
                    words = [sys.executable, __file__, "--one", "--steps", str(given.steps)]
                    done = subprocess.run(words, env=os.environ | env, capture_output=True, text=True, check=True)
                    found.setdefault((busy, name), []).append(
                        [1000 * float(s) / given.steps for s in done.stdout.split()]
                    )
        finally:
            for other in others:
                other.kill()
                other.wait()
    print(f"load average {os.getloadavg()[0]:.1f} at the end; medians of {given.rounds}")
    for (busy, name), times in found.items():
        wall, spent = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{busy} busy processes, {name:<24} {wall:8.2f} ms a step, {spent:8.2f} ms of CPU time")


if __name__ == "__main__":
    main()
