"""A clock that a test can turn back while a program runs: a library of thirty lines, loaded before libc's own functions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {  /* seconds, read anew each time: the file may change while the program runs */
    const char *path = getenv("TEST_CLOCK_SHIFT");
    char text[32] = {0};
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return result;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict where, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    where->tv_sec = now.tv_sec;
    where->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


class Clock:
    """The time of the programs that get `variables`; `turn` moves it for those that run already, too."""

    def __init__(self, folder: Path) -> None:
        """Compiles the library into `folder`. Raises `CalledProcessError` where that fails."""
        self.shift, self.library = folder / "shift.txt", folder / "clock.so"
        source = folder / "clock.c"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(self.library), str(source), "-ldl"], check=True, timeout=60)
        self.turn(0)

    @staticmethod
    def can_be_made() -> bool:
        return shutil.which("cc") is not None

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "TEST_CLOCK_SHIFT": str(self.shift)}

    def turn(self, seconds: int) -> None:
        """Shows the programs the true time and `seconds`."""
        aside = self.shift.with_suffix(".new")
        aside.write_text(str(seconds))
        aside.replace(self.shift)
