"""How far a part of the torture has come."""

import sys
import time
from dataclasses import dataclass, field

ON_A_TERMINAL_S, IN_A_LOG_S = 0.5, 20.0


@dataclass
class Progress:
    """A line on a terminal that is written again and again; in a log, a line now and then."""

    part: str
    total: int
    began_s: float = field(default_factory=time.monotonic)
    last_s: float = float("-inf")
    ended: bool = False

    @property
    def elapsed_s(self) -> float:
        """Since the part began."""
        return time.monotonic() - self.began_s

    def at(self, done: int, note: str = "") -> None:
        """Say how much is done, unless that was said a moment ago."""
        now_s, terminal = time.monotonic(), sys.stderr.isatty()
        if self.ended or (now_s - self.last_s < (ON_A_TERMINAL_S if terminal else IN_A_LOG_S) and done < self.total):
            return
        self.last_s, self.ended = now_s, done >= self.total
        text = f"torture: {self.part} {done} of {self.total}, {now_s - self.began_s:.0f} s{', ' * bool(note)}{note}"
        sys.stderr.write(f"\r\033[K{text}" + "\n" * (done >= self.total) if terminal else text + "\n")
        sys.stderr.flush()
