"""Worlds that fail are restarted as long as there is progress."""

from __future__ import annotations

from autotune.errors import InvalidInput, LaunchError
from autotune.jobs.campaign.retries import TRIES, persevere


class Attempts:
    """Attempts that each take so many trials and end with an error or well."""

    def __init__(self, *course: tuple[int, Exception | None]) -> None:
        self.course, self.trials, self.said = list(course), 0, list[str]()

    def __call__(self) -> None:
        taken, error = self.course.pop(0)
        self.trials += taken
        if error is not None:
            raise error

    def done(self) -> bool:
        return persevere("domain", self, lambda: self.trials, self.said.append, pause_s=0.0)


def test_failures_in_a_row_end_it_and_a_trial_between_begins_the_count_anew() -> None:
    failed = LaunchError("a rank is gone")
    assert not Attempts(*[(0, failed)] * TRIES).done()
    advancing = Attempts(*[(1, failed)] * (2 * TRIES), (5, None))
    assert advancing.done() and advancing.trials == 2 * TRIES + 5
    assert (
        len(advancing.said) == 2 * TRIES
        and "1 of 3 times in a row: a rank is gone" in advancing.said[-1]
    )


def test_what_cannot_be_gone_on_with_is_not_tried_again() -> None:
    refused = Attempts((1, InvalidInput("another machine")), (0, None))
    assert (
        not refused.done()
        and len(refused.course) == 1
        and refused.said == ["domain: another machine"]
    )
