"""torchrun that exits with the exit code of the rank that failed first, and has the rendezvous of launch/rendezvous.py.

python -m zerofit.launch.torchrun --nproc_per_node 4 recipes/sft.py ...      same options as torchrun
"""

import logging
import os
import signal
import sys

from zerofit.base import process

if __name__ == "__main__":
    process.begin()  # before the next lines, which take seconds
    # Of this process, not of its ranks: torch reads it when it is imported. A store that ends is a stack trace of C++.
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
    """torchrun's agent, which writes the exit codes of ranks that have failed before it starts them again.

    Training ranks save at SIGTERM (rank_status.StopRequest), so it ends them with rank_status.ENDS_RANKS.
    """

    def _shutdown(self, death_sig=rank_status.ENDS_RANKS, **options):
        super()._shutdown(death_sig, **options)

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.failures and (folder := rank_status.folder()):
            first = ChildFailedError("", result.failures).get_first_failure()[0]
            codes = {rank: failed.exitcode for rank, failed in result.failures.items()}
            rank_status.write_json(folder / postmortem.EXITS, {first: codes[first]} | codes)
        return result


def main() -> None:
    logging.disable(logging.ERROR)  # not for the ranks; torch's signal loggers have their own levels
    argv = sys.argv[1:]
    if rank_status.folder():
        argv = [*_for_a_supervisor(), *argv]
    rendezvous.register()
    try:
        run.main(argv)
    except rendezvous.Ended as error:
        raise SystemExit(error.outcome.code) from None
    except UserError as error:
        print(f"zerofit: error: {error}", file=sys.stderr)
        if meeting := rendezvous.own():
            meeting.refused(error)
        raise SystemExit(error.exit_code) from None
    except api.SignalException as error:
        if meeting := rendezvous.own():
            meeting.interrupted(error.sigval)
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0 and not rank_status.folder():
            print(f"zerofit: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None


def _for_a_supervisor() -> list[str]:
    """Ignore the signals that request a save; return the matching torchrun options.

    SLURM sends them to every process of a job; the supervisor handles them.
    """
    for number in rank_status.SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    api._get_default_signal = lambda: rank_status.ENDS_RANKS
    launcher.api.LocalElasticAgent = Agent
    return ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]


if __name__ == "__main__":
    main()
