"""What a worker was given to do of late: sums over the last minutes, which some policies take for its load."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: The window of Preble's load, the only policy so far that looks back (seconds).
WINDOW = 180


@dataclass(slots=True)
class Recent:
    """Tokens of plans made in the last WINDOW seconds, to the second: of prompts, of those what was to be computed
    (the rest was cached), and of the answers as predicted. At most WINDOW + 1 entries.
    """

    prompt: int = 0
    computed: int = 0
    output: int = 0
    _seconds: deque[list[int]] = field(default_factory=deque)

    def add(self, now: float, prompt: int, computed: int, output: int) -> None:
        second = int(now)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append([second, 0, 0, 0])
        last = self._seconds[-1]
        last[1] += prompt
        last[2] += computed
        last[3] += output
        self.prompt += prompt
        self.computed += computed
        self.output += output
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forgets what is older than the window."""
        while self._seconds and self._seconds[0][0] < now - WINDOW:
            _, prompt, computed, output = self._seconds.popleft()
            self.prompt -= prompt
            self.computed -= computed
            self.output -= output
