"""How tests are distributed to the processes of `-n`: a file's tests go to one process, and no test runs twice.

A process that dies fails only the test it was running. xdist's own `loadfile` runs that test again in the next process,
which dies too. It also hands out again the files that the dead process had finished: they have no tests left, and a
process that gets one waits forever.
"""

from __future__ import annotations

import contextlib

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

LOOKAHEAD = 2  # a process starts a test once it knows the next one, or that there is none


class Files(LoadFileScheduling):
    def _assign_work_unit(self, node: WorkerController) -> None:
        """The first files mostly wait for processes that they start, the last ones compute. One process in three takes
        the last file that is left, so that neither cores nor tests wait for each other."""
        if self.nodes.index(node) % 3 == 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that the process died in; None if it had finished."""
        dealt = self.assigned_work[node]
        died_in = next((test for tests in dealt.values() for test, done in tests.items() if not done), None)
        if died_in is not None:
            dealt[self._split_scope(died_in)][died_in] = True
        self.workqueue.update({file: tests for file, tests in dealt.items() if not all(tests.values())})
        del self.assigned_work[node]
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # about to collect; it gets tests after that
            return
        with contextlib.suppress(OSError):  # it has died; the report is on its way
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= LOOKAHEAD:
                super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None
