"""Worlds that fail are restarted as long as there is progress."""

from __future__ import annotations

from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.campaign.retries import TRIES, persevere


class Attempts:
    """Each attempt takes a number of trials and ends with an error or well."""

    def __init__(self, *course: tuple[int, Exception | None]) -> None:
        self.course, self.trials, self.messages = list(course), 0, list[str]()

    def __call__(self) -> None:
        taken, error = self.course.pop(0)
        self.trials += taken
        if error is not None:
            raise error

    def succeed(self) -> bool:
        return persevere("domain", self, lambda: self.trials, self.messages.append, pause_s=0.0)


def test_only_failures_in_a_row_without_a_trial_end_it():
    failed = LaunchError("a rank is gone")
    assert not Attempts(*[(0, failed)] * TRIES).succeed()
    advancing = Attempts(*[(1, failed)] * (2 * TRIES), (5, None))
    assert advancing.succeed() and advancing.trials == 2 * TRIES + 5
    assert len(advancing.messages) == 2 * TRIES
    assert "1 of 3 times in a row: a rank is gone" in advancing.messages[-1]


def test_an_error_that_will_return_is_not_tried_again():
    refused = Attempts((1, InvalidInput("another machine")), (0, None))
    assert not refused.succeed() and len(refused.course) == 1
    assert refused.messages == ["domain: another machine"]
