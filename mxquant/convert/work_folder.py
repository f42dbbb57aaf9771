"""``<out>.partial``: the folder that an output is built in, by one process at a time.

::

    <out>.partial/
        lock         locked by the process at work; a file that is not locked has no meaning
        model/       the output, which takes its name when it is whole
        replaced/    what was there before, for the moment between two renames
        ...          what the work needs to know of itself, such as a manifest

Every step leaves a state that the next process can make sense of, as any step may be the last.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxquant.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a Unix: two processes are then not told of each other
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 100
_LOCK, _MODEL, _REPLACED = "lock", "model", "replaced"
# What flock says where the file system knows no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextmanager
def work_folder(out: Path) -> Iterator[WorkFolder]:
    """The work folder of ``out``, locked; it vanishes at the end if nothing was left in it.

    Raises ``CheckpointError`` that names ``out`` for whatever the operating system refuses, such as
    a full disk, and where another process is at work.
    """
    work = WorkFolder(out)
    made = [folder for folder in work.path.absolute().parents if not folder.exists()]
    try:
        lock = work._lock()
        try:
            work._put_back()
            yield work
        finally:
            work._leave(lock)
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(work.path) else ""
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}{where}") from error
    finally:
        for folder in made:  # only those that are empty
            with suppress(OSError):
                folder.rmdir()


def partial_folder(out: Path) -> Path:
    """The path of the work folder. Raises ``CheckpointError`` for an output without a name."""
    if out.name in ("", ".."):  # nothing can be beside it, nor take its place
        raise CheckpointError(f"output {out} has no name of its own; give one, such as --out ./small")
    return out.with_name(out.name + ".partial")


class WorkFolder:
    """See :func:`work_folder`. ``path``: the folder; ``model``: the output that is being built in it."""

    def __init__(self, out: Path):
        self._out = out
        self.path = partial_folder(out)
        self.model = self.path / _MODEL

    def clear(self) -> None:
        """Remove all that earlier work left; other files than the model's first, as they speak of it."""
        entries = [entry for entry in self.path.iterdir() if entry.name != _LOCK]
        for entry in sorted(entries, key=lambda entry: entry.is_dir()):
            remove(entry)

    def publish(self) -> None:
        """Give the model its name, in place of what has it."""
        replaced = self.path / _REPLACED
        if not self._out.exists():
            self.model.rename(self._out)
            return
        remove(replaced)
        self._out.rename(replaced)
        try:
            self.model.rename(self._out)
        except BaseException:
            replaced.rename(self._out)
            raise

    def _put_back(self) -> None:
        """A process that was killed between the two renames left nothing under the name of the output."""
        replaced = self.path / _REPLACED
        if replaced.exists() and not self._out.exists():
            replaced.rename(self._out)

    def _lock(self) -> int:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            except (FileNotFoundError, FileExistsError):  # another process may just have removed the folder
                if attempt == _ATTEMPTS:
                    raise
                continue
            if not _try_flock(lock):
                os.close(lock)
                break
            if _is_at(lock, self.path / _LOCK):
                return lock
            os.close(lock)  # the process that held it before has removed it: make another
        raise CheckpointError(
            f"another process is writing to {self.path}; wait for it to finish, or choose another --out"
        )

    def _leave(self, lock: int) -> None:
        """Let go of the lock, which is the last thing in a folder that is no longer needed."""
        with suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                self.path.rmdir()
        os.close(lock)


def _try_flock(lock: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
