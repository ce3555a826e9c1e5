"""Answers a list of what-ifs on one base: predictions, and a reason for each one without.

Text such as `amp+fused_adam,faster_network=2,metaflow=policy.yaml` states what-ifs: a comma
separates rows, a plus combines, and an equals sign gives the amount or the file of a what-if.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autotune.errors import InvalidInput
from autotune.whatif.answers.limits import Limits, limits
from autotune.whatif.answers.predict import Prediction, predict
from autotune.whatif.base import Base
from autotune.whatif.question import Question
from autotune.whatif.registry import WHAT_IFS, WhatIf, combined

MOST_ROWS = 1000
V = TypeVar("V")
SAME = 1e-9
"""Relative difference below which two predictions are the same."""


@dataclass(frozen=True)
class Asked:
    """A combination of what-ifs with their amounts and files; `text` is how the user states it."""

    text: str
    names: str
    amounts: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Answer:
    """The prediction of one combination, or the reason why there is none.

    `workers`: of this row; None where the prediction does not depend on their number.
    """

    asked: Asked
    what_ifs: tuple[WhatIf, ...]
    question: Question
    workers: int | None = None
    prediction: Prediction | None = None
    limits: Limits | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        return "; ".join(one.title for one in self.what_ifs)

    @property
    def samples_ratio(self) -> float | None:
        """Samples of all workers per second, over those of the recorded one.

        None where their number is unknown and a step has as many samples as before.
        """
        workers = self.asked.amounts.get("workers", self.workers)
        changes = [one.samples for one in self.what_ifs if one.samples is not None]
        if self.prediction is None or (workers is None and not changes):
            return None
        samples = math.prod(change(self.question) for change in changes)
        return samples * (workers or 1) * self.prediction.speedup

    @property
    def enact(self) -> str:
        """The lines of code that make the changes in a script."""
        return "\n".join(one.enact for one in self.what_ifs)


def read_asked(text: str) -> tuple[Asked, ...]:
    """Read the rows of a text. Raises `InvalidInput` for an unknown name or a repeated one."""
    rows = tuple(_row(part.strip()) for part in text.split(",") if part.strip())
    if not rows:
        raise InvalidInput(
            "what-ifs are stated as names, such as amp+fused_adam,faster_network=2, but the text "
            f"is {text!r}"
        )
    if len(rows) > MOST_ROWS:
        raise InvalidInput(
            f"one run answers at most {MOST_ROWS} what-ifs, but {len(rows)} are named"
        )
    return rows


def _row(text: str) -> Asked:
    names: list[str] = []
    amounts: dict[str, float] = {}
    files: dict[str, str] = {}
    for part in text.split("+"):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name in names:
            raise InvalidInput(f"a combination has a what-if once, but {text!r} has {name!r} twice")
        names.append(name)
        if equals and not value:
            raise InvalidInput(f"{part!r} needs an amount or a file behind '='")
        if equals and (amount := _number(value)) is not None:
            amounts[name] = amount
        elif equals:
            files[name] = value
    combined("+".join(names))  # raises for an unknown name
    return Asked(text, "+".join(names), amounts, files)


def _number(text: str) -> float | None:
    try:
        amount = float(text)
    except ValueError:
        return None
    if not math.isfinite(amount) or amount < 0:
        raise InvalidInput(f"an amount must be finite and at least 0, but is {text}")
    return amount


def all_asked() -> tuple[Asked, ...]:
    """Every registered what-if by itself."""
    return tuple(Asked(name, name) for name in WHAT_IFS)


def answers(
    base: Base,
    asked: Sequence[Asked],
    question: Question,
    workers: Sequence[int] = (),
    others: Sequence[Base] = (),
) -> Iterator[list[Answer]]:
    """The answers of each combination in turn: one, or one for each number of workers.

    They are one where the prediction is the same on the first and the last number, or the reason
    why there is none. `others`: as in `predict`.
    """

    def of(one: Asked, workers: int | None) -> Answer:
        return answer(base, one, replace(question, workers=workers), others)

    counts: list[int | None] = [*workers] or [question.workers]
    for one in asked:
        first = of(one, counts[0])
        rows = [first]
        if len(counts) > 1:
            last = of(one, counts[-1])
            if not _same(first, last) and (first.reason != last.reason or not first.reason):
                rows = [first, *(of(one, count) for count in counts[1:-1]), last]
                rows = [replace(row, workers=row.question.workers) for row in rows]
        elif first.prediction is not None and counts[0] is not None:
            alone = of(one, 2 * counts[0])
            rows = [first if _same(first, alone) else replace(first, workers=counts[0])]
        yield rows


def _same(one: Answer, other: Answer) -> bool:
    if one.prediction is None or other.prediction is None:
        return False
    return math.isclose(one.prediction.after_s, other.prediction.after_s, rel_tol=SAME)


def answer(base: Base, asked: Asked, question: Question, others: Sequence[Base] = ()) -> Answer:
    """Predict one combination. A what-if that does not apply gives an answer with the reason."""
    what_ifs = combined(asked.names)
    amounts, files = _Given(asked.amounts), _Given(asked.files)
    question = replace(question, amounts=amounts, files=files)
    blank = Answer(asked, what_ifs, question)
    try:
        prediction = predict(base, what_ifs, question, others)
        amounts.check_read("amount")
        files.check_read("file")
    except InvalidInput as error:
        return replace(blank, reason=str(error))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; its row says so
        return replace(blank, reason=f"its function raised {type(error).__name__}: {error}")
    return replace(
        blank, prediction=prediction, limits=limits(prediction.base, prediction.timeline)
    )


class _Given(Mapping[str, V]):
    """Amounts or files by name, which notes the names that what-ifs looked up."""

    def __init__(self, values: Mapping[str, V]) -> None:
        self._values = dict(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> V:  # also what `get` and `in` call
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check_read(self, what: str) -> None:
        """Raise `InvalidInput` if a what-if never looked at what it was given."""
        for name, value in self._values.items():
            if name not in self.read:
                raise InvalidInput(f"what-if {name!r} takes no {what}, but was given {value}")
