from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import MillraceError, OutputError, StorageError
from pipeline.storage import output_lock, partial
from pipeline.storage.partial import Opening, PartialFile, PartialFolder
from tests import commands
from tests.pipeline.formats.image.contract import one_line


def published(final: Path, data: bytes) -> None:
    file = PartialFile(final, len(data))
    file.write_at(0, data)
    file.publish()


def failing_with(code: int) -> object:
    def failing(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return failing


@contextmanager
def fails(kind: type[MillraceError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    one_line(caught.value, *words)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# One file


def test_what_was_reserved_is_there_and_in_full(tmp_path: Path) -> None:
    file = PartialFile(tmp_path / "a", 1_000_003)
    found = (tmp_path / "a.partial").stat()
    assert found.st_size == 1_000_003
    assert found.st_blocks * 512 >= 1_000_003
    file.discard()


def test_what_an_empty_disk_would_not_take_is_a_mistake(tmp_path: Path) -> None:
    with fails(
        OutputError, f"a: {1 << 62:,} bytes are needed, and the whole disk of {tmp_path} has ", "another folder"
    ):
        PartialFile(tmp_path / "a", 1 << 62)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_reserve_gets_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.posix_fallocate", failing_with(errno.EOPNOTSUPP))
    file = PartialFile(tmp_path / "a", 12_345)
    assert (tmp_path / "a.partial").stat().st_size == 12_345
    file.publish()
    assert (tmp_path / "a").stat().st_size == 12_345


@pytest.mark.parametrize("opening", [Opening.NEW, Opening.JOIN])
def test_scratch_files_and_those_of_others_are_never_published(opening: Opening, tmp_path: Path) -> None:
    scratch_for = tmp_path / "a" if opening is Opening.NEW else None
    owner = None if scratch_for else PartialFile(tmp_path / "b", 4)
    file = PartialFile(tmp_path / "b", 4, opening, scratch_for=scratch_for)
    with pytest.raises(ValueError, match="only its owner publishes it, and a scratch file is never published"):
        file.publish()
    file.discard()
    assert [found.name for found in tmp_path.iterdir()] == ["b.partial"] * (owner is not None)


def test_a_file_is_empty_unless_told_its_length(tmp_path: Path) -> None:
    PartialFile(tmp_path / "a").publish()
    assert (tmp_path / "a").stat().st_size == 0


def test_what_is_over_is_not_removed(tmp_path: Path) -> None:
    """Publishing, discarding and keeping end an output; to discard it then is harmless, again and again."""
    makers: list[Callable[[Path], Any]] = [lambda path: PartialFile(path, 4), lambda path: filled(path, "x")]
    for number, made in enumerate(makers):
        path = tmp_path / str(number)
        for end in ("discard", "keep", "publish"):
            output = made(path)
            getattr(output, end)()
            output.discard()
            output.discard()
            assert path.exists() == (end == "publish")
            assert partial.partial_path(path).exists() == (end == "keep")
        with pytest.raises(ValueError, match=r"already published|used after it was closed"):
            output.publish()


def test_the_spooled_samples_of_an_output_are_beside_it() -> None:
    assert partial.samples_path(Path("folder/a.png")) == Path("folder/a.png.samples")


@pytest.mark.parametrize("kind", [PartialFile, PartialFolder])
def test_a_new_version_has_the_mode_of_the_older_one_even_if_that_is_read_only(kind: Any, tmp_path: Path) -> None:
    """Until it is published, its owner can read and write it."""
    for wanted in (None, 0o550):
        made = PartialFile(tmp_path / "a") if kind is PartialFile else filled(tmp_path / "a", "x")
        assert made.path.stat().st_mode & 0o600 == 0o600
        made.publish()
        assert wanted is None or stat.S_IMODE((tmp_path / "a").stat().st_mode) == wanted
        (tmp_path / "a").chmod(0o550)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_mode_is_that_of_any_new_file(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        published(tmp_path / "a", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_publish_makes_the_bytes_durable_before_the_name(tmp_path: Path, steps: list[str]) -> None:
    published(tmp_path / "a", b"x")
    assert steps == ["sync a.partial", "rename a", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("kind", [PartialFile, PartialFolder])
def test_nobody_else_can_read_a_private_output_for_a_moment(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has opened it may read it for as long as he likes."""
    filled(tmp_path / "a", "old").publish() if kind is PartialFolder else published(tmp_path / "a", b"old")
    (tmp_path / "a").chmod(0o700)
    modes = []
    lock = output_lock._lock

    def noting(descriptor: int, path: Path) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        lock(descriptor, path)

    monkeypatch.setattr(output_lock, "_lock", noting)
    made = PartialFile(tmp_path / "a") if kind is PartialFile else filled(tmp_path / "a", "new")
    made.discard()
    assert modes == [0o700]


def test_a_killed_run_leaves_the_old_output_and_its_place_to_the_next(tmp_path: Path) -> None:
    published(tmp_path / "a", b"old")
    script = (
        "import os, signal, sys; from pathlib import Path; from pipeline.storage.partial import PartialFile\n"
        "PartialFile(Path(sys.argv[1]), 100_000).write_at(7, b'half')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = commands.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "a.partial").exists()
    published(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_a_live_run_in_another_process_is_not_disturbed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pipeline.storage.partial import PartialFile\n"
        "file = PartialFile(Path(sys.argv[1]), 4); file.write_at(0, b'mine'); print(flush=True)\n"
        "input(); file.publish()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    with commands.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with fails(OutputError, "a.partial", "another run"):
            PartialFile(tmp_path / "a", 4)
        other.stdin.write("\n")
    assert other.returncode == 0
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_behind_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "disk" / "real")
    assert partial.behind_link(tmp_path / "a") == tmp_path / "disk" / "real"
    assert partial.behind_link(tmp_path / "c") == tmp_path / "c"
    (tmp_path / "folder").symlink_to(tmp_path)
    assert partial.behind_link(tmp_path / "folder" / "c") == tmp_path / "folder" / "c"
    (tmp_path / "loop").symlink_to("loop")
    with fails(OutputError, str(tmp_path / "loop"), "link"):
        partial.behind_link(tmp_path / "loop")


def test_a_link_in_the_place_of_an_output_is_replaced_itself(tmp_path: Path) -> None:
    """As the receipt's name may be one, which nobody chose."""
    (tmp_path / "secret").write_bytes(b"kept")
    (tmp_path / "secret").chmod(0o755)
    (tmp_path / "a").symlink_to(tmp_path / "secret")
    with umask(0o027):
        published(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert (tmp_path / "secret").read_bytes() == b"kept"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "secret"]


def test_a_link_in_the_partial_files_place_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"kept")
    (tmp_path / "a.partial").symlink_to(tmp_path / "precious")
    said = f"{tmp_path}/a: a symbolic link that cannot be followed is in the way ({tmp_path}/a.partial); remove it"
    with fails(OutputError, said):
        PartialFile(tmp_path / "a", 4)
    assert (tmp_path / "precious").read_bytes() == b"kept"


@pytest.mark.parametrize("place", ["a", "a.partial"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_never_replaced(place: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir() if kind == "folder" else os.mkfifo(tmp_path / place)
    with fails(OutputError, str(tmp_path / place)):
        PartialFile(tmp_path / "a", 4)
    assert [found.name for found in tmp_path.iterdir()] == [place]


def before_locking(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Another run's deed at the worst moment: when this one has opened what it is about to lock."""
    lock = output_lock._lock

    def late(descriptor: int, path: Path) -> None:
        monkeypatch.setattr(output_lock, "_lock", lock)
        other()
        lock(descriptor, path)

    monkeypatch.setattr(output_lock, "_lock", late)


def test_a_file_that_its_owner_has_just_published_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = PartialFile(tmp_path / "a", 4)
    owner.write_at(0, b"mine")
    before_locking(monkeypatch, owner.publish)
    with fails(OutputError, "a.partial", "published or removed", "--resume"):
        PartialFile(tmp_path / "a", 4, Opening.RESUME)
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def test_a_partial_file_that_somebody_replaced_is_not_published(tmp_path: Path) -> None:
    file = PartialFile(tmp_path / "a", 4)
    (tmp_path / "a.partial").unlink()
    (tmp_path / "a.partial").write_bytes(b"theirs")
    with fails(OutputError, "replaced"):
        file.publish()
    file.discard()
    assert (tmp_path / "a.partial").read_bytes() == b"theirs"


@pytest.mark.parametrize("nbytes", [3, 5])
@pytest.mark.parametrize("opening", [Opening.RESUME, Opening.JOIN])
def test_a_partial_file_of_another_length_is_refused_and_kept(nbytes: int, opening: Opening, tmp_path: Path) -> None:
    interrupted = PartialFile(tmp_path / "a", 4)
    interrupted.write_at(0, b"half")
    interrupted.keep()
    with fails(OutputError, "a.partial", "has 4 bytes", f"the job writes {nbytes}", "--resume"):
        PartialFile(tmp_path / "a", nbytes, opening)
    assert (tmp_path / "a.partial").read_bytes() == b"half"
    PartialFile(tmp_path / "a", 4, Opening.RESUME).publish()
    assert (tmp_path / "a").read_bytes() == b"half"


def test_the_descriptor_outlives_a_write_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed under a writing thread could be another file's by the time its bytes arrive."""
    entered, released = threading.Event(), threading.Event()
    seen: list[int] = []
    pwrite = os.pwrite

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        entered.set()
        assert released.wait(60)
        seen.append(os.fstat(descriptor).st_ino)
        return pwrite(descriptor, data, offset)

    file = PartialFile(tmp_path / "a", 4)
    inode = (tmp_path / "a.partial").stat().st_ino
    monkeypatch.setattr("os.pwrite", slow)
    thread = threading.Thread(target=file.write_at, args=(0, b"data"))
    thread.start()
    assert entered.wait(60)
    file.discard()
    released.set()
    thread.join()
    assert seen == [inode]
    with pytest.raises(ValueError, match="closed"):
        file.write_at(0, b"data")


# Disks and folders that do not take it


def test_a_disk_known_to_be_too_small_is_not_filled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("asked for more than is free"))
    disk = os.statvfs(tmp_path)
    whole = disk.f_blocks * disk.f_frsize
    with fails(StorageError, "no space", f"{whole:,} bytes are needed", "free", str(tmp_path / "a")):
        PartialFile(tmp_path / "a", whole)
    assert list(tmp_path.iterdir()) == []


def test_what_others_may_not_use_is_not_counted_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system keeps a part back, for itself or for root."""
    fstatvfs = os.fstatvfs

    def with_all_kept_back(descriptor: int) -> os.statvfs_result:
        fields = list(fstatvfs(descriptor))
        fields[4] = 1  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr("os.fstatvfs", with_all_kept_back)
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("asked for more than is free"))
    with fails(StorageError, "no space"):
        PartialFile(tmp_path / "a", 1 << 20)


def test_an_allocation_that_fails_late_gives_back_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the message says how much is free."""
    allocate, statvfs, lengths = os.posix_fallocate, os.statvfs, []

    def short(descriptor: int, start: int, nbytes: int) -> None:
        allocate(descriptor, start, nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    def noted(folder: Path) -> os.statvfs_result:
        lengths.append((tmp_path / "a.partial").stat().st_blocks)
        return statvfs(folder)

    monkeypatch.setattr("os.posix_fallocate", short)
    monkeypatch.setattr("os.statvfs", noted)
    with fails(StorageError, "no space", "1,048,576 bytes are needed"):
        PartialFile(tmp_path / "a", 1 << 20)
    assert lengths == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_room_for_one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs = os.statvfs

    def without_inodes(folder: Path) -> os.statvfs_result:
        fields = list(statvfs(folder))
        fields[5:8] = 1000, 0, 0  # f_files, f_ffree, f_favail
        return os.statvfs_result(fields)

    monkeypatch.setattr("os.statvfs", without_inodes)
    monkeypatch.setattr("os.open", failing_with(errno.ENOSPC))
    with fails(StorageError, "no space", "4 bytes are needed", "no inodes are left"):
        PartialFile(tmp_path / "a", 4)


def test_the_users_limit_on_file_sizes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, limits[1]))
    try:
        with fails(StorageError, "ulimit", str(tmp_path / "a")):
            PartialFile(tmp_path / "a", 60_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_too_many_open_files_is_told_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.open", failing_with(errno.EMFILE))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with fails(StorageError, f"may have {limit:,} files open: raise the limit (ulimit -n)", str(tmp_path / "a")):
        PartialFile(tmp_path / "a", 4)


@pytest.mark.parametrize(
    ("code", "word"),
    [(errno.ENOSPC, "no space"), (errno.EDQUOT, "quota"), (errno.EIO, "EIO"), (errno.ESTALE, "ESTALE")],
)
def test_a_disk_that_fails_while_writing(code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PartialFile(tmp_path / "a", 4)
    for call, step in (("os.pwrite", lambda: file.write_at(0, b"data")), ("os.fsync", file.publish)):
        monkeypatch.setattr(call, failing_with(code))
        with fails(StorageError, word, str(tmp_path / "a")):
            step()
        monkeypatch.undo()
    file.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "word"), [(errno.EACCES, "permissions"), (errno.EROFS, "read-only"), (errno.EPERM, "permissions")]
)
def test_a_folder_that_may_not_be_written_to(
    code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.open", failing_with(code))
    monkeypatch.setattr(Path, "mkdir", failing_with(code))
    with fails(OutputError, word, f"the folder {tmp_path}"):
        PartialFile(tmp_path / "a", 4)
    with fails(OutputError, word, f"the folder {tmp_path}"):
        PartialFolder(tmp_path / "a", may_replace=lambda _: True)


def test_an_output_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is told at once, though a second try would succeed: only late files are tried again."""
    real = os.unlink
    tried: list[Any] = []

    def failing_once(*arguments: Any, **options: Any) -> None:
        tried.append(arguments)
        if len(tried) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*arguments, **options)

    for made in (PartialFile(tmp_path / "a", 4), filled(tmp_path / "b", "x")):
        tried.clear()
        monkeypatch.setattr(os, "unlink", failing_once)
        with fails(StorageError, "EIO", str(made.final)):
            made.discard()
        monkeypatch.undo()
        assert len(tried) == 1
        assert made.path.exists()


@pytest.mark.parametrize("step", ["rmdir", "unlink"])
def test_a_folder_is_removed_with_what_comes_and_goes_meanwhile(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, disturbed = PartialFolder(tmp_path / "a", may_replace=lambda _: True), []
    (folder.inside / "0").write_bytes(b"begun")
    real = getattr(os, step)

    def disturbing(*arguments: Any, **options: Any) -> None:
        if not disturbed:
            disturbed.append(step)
            (folder.inside / "1").touch() if step == "rmdir" else real(folder.inside / "0")
        real(*arguments, **options)

    monkeypatch.setattr(os, step, disturbing)
    folder.discard()
    assert disturbed
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with fails(OutputError, "does not exist", str(tmp_path / "absent")):
        PartialFile(tmp_path / "absent" / "a", 4)
    with fails(OutputError, "not a folder", str(tmp_path / "file")):
        PartialFile(tmp_path / "file" / "a", 4)
    with fails(OutputError, "shorter"):
        PartialFile(tmp_path / ("a" * 250), 4)


# Folders


def filled(final: Path, text: str) -> PartialFolder:
    folder = PartialFolder(final, may_replace=lambda older: (older / "ours").exists())
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "chunk").write_text(text)
    (folder.path / "ours").touch()
    return folder


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_replaces_an_older_one_of_its_kind(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(partial, "_exchanged", lambda *_: False)
    for text in ("old", "new"):
        folder = filled(tmp_path / "a", text)
        folder.publish()
        folder.discard()
        assert [found.name for found in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a" / "deep" / "chunk").read_text() == text


def test_files_are_put_into_a_folder_whole_and_read_back(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "a", may_replace=lambda older: False)
    folder.put("c/0/1", [b"first ", memoryview(b"chunk")])
    folder.put("c/0/1", [b"again"])
    assert (folder.path / "c/0/1").read_bytes() == b"again"
    with os.fdopen(folder.open_file("c/0/1")) as file:
        assert file.read() == "again"
    with pytest.raises(FileNotFoundError):
        folder.open_file("d/0", os.O_WRONLY | os.O_CREAT)

    def fails() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the codec fails")

    with pytest.raises(RuntimeError, match="the codec fails"):
        folder.put("c/0/2", fails())
    (folder.path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        folder.put("link/stolen", [b"outside"])
    (folder.path / "link").unlink()
    folder.publish()
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()] == ["a/c/0/1"]


def test_a_discarded_folder_leaves_the_old_one(tmp_path: Path) -> None:
    filled(tmp_path / "a", "old").publish()
    folder = filled(tmp_path / "a", "new")
    folder.discard()
    folder.discard()
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "old"


def test_without_an_exchange_a_failed_rename_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "a", "old").publish()
    folder = filled(tmp_path / "a", "new")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "a.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(partial, "_exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", failing)
    with fails(StorageError, "EIO"):
        folder.publish()
    monkeypatch.undo()
    folder.discard()
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "old"


@pytest.mark.parametrize("killed", ["between the renames", "before the older one was removed"])
def test_without_an_exchange_what_a_killed_run_left_is_not_in_the_way(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_exchanged", lambda *_: False)
    filled(tmp_path / "a", "old").publish()
    (tmp_path / "a").rename(tmp_path / "a.partial.older")
    if killed == "before the older one was removed":
        shutil.copytree(tmp_path / "a.partial.older", tmp_path / "a")
    filled(tmp_path / "a", "new").publish()
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "new"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_other_things_under_the_name_are_never_replaced(kind: str, tmp_path: Path) -> None:
    if kind == "link":
        (tmp_path / "a").symlink_to(tmp_path)
    else:
        (tmp_path / "a").mkdir() if kind == "folder" else (tmp_path / "a").touch()
    with fails(OutputError, str(tmp_path / "a")):
        PartialFolder(tmp_path / "a", may_replace=lambda _: kind != "folder")
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("opening", [Opening.RESUME, Opening.JOIN])
def test_a_file_is_no_partial_folder(opening: Opening, tmp_path: Path) -> None:
    (tmp_path / "a.partial").touch()
    with fails(OutputError, str(tmp_path / "a")):
        PartialFolder(tmp_path / "a", may_replace=lambda _: True, opening=opening)
    assert (tmp_path / "a.partial").is_file()


@pytest.mark.parametrize("newer", [True, False])
def test_a_run_killed_while_it_replaced_a_folder_leaves_one_result(newer: bool, tmp_path: Path) -> None:
    partial.settle_older(tmp_path / "a")  # nothing to settle
    filled(tmp_path / "a", "old").publish()
    (tmp_path / "a").rename(tmp_path / "a.partial.older")
    if newer:
        filled(tmp_path / "b", "new").publish()
        (tmp_path / "b").rename(tmp_path / "a")
    partial.settle_older(tmp_path / "a")
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == ("new" if newer else "old")


def test_an_older_folder_that_cannot_be_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.partial.older").mkdir()
    monkeypatch.setattr(os, "rename", failing_with(errno.EIO))
    with fails(StorageError, "EIO", str(tmp_path / "a")):
        partial.settle_older(tmp_path / "a")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("old", "new"):
        filled(Path("a"), text).publish()
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "new"


class CLibrary:
    """Without some functions, and with some that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **codes: int | None) -> None:
        self.codes, self.called = codes, []  # type: list[tuple[str, Any]]
        monkeypatch.setattr(partial.ctypes, "CDLL", lambda name, *, use_errno: self)

    def __getattr__(self, name: str) -> Any:
        code = self.codes.get(name)
        if code is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.called.append((name, arguments))
            partial.ctypes.set_errno(code)
            return -1 if code else 0

        return call


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_systems_that_cannot_exchange_names(
    code: int | None, tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "a", "old").publish()
    library = CLibrary(monkeypatch, syncfs=0, renameat2=code)
    steps.clear()
    folder = filled(tmp_path / "a", "new")
    descriptor = folder._descriptor
    folder.publish()
    assert library.called[0] == ("syncfs", (descriptor,))
    assert steps[:2] == ["rename a.partial.older", "rename a"]
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "new"


def test_names_that_cannot_be_exchanged_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "a", "old").publish()
    folder = filled(tmp_path / "a", "new")
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(os.path, "lexists", lambda _: True)
    partial.ctypes.set_errno(0)
    with fails(OutputError, str(tmp_path / "a"), "takes no new files"):
        folder.publish()
    CLibrary(monkeypatch, syncfs=0, renameat2=errno.EIO)
    with fails(StorageError, "Input/output error (EIO)", str(tmp_path / "a")):
        folder.publish()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a.partial", "elsewhere"]


def test_a_folder_is_synced_on_demand_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "a", "x")
    partial.ctypes.set_errno(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        partial.sync_file_system(-1)
    library = CLibrary(monkeypatch, syncfs=0)
    folder.flush()
    library.codes["syncfs"] = errno.EIO
    for step in (folder.flush, folder.publish):
        with fails(StorageError, "Input/output error (EIO)", str(tmp_path / "a")):
            step()
    assert library.called == [("syncfs", (folder._descriptor,))] * 3
    CLibrary(monkeypatch)
    everything: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: everything.append("synced"))
    folder.flush()
    assert everything == ["synced"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_file_systems_that_cannot_sync_a_folder(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing_with(code))
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            partial.sync_folder(tmp_path)
    else:
        partial.sync_folder(tmp_path)


def test_a_folder_that_another_run_writes_is_left_to_it(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a", "mine")
    with fails(OutputError, "another run"):
        filled(tmp_path / "a", "theirs")
    folder.publish()
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "mine"


def test_a_folder_that_another_run_has_replaced_is_left_to_it(tmp_path: Path) -> None:
    late = filled(tmp_path / "a", "late")
    (tmp_path / "a.partial").rename(tmp_path / "elsewhere")
    following = filled(tmp_path / "a", "following")
    with fails(OutputError, "a.partial", "replaced"):
        late.publish(lambda: pytest.fail("sealed"))
    late.discard()
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "elsewhere" / "deep" / "chunk").read_text() == "late"
    following.publish()
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "following"


def test_a_joined_folder_is_neither_published_nor_removed(tmp_path: Path) -> None:
    owner = filled(tmp_path / "a", "mine")
    joined = PartialFolder(tmp_path / "a", may_replace=lambda _: True, opening=Opening.JOIN)
    with pytest.raises(ValueError, match="owned by another process"):
        joined.publish()
    joined.discard()
    owner.publish()
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "mine"


def test_a_folder_that_its_owner_has_just_published_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = filled(tmp_path / "a", "mine")
    before_locking(monkeypatch, owner.publish)
    with fails(OutputError, "a.partial", "published or removed", "--resume"):
        PartialFolder(tmp_path / "a", may_replace=lambda _: True, opening=Opening.RESUME)
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "mine"


@pytest.mark.parametrize("abandoned", [True, False])
def test_of_two_that_begin_the_same_folder_one_has_it(
    abandoned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other comes between, before this one has locked what was abandoned, or what it has made itself."""
    if abandoned:
        filled(tmp_path / "a", "abandoned").keep()
    others: list[PartialFolder] = []
    before_locking(monkeypatch, lambda: others.append(filled(tmp_path / "a", "theirs")))
    with fails(OutputError, "a.partial", "another run"):
        filled(tmp_path / "a", "mine")
    (other,) = others
    other.publish()
    assert (tmp_path / "a" / "deep" / "chunk").read_text() == "theirs"


@pytest.mark.parametrize("exchange", [True, False])
def test_publish_makes_a_folder_durable_before_the_name_and_removes_the_older_one_last(
    exchange: bool, tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(partial, "_exchanged", lambda *_: False)
    filled(tmp_path / "a", "old").publish()
    assert steps == ["sync all", "rename a", f"sync {tmp_path.name}"]
    folder = filled(tmp_path / "a", "new")
    steps.clear()
    folder.publish(lambda: steps.append("sealed"))
    renames, older = (
        (["swap"], "a.partial") if exchange else (["rename a.partial.older", "rename a"], "a.partial.older")
    )
    assert steps == ["sync all", "sealed", *renames, f"sync {tmp_path.name}", f"remove {older}"]


@pytest.fixture
def memory_folder():
    """A folder on tmpfs, where files are written as memory."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_threads_write_to_a_file_in_memory(memory_folder, monkeypatch):
    data = np.random.default_rng(1).integers(0, 256, 1_000_003).astype(np.uint8)
    file = PartialFile(memory_folder / "a", len(data))
    monkeypatch.setattr("os.pwrite", None)
    starts = list(range(0, len(data), 10_007))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda start: file.write_at(start, data[start : start + 10_007].tobytes()), starts))
    joined = PartialFile(memory_folder / "a", len(data), Opening.JOIN)
    joined.write_at(5, b"joined")
    data[5:11] = np.frombuffer(b"joined", np.uint8)
    joined.discard()
    read = np.empty_like(data)
    file.read_at(0, read.data)
    np.testing.assert_array_equal(read, data)
    monkeypatch.undo()
    file.write_at(len(data), b"beyond what was reserved")
    file.publish()
    assert (memory_folder / "a").read_bytes() == data.tobytes() + b"beyond what was reserved"


def test_nothing_is_written_into_a_folder_that_took_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by one that comes back between looking at the name and writing: its path leads to what was removed."""
    final = tmp_path / "a.zarr"
    first = PartialFolder(final, lambda _: True)
    late = PartialFolder(final, lambda _: True, Opening.JOIN)
    first.discard()
    second = PartialFolder(final, lambda _: True)
    with pytest.raises(OutputError, match=r"a\.zarr\.partial: was removed or replaced"), late.in_use():
        pytest.fail("the name is another's")
    monkeypatch.setattr(partial, "is_at", lambda *_: True)
    with pytest.raises(OutputError, match=r"a\.zarr\.partial: was removed or replaced"), late.in_use():
        (late.inside / "chunk").write_bytes(b"late")
    with second.in_use():
        (second.inside / "chunk").write_bytes(b"right")
    assert {path.name: path.read_bytes() for path in second.path.iterdir()} == {"chunk": b"right"}
    late.keep()
    second.publish()
    with pytest.raises(ValueError, match="used after it was closed"), second.in_use():
        pass
