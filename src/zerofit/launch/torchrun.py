"""torchrun that exits with the code of the rank that failed first.

python -m zerofit.launch.torchrun --nproc_per_node 4 recipes/sft.py ...      same options as torchrun
"""

import json
import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zerofit import rank_status
from zerofit.launch import postmortem


def main() -> None:
    logging.disable(logging.ERROR)  # of this process; torch's loggers of signals have levels of their own
    words = sys.argv[1:]
    if rank_status.folder():
        words = [*_for_a_supervisor(), *words]
    try:
        run.main(words)
    except api.SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if where := rank_status.folder():
            codes = {r: failed.exitcode for r, failed in error.failures.items()}
            (where / postmortem.EXITS).write_text(json.dumps({rank: first.exitcode} | codes))
        elif first.exitcode < 0:
            print(f"zerofit: rank {rank} was ended by signal {-first.exitcode}", file=sys.stderr)
        raise SystemExit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from None


def _for_a_supervisor() -> list[str]:
    """Leave the signals that ask for a save to the supervisor: SLURM sends them to every process of a job.

    Ranks that train ignore SIGTERM then (failure.Pulse), so torchrun ends them by a signal that nobody else sends.
    """
    for number in rank_status.ASKS_TO_SAVE:
        signal.signal(number, signal.SIG_IGN)
    api._get_default_signal = lambda: rank_status.ENDS_RANKS
    return ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]


if __name__ == "__main__":
    main()
