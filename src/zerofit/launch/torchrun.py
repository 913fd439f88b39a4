"""torchrun with the rendezvous of launch/rendezvous.py. It exits with the code of the rank that failed first.

python -m zerofit.launch.torchrun --nproc_per_node 4 recipes/sft.py ...      same options as torchrun
"""

import logging
import os
import signal
import sys

from zerofit.base import process

if __name__ == "__main__":
    process.begin()  # before the slow imports
    # Only for this process, not for its ranks. Without it, torch logs a C++ stack trace when a store closes.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"

from torch.distributed import launcher, run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zerofit.base import rank_status
from zerofit.base.errors import UserError
from zerofit.launch import postmortem, rendezvous

if __name__ == "__main__" and not level:
    del os.environ["TORCH_CPP_LOG_LEVEL"]


class Agent(LocalElasticAgent):
    """Write the exit codes of failed ranks before torchrun restarts them.

    Training ranks save on SIGTERM (rank_status.StopRequest), so this agent ends them with TORCHRUN_END_SIGNAL.
    """

    def _shutdown(self, death_sig=rank_status.TORCHRUN_END_SIGNAL, **options):
        super()._shutdown(death_sig, **options)

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.failures and (folder := rank_status.folder()):
            first = ChildFailedError("", result.failures).get_first_failure()[0]
            codes = {rank: failed.exitcode for rank, failed in result.failures.items()}
            rank_status.write_json(folder / postmortem.EXITS, {first: codes[first]} | codes)
        return result


def main() -> None:
    logging.disable(logging.ERROR)  # not inherited by the ranks
    argv = sys.argv[1:]
    if rank_status.folder():
        argv = [*_ignore_save_signals(), *argv]
    rendezvous.register()
    try:
        run.main(argv)
    except rendezvous.Ended as error:
        raise SystemExit(error.outcome.code) from None
    except UserError as error:
        print(f"zerofit: error: {error}", file=sys.stderr)
        if handler := rendezvous.current():
            handler.refused(error)
        raise SystemExit(error.exit_code) from None
    except api.SignalException as error:
        if handler := rendezvous.current():
            handler.interrupted(error.sigval)
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0 and not rank_status.folder():
            print(f"zerofit: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None


def _ignore_save_signals() -> list[str]:
    """Ignore the signals that request a save; return the matching torchrun options.

    SLURM sends them to every process of a job, and the supervisor handles them.
    """
    for number in rank_status.BROADCAST_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    api._get_default_signal = lambda: rank_status.TORCHRUN_END_SIGNAL
    launcher.api.LocalElasticAgent = Agent
    return ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]


if __name__ == "__main__":
    main()
