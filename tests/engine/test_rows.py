"""Device columns hold the values that the host set last."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetspec.engine.rows import COLUMNS, RowTable
from jetspec.ops.transfer import Download

ROWS = 4
WHOLE = {name: dtype == torch.int64 for dtype, names in COLUMNS.items() for name in names}


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, dict[str, float]]:
    names = draw(st.lists(st.sampled_from(sorted(WHOLE)), unique=True))
    numbers = st.floats(-100, 100, width=32)
    return draw(st.integers(0, ROWS - 1)), {n: draw(st.integers(0, 2**63 - 1) if WHOLE[n] else numbers) for n in names}


@given(st.lists(st.lists(changes(), max_size=4), max_size=4))
def test_columns_hold_the_last_value(flushes: list[list[tuple[int, dict[str, float]]]]) -> None:
    table = RowTable(ROWS, 8, torch.device("cpu"))
    length_R, expected = table.length_R, {name: table.columns[name].tolist() for name in WHOLE}
    for said in flushes:
        for row, values in said:
            table.set(row, **values)
            for name, value in values.items():
                expected[name][row] = value
        table.flush()
        assert {name: table.columns[name].tolist() for name in WHOLE} == expected
    assert table.length_R.data_ptr() == length_R.data_ptr()


class Event:
    def __init__(self, waited: list[str], fails: bool) -> None:
        self.waited, self.fails = waited, fails

    def synchronize(self) -> None:
        self.waited.append("waited")
        if self.fails:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("error")
def test_download_keeps_memory_until_it_has_arrived(fails: bool) -> None:
    """The last round of an ended text is not read, so its host memory may be reused too early."""
    waited = list[str]()
    download = Download(torch.zeros(3))
    download.arrived = Event(waited, fails)  # type: ignore[assignment]
    del download
    assert waited == ["waited"]
