"""What processes have taken of the cores, and what others took meanwhile. Linux only: it is read from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
IDLE_FIELDS = slice(3, 5)  # of a line of /proc/stat: idle, waiting for a disk
NUM_FIELDS = 8  # those after them are parts of the first two


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time until a moment.

    at      the moment; own: of each of our processes, by name; busy: of all that there are, and what the machine's host
            took from it
    """

    at: float
    own: dict[str, float]
    busy: float

    @classmethod
    def of(
        cls, pids: Mapping[str, int], cores: Collection[int] = (), *, with_ended: bool = False, proc: Path = PROC
    ) -> Usage:
        """Return what our processes have taken, and this one, as `client`; `busy` is of these cores, none: of all.

        with_ended   also what children of this one took that have ended, as `ended`: not where one of `pids` may end
                     meanwhile
        """
        own = {name: cpu_s(pid) for name, pid in pids.items()} | {"client": time.process_time()}
        if with_ended:
            own["ended"] = sum(os.times()[2:4])
        return cls(time.perf_counter(), own, busy_s(cores, proc / "stat"))

    @classmethod
    def known(
        cls, pids: Mapping[str, int], cores: Collection[int], *, with_ended: bool = False, proc: Path = PROC
    ) -> Usage | None:
        """Return what `of` does; None where the system does not count it."""
        try:
            return cls.of(pids, cores, with_ended=with_ended, proc=proc)
        except (OSError, ValueError, IndexError):
            return None

    def since(self, before: Usage) -> Usage:
        """Return what was taken between."""
        own = {name: seconds - before.own[name] for name, seconds in self.own.items()}
        return Usage(self.at - before.at, own, self.busy - before.busy)

    def to_dict(self) -> dict[str, float]:
        """Return, of what was taken between two moments, how many cores our processes took in the mean, and all
        others."""
        cores = {name: round(seconds / self.at, 3) for name, seconds in self.own.items()}
        return cores | {"others": round(max(self.busy - sum(self.own.values()), 0.0) / self.at, 3)}


def others_cores(before: Usage | None, after: Usage | None) -> float | None:
    """Return how many cores others used between two moments, in the mean; None where that is not known."""
    return after.since(before).to_dict()["others"] if before and after else None


def cpu_s(pid: int) -> float:
    """Return the seconds that the threads of a process have computed for."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def busy_s(cores: Collection[int] = (), path: Path = PROC / "stat") -> float:
    """Return the seconds that these cores have been busy for, together; none: all cores. Raises OSError or ValueError
    where the system does not say it of each of them."""
    wanted = {f"cpu{core}" for core in cores} or {"cpu"}
    parts = (line.split() for line in path.read_text().splitlines())
    ticks = [[int(value) for value in values][:NUM_FIELDS] for name, *values in filter(None, parts) if name in wanted]
    if len(ticks) < len(wanted):
        raise ValueError(f"{path} does not count all of {sorted(wanted)}")
    return sum(sum(each) - sum(each[IDLE_FIELDS]) for each in ticks) / os.sysconf("SC_CLK_TCK")
