"""The hosts of the cluster tests."""

import contextlib
import itertools

import pytest

from .hosts import Hosts, why_not


@pytest.fixture(scope="session")
def namespaces():
    """Skips, with the reason, where this machine can have no such hosts."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts(namespaces, tmp_path):
    """`first, second = hosts(2)`; `hosts(2, private=[path], sshd=True)`. A failed test shows the ends of their logs."""
    started = []

    with contextlib.ExitStack() as beds:

        def start(n: int, **options):
            started.append(beds.enter_context(Hosts(n, folder=tmp_path / f"hosts{len(started)}", **options)))
            return started[-1]

        yield start
    for host in itertools.chain(*started):
        for log in sorted(host.folder.glob("*.txt")):
            print(f"--- {host.name} {log.name}\n{log.read_text(errors='replace')[-6000:]}")
