"""How tests are dealt to the processes of `-n`: a file's tests to one of them, and no test twice.

A process that dies ends the test it was at, and nothing else. xdist's own `loadfile` runs that test again in the next
process, which dies of it, too; and it deals out the files that the dead one had done: they have no test left, and who
gets such a file waits for ever.
"""

from __future__ import annotations

import contextlib

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

LOOKAHEAD = 2  # a process begins a test when it knows the one after it, or that there is none


class Files(LoadFileScheduling):
    def _assign_work_unit(self, node: WorkerController) -> None:
        """Files are in an order of which the first wait, for processes that they start, and the last compute: one in
        three takes the last of those that are left, so that neither cores nor tests wait for each other."""
        if self.nodes.index(node) % 3 == 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that the process died in; None where it was done."""
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
        if node not in self.registered_collections:  # it is about to collect, and is given tests then
            return
        with contextlib.suppress(OSError):  # it is dead, of which the news is under way
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= LOOKAHEAD:
                super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None
