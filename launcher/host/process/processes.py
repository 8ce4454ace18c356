"""Whether a process is still the one we mean, and rank processes that leave nothing behind."""

import os
import signal
import subprocess
from typing import Dict, List, Optional


def start_time(pid: int) -> Optional[int]:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie.

    Together with the pid it names a process for good: pids are used again.
    """
    try:
        with open("/proc/{}/stat".format(pid)) as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


class RankProcess:
    """One rank in a session of its own, so that no terminal signal reaches it.

    An ended rank is not reaped before `close`: until then its pid, which also names its process group, cannot
    be given to a stranger, and `close` can safely end whatever the rank itself started.
    """

    def __init__(self, rank: int, command: List[str], env: Dict[str, str], log: str) -> None:
        self.rank = rank
        self._code: Optional[int] = None
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> Optional[int]:
        """None while it runs; negative: the signal that ended it."""
        if self._code is None:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                ended_itself = status.si_code == os.CLD_EXITED
                self._code = status.si_status if ended_itself else -status.si_status
        return self._code

    def send(self, signum: int) -> None:
        """To the rank alone; nothing happens when it has ended."""
        os.kill(self.pid, signum)

    def close(self) -> None:
        """End the rank and everything in its process group, and reap it."""
        self.exit_code()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # between fork and setsid there is no group yet
        self._process.kill()
        self._process.wait()
