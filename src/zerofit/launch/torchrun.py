"""torchrun that exits with the exit code of the rank that failed first.

python -m zerofit.launch.torchrun --nproc_per_node 4 recipes/sft.py ...      same options as torchrun
"""

import logging
import signal
import sys

from zerofit.base import process

if __name__ == "__main__":
    process.begin()  # before the next lines, which take seconds

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zerofit.base import rank_status
from zerofit.launch import postmortem


def main() -> None:
    logging.disable(logging.ERROR)  # not for the ranks; torch's signal loggers have their own levels
    argv = sys.argv[1:]
    if rank_status.folder():
        argv = [*_for_a_supervisor(), *argv]
    try:
        run.main(argv)
    except api.SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if folder := rank_status.folder():
            codes = {r: failed.exitcode for r, failed in error.failures.items()}
            rank_status.write_json(folder / postmortem.EXITS, {rank: failure.exitcode} | codes)
        elif failure.exitcode < 0:
            print(f"zerofit: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None


def _for_a_supervisor() -> list[str]:
    """Ignore the signals that request a save; return the matching torchrun options.

    SLURM sends them to every process of a job; the supervisor handles them. Training ranks save at SIGTERM
    (rank_status.StopRequest), so torchrun ends them with rank_status.ENDS_RANKS.
    """
    for number in rank_status.SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    api._get_default_signal = lambda: rank_status.ENDS_RANKS
    return ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]


if __name__ == "__main__":
    main()
